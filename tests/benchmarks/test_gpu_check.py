"""The GPU script itself, on the CPU with a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECTIONS = ("equal_text", "varlen", "graphs", "record", "knee", "depths", "train")

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("gymnasium", "stable_baselines3"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def _run(
    benchmarks: Path, cwd: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(benchmarks / "gpu_check.sh"), *arguments]
    settings = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        command, cwd=cwd, env=settings, capture_output=True, text=True, check=False
    )


def test_all_sections_run_and_the_file_holds_them(benchmarks: Path, tmp_path: Path) -> None:
    run = _run(benchmarks, tmp_path, "found.json", "--tiny")
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
    assert sum(part["seconds"] for part in sections.values()) < 60


def test_without_the_training_packages_training_alone_is_skipped_by_name(
    benchmarks: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    (tmp_path / "out").mkdir()
    run = _run(benchmarks, tmp_path / "out", "--tiny", PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    sections = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]
    assert [name for name in SECTIONS if sections[name]["status"] != "done"] == ["train"]
    assert sections["train"]["reason"] == "the package stable_baselines3 is not installed"


def test_time_that_is_over_skips_what_is_left(benchmarks: Path, tmp_path: Path) -> None:
    run = _run(benchmarks, tmp_path, "--tiny", "--minutes", "0")
    assert run.returncode == 0
    assert json.loads(run.stdout.splitlines()[-1])["skipped"] == list(SECTIONS)


def test_without_a_gpu_it_says_so(benchmarks: Path, tmp_path: Path) -> None:
    run = _run(benchmarks, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 2
    assert "--tiny" in run.stderr
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
