"""The whole demo on a target of a few kilobytes, for which a trace is recorded first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.cli import main
from specdepth.agents.console import Console
from specdepth.agents.results import Results
from specdepth.decoder.trace import Trace
from specdepth.scheduler.baselines import TableDepth, make_scheduler
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.tiny_target import COST, save_tiny_target, write_prompts

LOADS = (1, 3)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("demo")
    target = save_tiny_target(folder / "tiny")
    prompts = write_prompts(folder / "prompts.txt")
    return [
        *("demo", "--target", str(target), "--dtype", "float32", "--device", "cpu"),
        *("--prompts", str(prompts), "--loads", "1,3", "--max-num-seqs", "4"),
        *("--fixed-depths", "2,8", "--max-new-tokens", "8"),
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
        assert main([*flags, "--minutes", "0.1", "--out", str(out), "--json"]) == 0
    return out, json.loads(printed.getvalue()), read.getvalue()


def test_it_leaves_pass_times_trace_policy_results_and_reports(done):
    out, found, _ = done
    assert CostModel.load(out / "cost.json").measured
    trace = Trace.load(found["trace"])
    assert trace.info.model_pair == LearnedScheduler.load(found["policy"]).card.model_pair
    assert len(trace.rows("train")) >= 3
    assert Results.load(out / "results.json").as_mapping() == found["results"]
    for page in (out / "report.html", out / "replay" / "report.html"):
        text = page.read_text()
        assert "learned" in text
        assert "<svg" in text


def test_the_policy_was_trained_on_replay_of_the_training_split_at_the_measured_prices(done):
    out, found, _ = done
    training = LearnedScheduler.load(found["policy"]).card.training
    assert training["trace"]["requests"] == len(Trace.load(found["trace"]).rows("train"))
    assert CostModel.from_dict(training["cost_model"]) == CostModel.load(out / "cost.json")
    assert training["rounds"] > 0


@pytest.mark.parametrize("place", ["", "replay"])
def test_the_learned_policy_is_first_at_every_load(done, place):
    out, _, _ = done
    results = Results.load(out / place / "results.json")
    assert results.policies[0] == "learned"
    for load in LOADS:
        for name in results.policies:
            row = results.find(name, load, "throughput_tok_s")
            assert row is not None
            assert row.value > 0


def test_replay_has_rule_table_fixed_depths_and_oracles(done):
    out, found, _ = done
    results = Results.load(out / "replay" / "results.json")
    assert results.config["mode"] == "replay"
    assert {
        *("learned", found["strongest_rule"], "tuned-table", "off", "fixed:2", "fixed:8"),
        *("oracle:best-fixed", "oracle:hindsight"),
    } <= set(results.policies)
    for load in LOADS:

        def value(policy: str, metric: str = "speedup", load: int = load) -> float:
            row = results.find(policy, load, metric)
            assert row is not None
            return row.value

        best = [value(f"fixed:{k}") for k in (2, 8)]
        assert value("oracle:best-fixed") == max(1.0, *best)
        mine, rule = value("learned"), value(found["strongest_rule"])
        ratio = value("learned", "ratio_to_strongest_rule")
        assert ratio == pytest.approx(mine / rule)


def test_live_has_learned_strongest_rule_table_and_off(done):
    _, found, read = done
    wanted = {"learned", found["strongest_rule"], "tuned-table", "off"}
    results = Results.load(Path(found["folder"]) / "results.json")
    assert set(results.policies) == wanted
    assert read.index("Replay of") < read.index("Live, in turn")


def test_all_did_the_same_work_live(done):
    _, found, _ = done
    for load in LOADS:
        tokens = {
            row["value"]
            for row in found["results"]["rows"]
            if row["metric"] == "committed_tokens" and row["load"] == load
        }
        assert len(tokens) == 1


def test_rivals_are_chosen_on_the_training_split(done):
    _, found, _ = done
    assert isinstance(make_scheduler(found["table"]), TableDepth)
    assert found["best_single_fixed"] in ("off", "fixed:2", "fixed:8")
    assert any("On the training split" in note for note in found["notes"])


def test_verdicts_compare_with_off_what_was_tuned_and_the_strongest_rule(done):
    _, found, read = done
    for where, tuned in (("replay", "the best fixed depth"), ("live", "tuned-table")):
        for load in LOADS:
            lines = found["verdicts"][where]
            (line,) = [x for x in lines if x.startswith(f"Load {load}, learned: ")][:1]
            assert "x off" in line
            assert tuned in line
            assert found["strongest_rule"] in line
            assert line in read


def test_the_claim_is_two_numbers_at_the_lowest_load(done):
    _, found, _ = done
    (claim,) = [line for line in found["verdicts"]["live"] if "the FLOPs a token" in line]
    assert claim.startswith("Load 1, learned: ")
    assert "its time" in claim


def test_the_results_say_how_they_were_made(done):
    _, found, _ = done
    results = found["results"]
    assert results["versions"]["torch"]
    assert results["config"]["minutes"] == 0.1
    assert "json" not in results["config"]


def test_a_drafter_is_needed(flags, tmp_path, capsys):
    assert main([*flags, "--draft", "none", "--out", str(tmp_path / "demo")]) == 1
    assert "--draft none proposes nothing" in capsys.readouterr().err


STAGES = {
    "1/5": set[str](),
    "2/5": {"cost.json"},
    "3/5": {"cost.json", "trace.npz", "survival", "train"},
    "5/5": {"cost.json", "trace.npz", "survival", "train", "replay"},
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
    COST.save(tmp_path / "prices.json")
    known = [] if stage == "1/5" else ["--cost", str(tmp_path / "prices.json")]
    out = tmp_path / "demo"
    assert main([*flags, *known, "--minutes", "0.03", "--out", str(out), "--json"]) == 130
    shown = capsys.readouterr()
    assert f"interrupted; what there was is in {out}" in shown.err
    assert {path.name for path in out.iterdir()} == STAGES[stage] | {"report.html", "results.json"}
    found = json.loads(shown.out)
    assert found["notes"][0].startswith("Interrupted")
    assert found["results"]["rows"] == []
    if "train" in STAGES[stage]:
        LearnedScheduler.load(found["policy"])
