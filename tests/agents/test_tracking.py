"""Training runs on W&B: what an offline run holds."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from specdepth.agents.track_config import TrackConfig
from specdepth.agents.track_policies import policy_origin
from specdepth.agents.tracking import DEPTHS, WandbTracker
from specdepth.agents.train import TrainResult
from tests.agents.made_policy import save_constant
from tests.agents.offline_run import OfflineRun, files_of, offline_run
from tests.agents.toy_training import UPDATE, toy_config, toy_train


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, OfflineRun]:
    """A training run of two updates, in a folder whose name a shell would split."""
    out = tmp_path_factory.mktemp("runs") / "a run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        to = TrackConfig(project="toy", group="g", tags=("t",))
        result = toy_train(toy_config(out, track=True, wandb=to, seed=3))
    return result, offline_run(out)


def test_the_run_says_what_it_is_and_how_to_send_it(tracked):
    result, found = tracked
    run = found.run
    assert (run.project, run.run_group, run.job_type) == ("toy", "g", "train")
    assert "t" in run.tags
    assert any(tag.startswith("torch-") for tag in run.tags)
    assert found.config["ppo"]["n_steps"] == 16
    assert found.config["workload"]["concurrencies"] == [1, 2, 4]
    assert shlex.split(result.sync_command) == ["wandb", "sync", str(found.folder)]
    assert found.exit_code == 0


def test_learning_curves_go_over_time_steps(tracked):
    _, found = tracked
    lines = [line for line in found.history if "decode/throughput_tok_s" in line]
    assert [line["_step"] for line in lines] == [UPDATE, 2 * UPDATE]
    for name in ("decode/acceptance_length", "train/approx_kl", "time/total_timesteps"):
        assert name in lines[0]


def test_depths_of_a_rollout_are_histograms_by_load(tracked):
    _, found = tracked
    line = next(line for line in found.history if "decode/decisions" in line)
    bins = line["depths/all.bins"]
    assert bins == [depth - 0.5 for depth in range(len(bins))]
    assert sum(line["depths/all.values"]) == line["decode/decisions"]
    prefix = "decode/mean_depth_at_"
    means = {name.removeprefix(prefix): v for name, v in line.items() if name.startswith(prefix)}
    assert len(means) > 1
    for load, mean in means.items():
        counts = line[f"depths/at_{load}.values"]
        assert np.dot(counts, range(len(counts))) / sum(counts) == pytest.approx(mean)


def test_the_last_depths_are_a_picture(tracked):
    _, found = tracked
    assert found.summary["depths/heat_map._type"] == "image-file"
    image = found.folder / "files" / found.summary["depths/heat_map.path"]
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_policy_is_a_version_of_its_groups_artifact(tracked):
    result, found = tracked
    (artifact,) = found.artifacts("model")
    assert artifact.name == "draft-depth-policy-g"
    made_by = f"run-{found.run.run_id}"
    assert set(artifact.aliases) == {"latest", "final", "seed-3", made_by}
    files = files_of(artifact)
    assert set(files) == {"policy.safetensors", "config.json", "README.md"}
    for name, staged in files.items():  # what is sent later is there, and is the policy
        assert staged.read_bytes() == (result.policy_folder / name).read_bytes()
    origin = policy_origin(result.policy_folder)
    assert origin.artifact is not None
    assert origin.artifact.endswith(f"toy/draft-depth-policy-g:{made_by}")
    metadata = json.loads(artifact.metadata)
    config = json.loads((result.policy_folder / "config.json").read_text())
    for key in ("model_pair", "drafter", "max_num_speculative_tokens", "weights_sha256"):
        assert metadata[key] == config[key]
    assert metadata["seed"] == 3


def test_an_interrupted_policy_is_not_the_seeds_own(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    tracker = WandbTracker(toy_config(tmp_path / "run"), tmp_path / "run")
    tracker.write({DEPTHS: {2: np.array([1.0, 3.0])}, "decode/x": 1}, {}, step=7)
    tracker.log_policy(save_constant(tmp_path / "policy", 2), {}, finished=False)
    tracker.fail()
    found = offline_run(tmp_path / "run")
    (artifact,) = found.artifacts("model")
    assert artifact.name == "draft-depth-policy"
    assert set(artifact.aliases) == {"latest", f"run-{found.run.run_id}"}
    (line,) = found.history  # the picture belongs to the last line
    assert line["_step"] == 7
    assert line["depths/at_2.values"] == [1, 3]
    assert line["depths/heat_map.format"] == "png"
    assert found.exit_code == 1


def test_disabled_tracking_writes_nothing_and_needs_no_sync(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    result = toy_train(toy_config(tmp_path / "run", track=True))
    assert result.sync_command is None
    assert not list((tmp_path / "run").rglob("*.wandb"))
    assert policy_origin(result.policy_folder).artifact is None


def test_without_track_wandb_is_never_imported():
    code = (
        "import sys, specdepth.agents.train, specdepth.agents.evaluate_command\n"
        "import specdepth.agents.track_evaluation, specdepth.agents.track_ablation\n"
        "import specdepth.agents.track_fetch, specdepth.agents.track_media\n"
        "print('wandb' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
