"""Offsets from the start through PPO to the exported policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specdepth.agents.assembly import make_model, make_replay_env, starting_point
from specdepth.agents.export import policy_weights
from specdepth.agents.offset_policy import GivenLogits, OffsetPolicy, start_at, starting_weights
from specdepth.agents.offset_weights import SCALES, offset_weights
from specdepth.agents.replay_engines import make_replay_decoders
from specdepth.agents.train import resumed_config, train
from specdepth.agents.train_config import (
    DecoderConfig,
    PPOConfig,
    ReplayConfig,
    RewardConfig,
    TrainConfig,
    WarmStartConfig,
)
from specdepth.envs.observation import ROW_HIGH, ROW_LOW
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard
from tests.agents.toy_rule import SHRINKAGE, save_toy_rule, toy_rule
from tests.agents.toy_training import toy_config
from tests.envs.toy_trace import COST, toy_trace

CARD = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)
UPDATE = 16 * 4 * 2


def offset_config(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    toy_trace().save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    config = replace(
        toy_config(folder / name),
        env="replay",
        action="offset",
        timesteps=2 * UPDATE,
        decoder=DecoderConfig(
            max_num_seqs=4, max_num_speculative_tokens=4, cost=folder / "cost.json"
        ),
        replay=ReplayConfig(trace=str(folder / "toy.npz"), num_engines=2),
        warm_start=WarmStartConfig(scheduler=save_toy_rule(folder), rounds=20, epochs=2),
    )
    return replace(config, **changes)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return offset_config(tmp_path)


def test_training_starts_exactly_at_the_rule(config: TrainConfig) -> None:
    env = make_replay_env(config, make_replay_decoders(config))
    model = make_model(config.ppo, env, 0, starting_point(config))
    policy = LearnedScheduler(policy_weights(model, SHRINKAGE), CARD)
    rule = toy_rule()
    env.reset()
    seen = set[int]()
    for _ in range(30):
        logits, _ = model.predict(env.observations(), deterministic=True)
        state = env.state_of(0)
        depths = rule.choose(state)
        np.testing.assert_array_equal(policy.choose(state), depths)
        assert env.offsets is not None
        np.testing.assert_array_equal(env.offsets.depths(state, logits[state.slots]), depths)
        env.step(logits)
        assert env.last_outcomes[0] is not None
        np.testing.assert_array_equal(env.last_outcomes[0].depths, depths)
        seen.update(depths.tolist())
    assert len(seen) > 2
    env.close()


def test_an_exported_policy_says_what_ppo_predicts(config: TrainConfig) -> None:
    env = make_replay_env(config, make_replay_decoders(config))
    model = make_model(config.ppo, env, 0, starting_point(config))
    drawn = np.random.default_rng(0).uniform(ROW_LOW, ROW_HIGH, (200, len(ROW_LOW)))
    rows: NDArray[np.float32] = drawn.astype(np.float32)
    predicted = np.asarray(model.predict(rows, deterministic=True)[0], np.float64)
    policy = LearnedScheduler(policy_weights(model, SHRINKAGE), CARD)
    np.testing.assert_allclose(policy.scores(rows[:, 1:]), predicted, atol=1e-4)
    with pytest.raises(ValueError, match="needs the shrinkage"):
        policy_weights(model)
    env.close()


@pytest.mark.parametrize("form", ["difference", "relative"])
def test_a_run_leaves_a_policy_that_moved(form: Any, tmp_path: Path) -> None:
    result = train(offset_config(tmp_path, reward=RewardConfig(form=form)))
    scheduler = LearnedScheduler.load(result.policy_folder, model_pair="toy + toy")
    assert scheduler.weights.action == "offset"
    assert scheduler.weights.shrinkage == SHRINKAGE
    start = offset_weights(toy_rule(), {})
    units = len(start.biases[0])
    assert not np.array_equal(scheduler.weights.weights[1][:, :units], start.weights[1])
    assert result.num_updates == 2
    card = (result.policy_folder / "README.md").read_text()
    assert "the greedy rule chooses depths by them" in card
    assert "by number of sequences (1, 4)" in card
    again = resumed_config(result.folder, minutes=5, timesteps=UPDATE)
    assert train(again, resume=True).num_updates == 3


def test_a_run_can_start_at_a_policy_of_offsets(tmp_path: Path) -> None:
    first = train(offset_config(tmp_path))
    config = offset_config(tmp_path, "second")
    start = replace(config.warm_start, scheduler=f"policy:{first.policy_folder}")
    config = replace(config, warm_start=start)
    weights = starting_point(config)
    assert weights is not None
    found = LearnedScheduler.load(first.policy_folder).weights
    np.testing.assert_array_equal(weights.weights[1], found.weights[1])
    assert train(config).num_updates == 2


def test_equal_seeds_give_equal_policies(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(offset_config(tmp_path, name, seed=seed))
    a, b, c = (
        LearnedScheduler.load(tmp_path / name / "policy").weights.weights[1] for name in "abc"
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_relative_rewards_are_zero_while_the_policy_is_its_start(tmp_path: Path) -> None:
    config = offset_config(tmp_path, reward=RewardConfig(form="relative"))
    env = make_replay_env(config, make_replay_decoders(config))
    model = make_model(config.ppo, env, 0, starting_point(config))
    observations: Any = env.reset()
    worth = 0.0
    for _ in range(20):
        observations, rewards, _, _ = env.step(model.predict(observations, deterministic=True)[0])
        assert not rewards.any()
    for _ in range(20):
        observations, rewards, _, _ = env.step(np.full((env.num_envs, 4), 5.0, np.float32))
        worth += float(np.abs(rewards).sum())
    assert worth > 0
    env.close()


def test_logits_become_depths_within_what_is_on_offer(config: TrainConfig) -> None:
    env = make_replay_env(config, make_replay_decoders(config))
    env.reset()
    state = env.state_of(0)
    given = GivenLogits(SHRINKAGE)
    shape = (state.num_running, 4)
    assert not given.depths(state, np.full(shape, -20.0, np.float32)).any()
    deep = given.depths(state, np.full(shape, 20.0, np.float32))
    np.testing.assert_array_equal(deep, state.max_depths)
    env.close()


def test_a_layer_that_is_too_narrow_is_made_as_wide_as_the_start(config: TrainConfig) -> None:
    config = replace(config, ppo=replace(config.ppo, hidden=(4, 64)))
    env = make_replay_env(config, make_replay_decoders(config))
    start = starting_point(config)
    assert start is not None
    assert start.layer_sizes[1] > 4
    model = make_model(config.ppo, env, 0, start)
    policy = model.policy
    assert isinstance(policy, OffsetPolicy)
    start_at(policy, start)
    assert policy.action_net.in_features == start.layer_sizes[1]
    env.close()


def test_only_networks_can_be_started_at() -> None:
    with pytest.raises(ValueError, match='action "offset" starts at a greedy rule'):
        starting_weights(FixedDepth(2))
    searched = LearnedScheduler(offset_weights(toy_rule(), {4: np.ones(len(SCALES))}), CARD)
    assert starting_weights(searched) is searched.weights


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match='needs env "replay" and action "offset"'):
        TrainConfig(reward=RewardConfig(form="relative"))
    with pytest.raises(ValueError, match="action must be"):
        TrainConfig(action="price")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offset_std"):
        PPOConfig(offset_std=0.0)
    with pytest.raises(ValueError, match="token_worth"):
        RewardConfig(token_worth=0.0)


def test_a_search_before_ppo_stays_as_a_policy_of_its_own(tmp_path: Path) -> None:
    load_4 = WorkloadConfig(arrivals="constant", concurrency=4, num_requests=6)
    config = offset_config(tmp_path, workload=load_4)
    start = replace(config.warm_start, search_iterations=1)
    shares = list[tuple[str, float]]()
    result = train(
        replace(config, warm_start=start),
        progress=lambda at: shares.append((at.stage, at.fraction)),
    )
    searched = LearnedScheduler.load(result.folder / "searched", model_pair="toy + toy")
    assert searched.weights.action == "offset"
    assert searched.card.training["search"]["loads"] == [4]
    kept = TrainConfig.load(result.folder).warm_start
    assert kept.scheduler == f"policy:{result.folder / 'searched'}"
    assert kept.search_iterations == 0
    assert ("search", 1.0) in shares
    final = LearnedScheduler.load(result.policy_folder).weights
    assert final.shrinkage == searched.weights.shrinkage
    again = resumed_config(result.folder, minutes=5, timesteps=UPDATE)
    assert train(again, resume=True).num_updates == 3


def test_a_search_needs_a_greedy_rule_and_replay(tmp_path: Path) -> None:
    config = offset_config(tmp_path)
    start = replace(config.warm_start, search_iterations=1, scheduler="fixed:2")
    with pytest.raises(ValueError, match="a search starts at a greedy rule"):
        train(replace(config, warm_start=start))
    with pytest.raises(ValueError, match="search_iterations needs env"):
        TrainConfig(warm_start=WarmStartConfig(search_iterations=1))
    with pytest.raises(ValueError, match="search_iterations must be"):
        WarmStartConfig(search_iterations=-1)
