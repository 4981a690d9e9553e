from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.train_config import (
    CONFIG_FILE,
    DecoderConfig,
    PPOConfig,
    ReplayConfig,
    RewardConfig,
    TrackConfig,
    TrainConfig,
    WarmStartConfig,
)
from specdepth.envs.workload_config import WorkloadConfig

FULL = TrainConfig(
    env="replay",
    out=Path("runs/a"),
    seed=3,
    minutes=None,
    timesteps=7,
    prompts=Path("p.txt"),
    decoder=DecoderConfig(target="t", cost=Path("cost.json"), device="cpu"),
    replay=ReplayConfig(trace="t.npz", looping=False, num_kv_blocks=9, trace_sha256="ab"),
    workload=WorkloadConfig(concurrencies=(1, 9), arrivals="bursty"),
    ppo=PPOConfig(hidden=(3, 4), target_kl=None, reference_round_s=0.5),
    reward=RewardConfig(timing="measured", by_load=True, form="team", tokens="expected"),
    action="batch",
    warm_start=WarmStartConfig(scheduler="fixed:1"),
    wandb=TrackConfig(tags=("x",), group="g"),
)


@pytest.mark.parametrize("config", [TrainConfig(), FULL])
def test_settings_survive_their_file(config: TrainConfig, tmp_path: Path) -> None:
    config.save(tmp_path)
    assert TrainConfig.load(tmp_path) == config


def test_a_file_from_before_there_was_replay_is_of_a_live_run(tmp_path: Path) -> None:
    TrainConfig().save(tmp_path)
    path = tmp_path / CONFIG_FILE
    document = json.loads(path.read_text())
    del document["env"], document["replay"]
    path.write_text(json.dumps(document))
    assert TrainConfig.load(tmp_path) == TrainConfig()


def test_the_file_is_plain_json_with_format_and_version(tmp_path: Path) -> None:
    FULL.save(tmp_path)
    document = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert document["format"] == "specdepth-train-config"
    assert document["format_version"] == 1
    assert document["decoder"]["cost"] == "cost.json"
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "these are no training settings"),
        ({"format_version": 2}, "format version 2, this specdepth reads 1"),
        ({"format_version": True}, "format version True"),
        ({"seeds": 1}, "unknown settings seeds of TrainConfig"),
        ({"ppo": {"lr": 1}}, "unknown settings lr of PPOConfig"),
        ({"ppo": 3}, "PPOConfig must be an object"),
        ({"minutes": -1}, "minutes must be above 0"),
        ({"out": 3}, "expected a path"),
        ({"seed": "x"}, "cannot use"),
    ],
)
def test_damaged_files_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    FULL.save(tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        TrainConfig.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "[" * 100_000])
def test_files_that_are_no_settings_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ValueError, match="cannot use"):
        TrainConfig.load(tmp_path)


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training run in"):
        TrainConfig.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (TrainConfig, {"minutes": None}, "training needs an end"),
        (TrainConfig, {"minutes": 0}, "minutes must be above 0"),
        (TrainConfig, {"timesteps": 0}, "timesteps must be at least 1"),
        (TrainConfig, {"seed": -1}, "seed must be 0 or more"),
        (TrainConfig, {"env": "dream"}, 'env must be "live" or "replay"'),
        (ReplayConfig, {"num_engines": 0}, "num_engines must be at least 1"),
        (TrainConfig, {"checkpoint_minutes": -1}, "checkpoint_minutes must be 0 or more"),
        (PPOConfig, {"discount": 1.5}, r"discount must be in 0\.\.1"),
        (PPOConfig, {"learning_rate": 0}, "learning_rate must be above 0"),
        (PPOConfig, {"n_steps": 1}, "must be at least 2"),
        (PPOConfig, {"hidden": ()}, "hidden must hold widths"),
        (PPOConfig, {"reference_round_s": 0}, "reference_round_s must be above 0"),
        (TrainConfig, {"action": "cap"}, 'action must be "depth", "offset" or "batch"'),
        (RewardConfig, {"form": "sum"}, "form must be relative or difference, team, throughput"),
        (RewardConfig, {"tokens": "all"}, 'tokens must be "sampled" or "expected"'),
        (RewardConfig, {"form": "relative", "tokens": "expected"}, "from the trace"),
        (WarmStartConfig, {"rounds": 0}, "must be at least 1"),
        (WarmStartConfig, {"smoothing": 2}, r"smoothing must be in 0\.\.1"),
    ],
)
def test_wrong_settings_are_refused(kind: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(**settings)


def test_each_load_has_its_own_rate_in_closed_loops_unless_told_otherwise() -> None:
    assert TrainConfig().by_load
    poisson = WorkloadConfig(arrivals="poisson")
    assert not TrainConfig(workload=poisson).by_load
    assert TrainConfig(workload=poisson, reward=RewardConfig(by_load=True)).by_load
