"""The study of memory pressure on a small made-up trace, and its figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from specdepth.agents.offset_weights import offset_weights
from specdepth.agents.pressure_weights import pressure_weights, sees_memory
from specdepth.scheduler.policy_file import PolicyCard, read_policy, save_policy
from tests.agents.toy_rule import save_toy_rule, toy_rule
from tests.envs.toy_trace import COST, toy_trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, a cost model, and a policy that drafts next to nothing where memory is short."""
    folder = tmp_path_factory.mktemp("memory")
    toy_trace(48).save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    seeing = pressure_weights(offset_weights(toy_rule(), {}), np.array([2.0, -6.0, 0.0]))
    card = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)
    save_policy(folder / "seeing", seeing, card)
    return folder


def run(folder: Path, policy: str, *more: str) -> dict[str, Any]:
    from memory_pressure import main

    lines: list[str] = []
    given = ["--trace", str(folder / "toy.npz"), "--cost", str(folder / "cost.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: lines.append(text))
        main(["--quick", *given, "--policy", policy, *more])
    found: dict[str, Any] = json.loads(lines[-1])
    assert found["benchmark"] == "memory_pressure"
    return found


def test_sight_of_memory_shows_where_the_pool_is_small_and_nowhere_else(folder: Path) -> None:
    figure = folder / "figures" / "depth.svg"
    found = run(folder, f"policy:{folder / 'seeing'}", "--figure", str(figure))
    pools = found["pools"]["constant 8"]
    assert list(pools) == ["1", "0.5"]
    roomy, small = pools["1"], pools["0.5"]
    assert roomy["num_kv_blocks"] == pytest.approx(2 * small["num_kv_blocks"], abs=1)
    assert small["blind"]["preemptions"] > roomy["blind"]["preemptions"]
    assert small["seeing"]["mean_depth"] < 0.9 * small["blind"]["mean_depth"]
    assert small["clip"]["preemptions"] < small["blind"]["preemptions"]
    for one in (roomy, small):
        assert one["interval"][0] <= one["ratio"] <= one["interval"][1]
        rates = {name: one[name]["throughput_tok_s"] for name in ("seeing", "blind", "clip")}
        assert one["ratio"] == pytest.approx(rates["seeing"] / rates["blind"], abs=1e-3)
        assert one["clip_ratio"] == pytest.approx(rates["clip"] / rates["blind"], abs=1e-3)
    assert (found["sees_memory"], found["searched"]) == (True, False)
    spans = found["spans"]
    assert spans["without"]["free KV"] == 0
    assert spans["with sight of memory"]["free KV"] > 0.2
    text = ElementTree.parse(figure).getroot().attrib["aria-label"]
    assert "with sight of memory, free KV: " in text


def test_a_blind_policy_is_searched_and_saved(folder: Path) -> None:
    saved = folder / "searched"
    found = run(folder, save_toy_rule(folder), "--save", str(saved), "--loads", "4")
    assert set(found["pools"]) == {"constant 4"}
    weights, card = read_policy(saved)
    assert card.model_pair == "toy + toy"
    # 5 of the rule's model, and one if that gained anything.
    assert weights.layer_sizes[1] == 5 + found["sees_memory"]
    assert sees_memory(weights) is found["sees_memory"]
    assert found["searched"]
