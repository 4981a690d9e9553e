"""The GPU script itself, on the CPU with a small model."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _measure import Printer

SECTIONS = ("equal_text", "varlen", "graphs", "record", "knee", "depths", "train")


def test_all_sections_run_and_the_file_holds_them(benchmarks: Path, tmp_path: Path) -> None:
    command = ["bash", str(benchmarks / "gpu_check.sh"), "found.json", "--tiny"]
    settings = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    last = json.loads(run.stdout.splitlines()[-1])
    assert (last["ok"], last["failed"], last["skipped"]) == (True, [], [])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    document = json.loads((tmp_path / "found.json").read_text())
    sections = document["sections"]
    assert tuple(sections) == SECTIONS
    assert document["ok"] is True
    assert sections["equal_text"]["differences"] == 0
    assert sections["equal_text"]["texts"] == 2 * 5 * 6
    rows = sections["depths"]["rows"]
    assert [(r["batch"], r["depth"]) for r in rows] == [(b, k) for b in (1, 4) for k in range(9)]
    lengths = [sections["depths"]["acceptance_length"][str(k)] for k in range(9)]
    assert lengths[0] == 1
    assert lengths[8] > lengths[1] > 1
    assert sections["knee"]["cost_model"]["measured"] is True
    policies = {row["policy"] for row in sections["train"]["rows"]}
    assert policies == {"off", "fixed:1", "fixed:2", "fixed:4", "fixed:8", "heuristic", "learned"}
    # CPU time, since the machine may be shared.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60


def test_without_the_training_packages_training_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _gpu_train
    from _gpu_common import TINY, Check, Skip

    for module in [name for name in sys.modules if name.startswith("specdepth.agents.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    check = Check(
        scale=TINY,
        device=torch.device("cpu"),
        out=tmp_path / "found.json",
        deadline_s=math.inf,
        printer=Printer(),
        seed=0,
        document={},
    )
    monkeypatch.setattr(Check, "need_decoder", lambda self: None)
    with pytest.raises(Skip, match="the package stable_baselines3 is not installed"):
        _gpu_train.train(check)


def test_time_that_is_over_skips_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check

    assert gpu_check.main([str(tmp_path / "found.json"), "--tiny", "--minutes", "0"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["skipped"] == list(SECTIONS)


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "found.json")]) == 2
    assert "--tiny" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_section_that_fails_leaves_the_others_and_the_exit_status_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_check

    def broken(check: object) -> dict[str, object]:
        raise RuntimeError("lost device")

    def fine(check: object) -> dict[str, object]:
        return {"value": 1}

    for name, section in (("equal_text", broken), ("varlen", fine)):
        section.__name__ = name
        monkeypatch.setattr(gpu_check, name, section)
    monkeypatch.setattr(gpu_check, "graphs", fine)
    for name in ("record", "knee", "depths", "train"):
        monkeypatch.setattr(gpu_check, name, fine)
    out = tmp_path / "found.json"
    assert gpu_check.main([str(out), "--tiny"]) == 1
    document = json.loads(out.read_text())
    assert document["ok"] is False
    assert document["sections"]["equal_text"]["error"] == "RuntimeError: lost device"
    assert document["sections"]["varlen"]["value"] == 1
