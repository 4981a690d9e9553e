"""The benchmark of causal rules on a small made-up trace: every rule, and where it was chosen."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdepth.agents.replay_evaluate import evaluate_replay
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from causal_rules import main

    folder = tmp_path_factory.mktemp("rules")
    trace, cost = folder / "made.npz", folder / "cost.json"
    make_trace(72, num_tokens=8).save(trace)
    CostModel.linear(base_s=0.05, token_s=0.004, knee=4, name="made").save(cost)
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        main(["--quick", "--trace", str(trace), "--cost", str(cost), "--survival", "match"])
    assert len(lines) > 30  # tables for people come first
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_line_holds_every_rule_at_every_load(line: dict[str, Any]) -> None:
    assert line["benchmark"] == "causal_rules"
    assert list(line["loads"]) == list(line["loads_without_looping"]) == ["4", "16"]
    rules = set(line["loads"]["4"])
    assert {"off", "fixed:4", "tuned-table", "shrunk:tuned-by-load", "svip"} < rules
    assert {"oracle:hindsight", "oracle:one-depth", "oracle:best-fixed"} < rules
    for ratios in (*line["loads"].values(), *line["loads_without_looping"].values()):
        assert set(ratios) == rules
        fixed = [v for name, v in ratios.items() if name == "off" or name.startswith("fixed:")]
        assert max(fixed) == ratios["oracle:best-fixed"] == 1
        assert ratios["oracle:hindsight"] > max(
            value for name, value in ratios.items() if "oracle" not in name
        )


def test_the_strongest_rule_is_the_best_of_the_training_split(line: dict[str, Any]) -> None:
    strongest = line["strongest"]
    scores = strongest["training_tok_s"]
    assert strongest["name"] == max(scores, key=scores.__getitem__)
    assert not any("oracle" in name or name.startswith("fixed:") for name in scores)
    for load, figures in strongest["loads"].items():
        ratios = line["loads"][load]
        assert figures["ratio_to_best_fixed"] == pytest.approx(ratios[strongest["name"]], abs=1e-4)
        low, high = figures["interval"]
        assert low <= figures["ratio_to_best_fixed"] <= high
        assert figures["ratio_to_off"] == pytest.approx(
            ratios[strongest["name"]] / ratios["off"], rel=1e-3
        )


@pytest.mark.parametrize("load", [1, 4])
def test_stops_between_draft_passes_are_the_deepest_fixed_depth_with_prompt_lookup(
    load: int,
) -> None:
    from causal_rules import make_all

    from specdepth.agents.default_rules import STOPS

    trace = make_trace(18, num_tokens=8)
    rules = make_all([*STOPS, "fixed:4"], trace.info)
    found = evaluate_replay(trace, CostModel.linear(), rules, [load], oracles=False)
    assert len({found.runs[load].makespan_s[name] for name in rules}) == 1


def test_some_requests_alone_have_a_best_fixed_depth_of_their_own() -> None:
    from causal_rules import ratios_of

    from specdepth.agents.load_runs import LoadRuns
    from tests.agents.test_comparison import served

    run = LoadRuns(("off", "fixed:1", "rule"))
    times = {"off": [1.0, 1.0], "fixed:1": [0.25, 2.0], "rule": [0.5, 0.5]}
    run.add([4, 7], 0, {name: served([10, 10], seconds) for name, seconds in times.items()})
    assert ratios_of(run) == {"off": 1.0, "fixed:1": 0.8889, "rule": 2.0}
    assert ratios_of(run, [4]) == {"off": 0.25, "fixed:1": 1.0, "rule": 0.5}
