"""Examples for other tools name settings that exist."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3 import PPO

from specdepth.agents.train_config import TrainConfig
from specdepth.envs import LIVE_DECODE
from specdepth.envs.decode_env import LiveDecodeEnv
from specdepth.envs.workload_config import WorkloadConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
ZOO_ONLY = {"n_envs", "n_timesteps", "normalize", "env_kwargs"}
yaml: Any = pytest.importorskip("yaml")


def load(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_the_zoo_block_fits_the_environment_and_ppo() -> None:
    block = load("ppo.yml")[LIVE_DECODE]
    arguments = block["env_kwargs"]
    assert set(arguments) <= set(inspect.signature(LiveDecodeEnv.__init__).parameters)
    WorkloadConfig(**arguments["workload"])
    assert set(block) - ZOO_ONLY <= set(inspect.signature(PPO.__init__).parameters)


def test_the_sweep_names_settings_of_a_training_run() -> None:
    for name in load("sweep.yaml")["parameters"]:
        value: Any = TrainConfig()
        for part in name.replace("-", "_").split("."):
            value = getattr(value, part)


def test_the_sweeps_values_are_accepted() -> None:
    parameters = load("sweep.yaml")["parameters"]
    for name, spec in parameters.items():
        group, _, field = name.replace("-", "_").rpartition(".")
        kind = type(getattr(TrainConfig(), group)) if group else TrainConfig
        for value in spec.get("values", [spec.get("min"), spec.get("max")]):
            kind(**{field: value})
