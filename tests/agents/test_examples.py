"""Examples for other tools name settings that exist."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3 import PPO

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
