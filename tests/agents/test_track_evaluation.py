"""`specdepth evaluate --track`: what an offline run holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdepth.agents.cli import main
from specdepth.agents.results import Results
from specdepth.agents.track_config import TrackConfig
from specdepth.agents.track_evaluation import EvaluationTracker, mean_score
from specdepth.agents.track_policies import log_policy, policy_origin, write_note
from specdepth.agents.track_run import finish_run, start_run
from specdepth.scheduler.cost import CostModel
from tests.agents.made_policy import save_constant
from tests.agents.made_trace import make_trace
from tests.agents.offline_run import OfflineRun, files_of, offline_run
from tests.agents.tiny_target import save_tiny_target, write_prompts

COST = CostModel.linear(base_s=0.05, token_s=0.01, knee=3, name="made")
ARTIFACT = "team/specdepth/draft-depth-policy:v3"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, its prices, and two policies, of which one came from W&B."""
    folder = tmp_path_factory.mktemp("files")
    make_trace(24, num_tokens=12).save(folder / "made.npz")
    COST.save(folder / "cost.json")
    write_note(save_constant(folder / "two", 2), ARTIFACT)
    save_constant(folder / "four", 4)
    return folder


def evaluate(files: Path, out: Path, *more: str) -> int:
    policies = f"policy:{files / 'two'},policy:{files / 'four'}"
    return main(
        [
            *("evaluate", "--mode", "replay", "--max-num-speculative-tokens", "4"),
            *("--trace", str(files / "made.npz"), "--cost", str(files / "cost.json")),
            *("--policies", policies, "--fixed-depths", "2", "--loads", "1,4"),
            *("--out", str(out), "--quiet", "--track", *more),
        ]
    )


@pytest.fixture(scope="module")
def tracked(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OfflineRun, Results]:
    """An evaluation on the training split."""
    out = tmp_path_factory.mktemp("out") / "evaluation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        to = ["--wandb.project", "toy", "--wandb.group", "nightly", "--wandb.tags", "a", "b"]
        assert evaluate(files, out, "--split", "train", *to) == 0
    return offline_run(out), Results.load(out / "results.json")


def test_the_run_says_what_it_is(tracked):
    found, _ = tracked
    run = found.run
    assert (run.project, run.run_group, run.job_type) == ("toy", "nightly", "evaluate")
    assert {"a", "b"} < set(run.tags)
    assert (found.config["split"], found.config["loads"]) == ("train", [1, 4])
    assert found.exit_code == 0


def test_results_are_tables(tracked):
    found, results = tracked
    rows = found.table("eval/rows")
    assert len(rows["data"]) == len(results.rows)
    assert rows["data"][0][:3] == ["off", "1", results.rows[0].metric]
    by_load = found.table("eval/by_load")
    assert by_load["columns"][:4] == ["policy", "load", "throughput_tok_s", "speedup"]
    assert [line[:2] for line in by_load["data"]] == [
        [policy, str(load)] for policy in results.policies for load in results.loads
    ]


def test_summary_and_depths_are_those_of_the_policy_asked_for_first(tracked, files):
    found, results = tracked
    focus = f"policy:{files / 'two'}"
    summary = found.summary
    assert summary["eval/policy"] == focus
    for load in (1, 4):
        speedup = results.find(focus, load, "speedup")
        assert speedup is not None
        assert summary[f"eval/speedup_at_{load}"] == pytest.approx(speedup.value)
        counts = summary[f"depths/at_{load}.values"]
        rounds = results.find(focus, load, "sequence_rounds")
        assert rounds is not None
        assert sum(counts) == rounds.value
        assert counts[3:] == [0] * len(counts[3:])  # it never goes deeper than 2
    assert summary["eval/ratio_to_best_fixed"] == pytest.approx(mean_score(results, focus))
    assert (found.folder / "files" / summary["depths/heat_map.path"]).is_file()


def test_results_are_an_artifact_that_names_the_policies_it_used(tracked, files):
    found, _ = tracked
    (artifact,) = found.artifacts("evaluation")
    staged = files_of(artifact)
    assert set(staged) == {"results.json", "report.html"}
    assert json.loads(staged["results.json"].read_text())["format"] == "specdepth-results"
    used = {
        f"policy:{files / name}": {
            "artifact": known,
            "weights_sha256": policy_origin(files / name).weights_sha256,
        }
        for name, known in (("two", ARTIFACT), ("four", None))
    }
    metadata = json.loads(artifact.metadata)
    assert metadata["policies"] == used
    assert metadata["split"] == "train"
    assert found.config["used_policies"] == used


def test_the_best_policy_on_the_training_split_gets_an_alias(tracked, files):
    found, results = tracked
    (best,) = found.artifacts("model")
    assert best.name == "draft-depth-policy"
    assert "best" in best.aliases
    scores = {name: mean_score(results, f"policy:{files / name}") for name in ("two", "four")}
    winner = max(scores, key=lambda name: scores[name] or 0.0)
    assert json.loads(best.metadata)["ratio_to_best_fixed"] == pytest.approx(scores[winner])
    weights = files_of(best)["policy.safetensors"].read_bytes()
    assert weights == (files / winner / "policy.safetensors").read_bytes()
    # What was known of its origin is not lost; what was not has one now.
    assert policy_origin(files / "two").artifact == ARTIFACT
    assert (policy_origin(files / "four").artifact is None) == (winner == "two")


@pytest.mark.parametrize(
    ("split", "policies"), [("held-out", ("two", "four")), ("train", ("two",))]
)
def test_no_policy_is_the_best_of_held_out_requests_or_of_one(
    tracked, files, tmp_path, monkeypatch, split, policies
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    _, results = tracked
    names = {name: name for name in (f"policy:{files / policy}" for policy in policies)}
    run = start_run(TrackConfig(), "evaluate", "made", {}, tmp_path)
    tracker = EvaluationTracker(run, split)
    tracker.log(results, [], None, {"off": "off", **names})
    finish_run(run)
    found = offline_run(tmp_path)
    assert found.artifacts("model") == []
    assert set(found.config["used_policies"]) == set(names)
    assert "eval/policy" not in found.summary


def test_disabled_tracking_takes_everything_and_writes_nothing(
    tracked, files, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    _, results = tracked
    save_constant(tmp_path / "new", 1)
    focus = f"policy:{files / 'two'}"
    run = start_run(TrackConfig(), "evaluate", "made", {}, tmp_path / "out")
    tracker = EvaluationTracker(run, "train")
    tracker.log(results, [], focus, {focus: focus})
    log_policy(run, tmp_path / "new", "x", {}, ["best"])
    assert finish_run(run) is None
    assert list((tmp_path / "out").iterdir()) == []
    assert policy_origin(tmp_path / "new").artifact is None


def test_an_evaluation_that_fails_is_a_run_that_failed(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert evaluate(files, tmp_path, "--engine", "other") == 1
    told = capsys.readouterr()
    assert 'unknown engine profile "other"' in told.err
    assert "wandb sync" not in told.out
    assert offline_run(tmp_path).exit_code == 1


def test_a_live_evaluation_is_tracked_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    target = save_tiny_target(tmp_path / "tiny")
    prompts = write_prompts(tmp_path / "prompts.txt", 12)
    out = tmp_path / "out"
    arguments = [
        *("evaluate", "--target", str(target), "--dtype", "float32", "--device", "cpu"),
        *("--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8"),
        *("--policies", "heuristic", "--loads", "1", "--fixed-depths", "2", "--requests", "4"),
        *("--cost", "cpu-smollm2-bf16", "--track", "--quiet"),
    ]
    assert main(arguments) == 0
    found = offline_run(out)
    assert f"To send the offline W&B run: wandb sync {found.folder}" in capsys.readouterr().out
    assert found.run.project == "specdepth"
    policies = {line[0] for line in found.table("eval/by_load")["data"]}
    assert policies == {"off", "fixed:2", "heuristic"}
    assert found.summary["eval/policy"] == "heuristic"
    assert set(files_of(found.artifacts("evaluation")[0])) == {"results.json", "report.html"}
