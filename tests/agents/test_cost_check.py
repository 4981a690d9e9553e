from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdepth.agents import profile_command
from specdepth.agents.cli import main
from specdepth.agents.cost_check import describe_error, error_grid, error_values
from specdepth.decoder.cost_error import CostError
from specdepth.scheduler.cost import CostModel
from tests.agents.tiny_target import save_tiny_target, write_prompts

ERROR = CostError(
    predicted_s=np.array([1.04] * 10 + [0.9] * 2),
    measured_s=np.ones(12),
    num_running=np.array([1] * 4 + [3] * 4 + [5] * 4),
    num_prefill_tokens=np.array([0] * 10 + [7] * 2),
)


NOISE = CostError(np.array([1.0] * 9 + [0.8]), np.ones(10), np.ones(10, int), np.zeros(10, int))


def test_the_sentence_gives_both_figures_and_the_verdict() -> None:
    assert describe_error(ERROR, NOISE) == (
        "Held-out error of predicted round times over 12 live rounds: median 4.0 %, p95 10.0 % "
        "(bias +4.0 %); within the bars of 5 and 15 %, which hold for a quiet machine. Here, passes of one "
        "shape are off their own median by 0.0 % (median) and 11.0 % (p95)."
    )
    cheap = CostError(ERROR.predicted_s / 2, *(getattr(ERROR, n) for n in ERROR.__slots__[1:]))
    assert "; NOT within the bars" in describe_error(cheap, NOISE)


def test_the_table_splits_rounds_by_prompts_and_by_sequences() -> None:
    rows = {row[0]: row[1:] for row in error_grid(ERROR).rows}
    assert {name: row[0] for name, row in rows.items()} == {
        "all rounds": "12",
        "without prefill": "10",
        "with prefill": "2",
        "1 sequence": "4",
        "2-3 sequences": "4",
        "4-7 sequences": "4",
    }
    assert rows["with prefill"] == ("2", "1000.0", "10.0", "10.0", "-10.0")


def test_the_values_are_plain() -> None:
    assert json.loads(json.dumps(error_values(ERROR, NOISE))) == {
        "median": 0.04,
        "p95": 0.1,
        "bias": 0.04,
        "n": 12,
        "is_within_bars": True,
        "noise_median": 0.0,
        "noise_p95": 0.11,
    }


def test_profile_checks_on_held_out_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_command, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(profile_command, "NOISE_SECONDS", 0.1)
    target = save_tiny_target(tmp_path / "tiny")
    prompts = write_prompts(tmp_path / "prompts.txt")
    out = tmp_path / "profile"
    command = ["profile", "--target", str(target), "--dtype", "float32", "--device", "cpu"]
    command += ["--prompts", str(prompts), "--minutes", "0.02", "--max-new-tokens", "8"]
    assert main([*command, "--check", "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["check"]
    assert found["n"] > 0
    assert 0 <= found["median"] <= found["p95"]
    assert 0 < found["noise_median"] <= found["noise_p95"]
    assert "Held-out error of predicted round times" in captured.err
    assert "Held-out error" in (out / "report.html").read_text()
    assert CostModel.load(out / "cost.json").measured
