"""Each benchmark runs on a tiny model and ends with its JSON line; what it says is not judged here."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agents.made_trace import make_trace

Script = Callable[..., dict[str, Any]]


@pytest.fixture
def script(tiny_target: str, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs a benchmark's `main` and returns its last line."""

    def run(name: str, *arguments: str) -> dict[str, Any]:
        module = importlib.import_module(name)
        module.main(["--quick", "--target", tiny_target, "--seed", "3", *arguments])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 2  # a table for people comes first
        found: dict[str, Any] = json.loads(lines[-1])
        assert found["benchmark"] == name
        assert (found["seed"], found["quick"], found["target"]) == (3, True, "tiny")
        assert found["n"] > 0
        assert found["machine"]["threads"] == 1
        return found

    return run


def _is_interval(low_high: list[float], value: float) -> bool:
    return low_high[0] <= value <= low_high[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ragged_cost(script: Script, dtype: str) -> None:
    found = script("ragged_cost", "--as-is", "--dtype", dtype)
    assert found["dtype"] == dtype
    for key in ("ratio", "packing", "floor"):
        assert found[key] > 0
        assert _is_interval(found[f"{key}_interval"], found[key])
        assert found[f"{key}_wall"] > 0
    assert "ratio_avx512" not in found


def test_ragged_cost_counts_each_matrix_of_a_pass_once(tiny_target: str) -> None:
    from _workload import load_decoder
    from ragged_cost import linear_layers

    decoder = load_decoder(tiny_target, max_num_seqs=2)
    layers = linear_layers(decoder)
    # q k v joined or not, o, gate and up joined or not, down: and the head, which is tied or not.
    assert len(layers) in (2 * 4 + 1, 2 * 7 + 1)
    outputs = sum(layer.out_features for _, layer in layers)
    assert outputs == 2 * ((32 + 16 + 16) + 32 + (64 + 64) + 32) + 96


def test_depth_zero(script: Script) -> None:
    found = script("depth_zero")
    for size in (1, 8, 32):
        assert _is_interval(found[f"ratio_{size}_interval"], found[f"ratio_{size}"])
        assert found[f"search_us_{size}"] > 0
    assert _is_interval(found["ratio_interval"], found["ratio"])
    assert found["n"] == 3 * 8


def test_decision_cost(script: Script) -> None:
    found = script("decision_cost")
    assert 0 < found["microseconds"] <= found["microseconds_p95"]
    assert 0 < found["share"] < 1
    assert found["layer_sizes"][1:] == [64, 64, 33]
    assert found["num_seqs"] == 32
    assert 0 < found["offset_microseconds"] <= found["offset_microseconds_p95"]
    assert len(found["offset_layer_sizes"]) == 3
    assert found["offset_layer_sizes"][-1] == 32


def test_decision_cost_of_a_named_policy(script: Script) -> None:
    found = script("decision_cost", "--policy", "fixed:2")
    assert found["policy"] == "fixed:2"
    assert 0 < found["microseconds"] < found["offset_microseconds"]
    assert found["layer_sizes"] == []


def test_the_policy_of_offsets_decides_as_its_rule() -> None:
    from decision_cost import RULE, Observed, _replay, offset_policy

    from specdepth.scheduler.baselines import make_scheduler

    observed, rule = Observed(offset_policy()), make_scheduler(RULE)
    _replay(observed, num_requests=4)
    states = [state for state in observed.states if state.num_running == 4][:40]
    depths = [observed.policy.choose(state) for state in states]
    assert any(depth.any() for depth in depths)
    same = [(one == rule.choose(state)).all() for one, state in zip(depths, states, strict=True)]
    assert np.mean(same) > 0.9  # the last bits of the logits may differ


def test_engine_overhead(script: Script) -> None:
    found = script("engine_overhead", "--profile")
    for size in (1, 8, 32):
        assert 0 < found[f"engine_us_{size}"] <= found[f"outside_us_{size}"]
        assert 0 < found[f"share_{size}"] < 1
    assert found["ratio"] == pytest.approx(found["engine_us_32"] / found["engine_us_1"], abs=0.01)
    slope = (found["engine_us_32"] - found["engine_us_1"]) / 31
    assert found["us_per_sequence"] == pytest.approx(slope, abs=0.1)


def test_versus_transformers(script: Script) -> None:
    found = script("versus_transformers", "--new-tokens", "6", "--prompts", "4")
    assert found["ratio"] == min(found["batch8"], found["batch1_lookup"])
    assert found["best_depth"] in (2, 3, 4, 5, 6, 8)
    for key in ("batch8", "batch1_lookup"):
        speedup = found[f"{key}_tok_s"] / found[f"{key}_transformers_tok_s"]
        assert found[key] == pytest.approx(speedup, rel=0.01)
        assert 0 <= found[f"equal_text_{key}"] <= 1
    assert found["n"] == 4


def test_both_sides_of_versus_transformers_go_on_past_end_tokens(tiny_target: str) -> None:
    from _comparison import ours
    from _workload import load_decoder, load_plain
    from versus_transformers import _never_end, generate

    plain = load_plain(tiny_target)
    _never_end(plain)
    prompts = [[1, 2, 3], [7, 6, 5, 4, 3]]
    texts = generate(plain, 40)(prompts)
    decoder = load_decoder(tiny_target, max_num_seqs=2)
    assert [len(t) for t in texts] == [len(t) for t in ours(decoder, 40, 3)(prompts)] == [40, 40]
    lookup = generate(plain, 40, prompt_lookup_num_tokens=4)
    assert [len(t) for t in lookup(prompts[:1])] == [40]


def test_equal_text_is_the_share_before_the_first_difference() -> None:
    from _comparison import _equal_share

    assert _equal_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert _equal_share([1, 2], [1, 2]) == 1.0
    assert _equal_share([1, 2], [3, 2]) == 0.0


def test_versus_vllm_says_how_to_set_it_up(capsys: pytest.CaptureFixture[str]) -> None:
    import versus_vllm

    assert versus_vllm.main([]) == 2
    assert "--python" in capsys.readouterr().out


def test_cost_model_error(script: Script) -> None:
    found = script("cost_model_error")
    assert 0 <= found["median"] <= found["p95"]


@pytest.mark.parametrize(
    ("trace", "options", "verification"),
    [
        ("smollm2-prompt-lookup-greedy", (), "greedy"),
        ("smollm2-prompt-lookup-t0.7", (), "coupled"),
        ("smollm2-prompt-lookup-t0.7", ("--verification", "rejection"), "rejection"),
    ],
)
def test_live_confirmation(
    script: Script, trace: str, options: tuple[str, ...], verification: str
) -> None:
    names = ("fixed:2", "ema-greedy")
    few = ("--minutes", "0", "--new-tokens", "4", "--trace", trace)
    found = script("live_confirmation", *few, *options, "--policies", *names)
    assert found["verification"] == verification
    assert 0 <= found["agree"] <= 1
    assert set(found["ratios"]) == {"1"}
    for name in names:
        cell = found["ratios"]["1"][name]
        assert cell["live"] > 0
        assert cell["replay"] > 0
    assert found["bias"]["1"] > 0


def test_replay_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import replay_speed

    trace = tmp_path / "made.npz"
    make_trace(20, num_tokens=6).save(trace)
    replay_speed.main(["--quick", "--trace", str(trace), "--policies", "greedy:match"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["sequence_rounds_per_second"] == found["by_policy"]["fixed:4"] > 0
    assert found["by_policy"]["greedy:match"] > 0
    assert found["num_requests"] == 20
    assert "target" not in found


FAKE_VLLM = '''
"""Stands for vLLM, which cannot be installed here: repeats the last token of each prompt."""
from types import SimpleNamespace
__version__ = "0.0"
class SamplingParams(SimpleNamespace):
    pass
class LLM:
    def __init__(self, model, **settings):
        print("a line of vLLM's own", flush=True)
    def generate(self, prompts, sampling, use_tqdm):
        sum(i * i for i in range(100_000))
        texts = [[p["prompt_token_ids"][-1]] * sampling.max_tokens for p in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=t)]) for t in texts]
'''


def test_versus_vllm_drives_an_engine_in_another_environment(
    tmp_path: Path, tiny_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import versus_vllm

    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    options = ["--python", str(python), "--target", tiny_target, "--quick", "--new-tokens", "4"]
    assert versus_vllm.main(options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["vllm"] == "0.0"
    assert found["ratio"] == min(found["batch8"], found["batch1_lookup"])
    assert math.isfinite(found["batch8_vllm_tok_s"])
    assert found["n"] == 16


def test_a_script_runs_from_anywhere_by_its_path(benchmarks: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(benchmarks / "depth_zero.py"), "--help"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Is depth 0 free?" in run.stdout
    assert not list(tmp_path.iterdir())
