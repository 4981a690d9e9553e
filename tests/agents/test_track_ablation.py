"""`specdepth ablate --track`: a run for each training, and one for what they came to."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdepth.agents.ablate_grid import grid_to_dict
from specdepth.agents.cli import main
from tests.agents.offline_run import OfflineRun, files_of, offline_run
from tests.agents.test_ablate import GRID
from tests.envs.toy_trace import COST, toy_trace


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ablation of nothing but the base, on one seed."""
    folder = tmp_path_factory.mktemp("ablation")
    toy_trace(48).save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    grid = replace(GRID, variants=(), seeds=(1,), loads=(1,))
    (folder / "mine.json").write_text(json.dumps(grid_to_dict(grid)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(folder / "data"))
        arguments = [
            *("ablate", "--grid", str(folder / "mine.json"), "--out", str(folder / "out")),
            *("--trace", str(folder / "toy.npz"), "--cost", str(folder / "cost.json")),
        ]
        assert main([*arguments, "--track", "--quiet"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def tracked(out: Path) -> OfflineRun:
    return offline_run(out)


def test_a_training_is_in_the_group_of_its_variant(out):
    found = offline_run(out / "runs" / "base" / "seed-1" / "train")
    assert (found.run.run_group, found.run.job_type) == ("base", "ablate")
    (artifact,) = found.artifacts("model")
    assert artifact.name == "draft-depth-policy-base"
    assert "seed-1" in artifact.aliases


def test_the_grid_is_a_run_of_its_own(tracked):
    assert (tracked.run.run_group, tracked.run.job_type) == ("", "ablate")
    assert tracked.exit_code == 0
    assert tracked.config["track"] is True


def test_every_line_of_the_tidy_table_is_there(out, tracked):
    table = tracked.table("ablation/rows")
    with (out / "ablation.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert table["columns"] == list(lines[0])
    assert len(table["data"]) == len(lines)
    value = table["columns"].index("value")
    assert [line[value] for line in table["data"]] == [float(line["value"]) for line in lines]


def test_figures_and_files_are_kept(tracked):
    shown = tracked.history[0]
    for name in ("iqm", "learning"):
        page = tracked.folder / "files" / shown[f"ablation/{name}.path"]
        assert "<svg" in page.read_text()
    (artifact,) = tracked.artifacts("evaluation")
    assert set(files_of(artifact)) == {
        "ablation.csv",
        "results.json",
        "grid.json",
        "report.html",
    }
