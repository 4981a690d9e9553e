"""The benchmark of learned policies on a small made-up pair: what it compares, and on which requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.offset_weights import offset_weights
from specdepth.scheduler.baselines import Off
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.policy_file import PolicyCard, save_policy
from tests.agents.made_trace import DEPTH, make_trace
from tests.agents.toy_rule import toy_rule

COST = CostModel.linear(base_s=0.05, token_s=0.004, knee=4, name="made")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import learned_policy

    folder = tmp_path_factory.mktemp("pair")
    make_trace(72, num_tokens=8).save(folder / "made.npz")
    COST.save(folder / "cost.json")
    for name, pair in (("local", "made + prompt-lookup"), ("universal", "any")):
        card = PolicyCard(
            model_pair=pair, drafter="prompt-lookup", max_num_speculative_tokens=DEPTH
        )
        save_policy(folder / name, offset_weights(toy_rule(), {}), card)
    made = learned_policy.Pair(
        str(folder / "made.npz"), str(folder / "cost.json"), str(folder / "local")
    )
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        patch.setattr(learned_policy, "PAIRS", {"made": made})
        seeds = ["--seeds", str(folder / "local")]
        universal = ["--universal", str(folder / "universal")]
        learned_policy.main(["--quick", "--pairs", "made", *universal, *seeds])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_line_holds_what_the_bars_ask_for(line: dict[str, Any]) -> None:
    pair = line["pairs"]["made"]
    assert pair["ci_low"] <= pair["varying_vs_strongest"] <= pair["ci"][1]
    for key in ("varying_vs_best_single", "varying_vs_table", "varying_vs_off", "microseconds"):
        assert pair[key] > 0
    for other in ("strongest", "off", "best_fixed"):
        worst = min(row[f"vs_{other}"] for row in pair["loads"].values())
        assert pair[f"worst_constant_vs_{other}"] == worst
    gaps = [row["gap_closed"] for row in pair["loads"].values()]
    assert pair["oracle_gap_closed"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert all(row["oracle_vs_best_fixed"] > 1 for row in pair["loads"].values())
    assert set(pair["strongest"]) == {"1", "4", "varying"}
    assert set(pair["varying_vs_rules"]) >= set(pair["strongest"].values())
    assert pair["varying_vs_rules"][pair["strongest"]["varying"]] == pair["varying_vs_strongest"]


def test_equal_policies_get_equal_figures(line: dict[str, Any]) -> None:
    """The universal policy and the other seed are the very same network here."""
    pair = line["pairs"]["made"]
    assert pair["universal_vs_local"] == 1
    assert list(pair["seeds"].values()) == [pair["varying_vs_strongest"]]


def test_the_strongest_rule_is_chosen_on_training_requests() -> None:
    """Held-out requests may say otherwise, and are not asked."""
    from learned_policy import fastest, on_training

    from specdepth.scheduler.baselines import FixedDepth

    trace = make_trace(72, num_tokens=8)
    runs = np.array(trace.accepted)
    for row in range(trace.num_requests):
        text = slice(trace.starts[row], trace.starts[row] + trace.num_tokens[row])
        right = np.minimum(trace.proposal_length, np.repeat(trace.num_tokens, trace.num_tokens))
        left = np.arange(trace.num_tokens[row], 0, -1)
        runs[text] = 0 if trace.held_out[row] else np.minimum(right[text], left)
    from dataclasses import replace

    rules: dict[str, DepthScheduler] = {"off": Off(), "deep": FixedDepth(DEPTH)}
    found = on_training(replace(trace, accepted=runs), COST, rules, (1,), 0)
    assert fastest(found, rules) == {1: "deep", "varying": "deep"}
    assert fastest(found, ["off"])[1] == "off"


def test_rules_over_a_fitted_model_are_not_hand_made() -> None:
    from learned_policy import hand_made

    from specdepth.agents.default_rules import default_rules
    from specdepth.decoder.trace_files import load_trace

    info = load_trace("default").info
    names = default_rules(info)
    rest = set(names) - set(hand_made(names, info))
    assert {"rule:smollm2-prompt-lookup-cpu-bf16", "greedy:smollm2-prompt-lookup"} < rest
    assert all("smollm2" in name for name in rest)


def test_an_unknown_pair_is_refused(tmp_path: Path) -> None:
    from learned_policy import main

    with pytest.raises(SystemExit, match="no pair 'x'; there are prompt-lookup, eagle3"):
        main(["--pairs", "x"])
