"""The whole demo on a target of a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.cli import main
from specdepth.agents.console import Console
from specdepth.agents.results import Results
from specdepth.scheduler.baselines import TableDepth, make_scheduler
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.tiny_target import save_tiny_target, write_prompts


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("demo")
    target = save_tiny_target(folder / "tiny")
    prompts = write_prompts(folder / "prompts.txt")
    return [
        *("demo", "--target", str(target), "--dtype", "float32", "--device", "cpu"),
        *("--prompts", str(prompts), "--loads", "1,3", "--max-num-seqs", "4"),
        *("--fixed-depths", "2,8", "--max-new-tokens", "8", "--minutes", "0.15"),
    ]


@pytest.fixture(scope="module")
def done(
    flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], str]:
    """Folder, JSON and what a person reads of one demo."""
    import contextlib
    import io

    out = tmp_path_factory.mktemp("out") / "demo"
    printed, read = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(read):
        assert main([*flags, "--out", str(out), "--json"]) == 0
    return out, json.loads(printed.getvalue()), read.getvalue()


def test_it_leaves_pass_times_policy_results_and_report(done):
    out, found, _ = done
    assert CostModel.load(out / "cost.json").measured
    LearnedScheduler.load(found["policy"])
    assert Results.load(out / "results.json").as_mapping() == found["results"]
    page = (out / "report.html").read_text()
    assert "learned" in page
    assert "<svg" in page


def test_every_policy_is_in_the_table_at_every_load(done):
    _, found, _ = done
    rows = {
        (row["policy"], row["load"]): row
        for row in found["results"]["rows"]
        if row["metric"] == "throughput_tok_s"
    }
    policies = ("off", "fixed:2", "fixed:8", "table", "learned")
    assert set(rows) == {(policy, load) for policy in policies for load in (1, 3)}
    assert all(row["value"] > 0 and row["unit"] == "tok/s" for row in rows.values())


def test_all_did_the_same_work(done):
    _, found, _ = done
    for load in (1, 3):
        tokens = {
            row["value"]
            for row in found["results"]["rows"]
            if row["metric"] == "committed_tokens" and row["load"] == load
        }
        assert len(tokens) == 1


def test_the_table_is_made_on_training_prompts_before_the_comparison(done):
    _, found, read = done
    assert isinstance(make_scheduler(found["table"]), TableDepth)
    assert found["best_single_fixed"] in ("off", "fixed:2", "fixed:8")
    assert read.index("Best fixed depths on training prompts") < read.index("3/4 Training")
    assert any("chosen on training prompts" in note for note in found["notes"])


def test_the_claim_is_two_numbers_at_the_lowest_load(done):
    _, found, _ = done
    claims = [line for line in found["verdicts"] if "the FLOPs a token" in line]
    assert claims
    assert all(line.startswith("Load 1, ") and "its time" in line for line in claims)


def test_verdicts_compare_with_off_the_best_fixed_depth_and_the_table(done):
    _, found, read = done
    for load in (1, 3):
        (line,) = [x for x in found["verdicts"] if x.startswith(f"Load {load}, learned: ")][:1]
        assert "x off" in line
        assert "table" in line
        assert line in read


def test_the_results_say_how_they_were_made(done):
    _, found, _ = done
    results = found["results"]
    assert results["versions"]["torch"]
    assert results["config"]["minutes"] == 0.15
    assert "json" not in results["config"]


STAGES = {
    "1/4": set[str](),
    "2/4": {"cost.json"},
    "3/4": {"cost.json", "train"},
    "4/4": {"cost.json", "train"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_keeps_what_there_is(flags, tmp_path, capsys, monkeypatch, stage):
    lines = Console._lines

    def stop_in_stage(self: Console, title: str) -> Callable[[float, str], None]:
        update = lines(self, title)

        def stop(share: float, detail: str = "") -> None:
            update(share, detail)
            if title.startswith(stage):
                raise KeyboardInterrupt

        return stop

    monkeypatch.setattr(Console, "_lines", stop_in_stage)
    out = tmp_path / "demo"
    assert main([*flags, "--out", str(out), "--json"]) == 130
    shown = capsys.readouterr()
    assert f"interrupted; what there was is in {out}" in shown.err
    assert {path.name for path in out.iterdir()} == STAGES[stage] | {"report.html", "results.json"}
    found = json.loads(shown.out)
    assert found["notes"][0].startswith("Interrupted")
    assert found["results"]["rows"] == []
    if "train" in STAGES[stage]:
        LearnedScheduler.load(found["policy"])
