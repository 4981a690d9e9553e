"""That training pays what `RewardConfig` says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.assembly import make_replay_env
from specdepth.agents.replay_engines import make_replay_decoders
from specdepth.agents.slot_vec_env import SlotVecEnv
from specdepth.agents.train import train
from specdepth.agents.train_config import (
    DecoderConfig,
    ReplayConfig,
    RewardConfig,
    TrainConfig,
    WarmStartConfig,
)
from specdepth.envs.reward import REWARDS, decision_s, expected_tokens, modelled_s
from tests.agents.toy_rule import save_toy_rule, toy_rule
from tests.agents.toy_training import toy_config
from tests.envs.toy_trace import COST, toy_trace


def reward_config(folder: Path, **settings: Any) -> TrainConfig:
    toy_trace().save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    return replace(
        toy_config(folder / "run"),
        env="replay",
        timesteps=64,
        decoder=DecoderConfig(
            max_num_seqs=4, max_num_speculative_tokens=4, cost=folder / "cost.json"
        ),
        replay=ReplayConfig(trace=str(folder / "toy.npz"), num_engines=1),
        reward=RewardConfig(**settings),
        warm_start=WarmStartConfig(scheduler=save_toy_rule(folder), rounds=20, epochs=2),
    )


def made_env(config: TrainConfig) -> SlotVecEnv:
    return make_replay_env(config, make_replay_decoders(config))


@pytest.mark.parametrize("form", sorted(REWARDS))
@pytest.mark.parametrize("tokens", ["sampled", "expected"])
def test_each_form_is_paid_in_either_kind_of_tokens(form: str, tokens: str, tmp_path: Path) -> None:
    env = made_env(reward_config(tmp_path, form=form, tokens=tokens))
    env.reset()
    survival, earned = toy_rule().survival, 0.0
    for _ in range(15):
        state = env.state_of(0)
        hoped = survival.survival(state)
        rewards = np.asarray(env.step(np.full(4, 3))[1])
        outcome = env.last_outcomes[0]
        assert outcome is not None
        paid = REWARDS[form](
            state,
            outcome,
            elapsed_s=decision_s(state, outcome, COST, modelled_s(outcome, COST)),
            seconds_per_token=env.rates(state.num_running),
            cost=COST,
            tokens=expected_tokens(hoped, outcome) if tokens == "expected" else None,
        )
        assert rewards[state.slots] == pytest.approx(paid, abs=1e-4)
        earned += float(np.abs(rewards).sum())
    assert earned > 0


@pytest.mark.parametrize("form", ["team", "throughput"])
def test_a_policy_can_be_trained_on_it(form: str, tmp_path: Path) -> None:
    result = train(reward_config(tmp_path, form=form, tokens="expected"))
    assert result.num_updates == 1
    assert (result.policy_folder / "policy.safetensors").is_file()


def test_expected_tokens_need_a_rule_over_a_fitted_model(tmp_path: Path) -> None:
    config = reward_config(tmp_path, tokens="expected")
    for name in ("fixed:2", "greedy:match"):
        start = replace(config.warm_start, scheduler=name)
        with pytest.raises(ValueError, match="asks the fitted survival model of a greedy rule"):
            made_env(replace(config, warm_start=start))
