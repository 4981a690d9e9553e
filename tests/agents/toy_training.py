"""A training run that takes a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specdepth.agents.slot_vec_env import SlotVecEnv
from specdepth.agents.train import TrainResult, make_env, train
from specdepth.agents.train_config import PPOConfig, TrainConfig, WarmStartConfig
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.envs.workload_config import WorkloadConfig
from tests.envs.toy import toy_decoder, toy_prompts

NUM_SLOTS = 4
N_STEPS = 16
UPDATE = N_STEPS * NUM_SLOTS
"""Time steps of an update, by stable-baselines3's count."""


def toy_config(out: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        out=out,
        minutes=5,
        timesteps=2 * UPDATE,
        workload=WorkloadConfig(num_requests=6, concurrencies=(1, 2, 4), max_new_tokens=16),
        ppo=PPOConfig(n_steps=N_STEPS, batch_size=16, n_epochs=2, hidden=(16,), target_kl=None),
        warm_start=WarmStartConfig(scheduler="none"),
    )
    return replace(config, **changes)


def toy_train(
    config: TrainConfig, decoder: SpeculativeDecoder | None = None, **more: Any
) -> TrainResult:
    return train(config, decoder or toy_decoder(), prompts=toy_prompts(), **more)


def toy_vec_env(
    decoder: SpeculativeDecoder | None = None, out: Path = Path("unused"), **changes: Any
) -> SlotVecEnv:
    return make_env(toy_config(out, **changes), decoder or toy_decoder(), toy_prompts())
