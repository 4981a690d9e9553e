from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer

from specdepth.agents.rollout import SlotRolloutBuffer
from specdepth.envs.observation import NUM_COLUMNS, ROW_HIGH, ROW_LOW

SPACE, ACTIONS = spaces.Box(ROW_LOW, ROW_HIGH), spaces.Discrete(5)
GAMMA, LAMBDA, REFERENCE_S = 0.9, 0.8, 0.05


@dataclass
class Source:
    last_elapsed_s: Any
    last_failed: Any
    active: Any


@dataclass
class Rollout:
    """Arrays [N, A]; `dones[t]` ends the episode after step t."""

    active: Any
    rewards: Any
    values: Any
    elapsed_s: Any
    dones: Any
    failed: Any
    last_values: Any
    last_active: Any

    def buffer(self) -> SlotRolloutBuffer:
        num_rounds, num_agents = self.rewards.shape
        buffer = SlotRolloutBuffer(
            num_rounds,
            SPACE,
            ACTIONS,
            device="cpu",
            gamma=GAMMA,
            gae_lambda=LAMBDA,
            n_envs=num_agents,
            reference_round_s=REFERENCE_S,
        )
        starts = np.concatenate([np.ones((1, num_agents), np.bool_), self.dones[:-1]])
        rng = np.random.default_rng(5)
        for t in range(num_rounds):
            buffer.source = Source(self.elapsed_s[t], self.failed[t], self.last_active)
            observations = np.zeros((num_agents, NUM_COLUMNS), np.float32)
            observations[:, 0] = self.active[t]
            observations[:, 1] = self.active[t] * rng.random(num_agents)
            buffer.add(
                observations,
                rng.integers(0, 5, (num_agents, 1)),
                self.rewards[t],
                starts[t],
                torch.from_numpy(self.values[t]),
                torch.from_numpy(-rng.random(num_agents)),
            )
        buffer.compute_returns_and_advantage(torch.from_numpy(self.last_values), self.dones[-1])
        return buffer


def random_rollout(seed: int, num_rounds: int = 12, num_agents: int = 3) -> Rollout:
    rng = np.random.default_rng(seed)
    shape = (num_rounds, num_agents)
    active = rng.random(shape) < 0.6
    active[:, 0] |= ~active.any(1)
    failed = (rng.random((num_rounds, 1)) < 0.1) & np.ones(shape, np.bool_)
    dones = (rng.random((num_rounds, 1)) < 0.15) & np.ones(shape, np.bool_) | failed
    return Rollout(
        active=active,
        rewards=(rng.normal(size=shape) * active).astype(np.float32),
        values=rng.normal(size=shape).astype(np.float32),
        elapsed_s=np.where(failed, 0.0, rng.uniform(0.02, 0.3, (num_rounds, 1))) * np.ones(shape),
        dones=dones,
        failed=failed,
        last_values=rng.normal(size=num_agents).astype(np.float32),
        last_active=rng.random(num_agents) < 0.5,
    )


def advantages_by_the_definition(rollout: Rollout) -> Any:
    """One agent and one step at a time, from the sum that defines the estimate."""
    num_rounds, num_agents = rollout.rewards.shape
    result = np.zeros((num_rounds, num_agents))
    for agent in range(num_agents):
        for start in range(num_rounds):
            if not rollout.active[start, agent] or rollout.failed[start, agent]:
                continue
            total, weight, at = 0.0, 1.0, start
            while True:
                # To the agent's next active round, or to where the trajectory ends.
                discount, upcoming, worth = 1.0, at, 0.0
                while True:
                    discount *= GAMMA ** (rollout.elapsed_s[upcoming, agent] / REFERENCE_S)
                    if rollout.dones[upcoming, agent]:
                        upcoming, worth = -1, 0.0
                        break
                    upcoming += 1
                    if upcoming == num_rounds:
                        worth = rollout.last_values[agent] * rollout.last_active[agent]
                        upcoming = -1
                        break
                    if rollout.active[upcoming, agent]:
                        worth = rollout.values[upcoming, agent]
                        if rollout.failed[upcoming, agent]:
                            upcoming = -1
                        break
                    if rollout.failed[upcoming, agent]:
                        upcoming, worth = -1, 0.0
                        break
                delta = rollout.rewards[at, agent] + discount * worth - rollout.values[at, agent]
                total += weight * delta
                if upcoming < 0:
                    break
                weight *= discount * LAMBDA
                at = upcoming
            result[start, agent] = total
    return result


@given(seed=st.integers(0, 10_000))
def test_advantages_are_those_of_the_definition(seed: int) -> None:
    rollout = random_rollout(seed)
    buffer = rollout.buffer()
    expected = advantages_by_the_definition(rollout)
    assert buffer.advantages == pytest.approx(expected, abs=1e-5)
    on = rollout.active & ~rollout.failed
    assert buffer.returns == pytest.approx(np.where(on, expected + rollout.values, 0), abs=1e-5)


def test_with_everyone_active_and_equal_rounds_it_is_the_buffer_of_stable_baselines3() -> None:
    rollout = random_rollout(0)
    ones = np.ones_like(rollout.active)
    rollout.active, rollout.failed = ones, ~ones
    rollout.elapsed_s = np.full(ones.shape, REFERENCE_S)
    rollout.last_active = ones[0]
    ours = rollout.buffer()
    theirs = RolloutBuffer(
        12, SPACE, ACTIONS, device="cpu", gamma=GAMMA, gae_lambda=LAMBDA, n_envs=3
    )
    for name in ("observations", "actions", "rewards", "episode_starts", "values", "log_probs"):
        setattr(theirs, name, getattr(ours, name).copy())
    theirs.full = True
    theirs.compute_returns_and_advantage(torch.from_numpy(rollout.last_values), rollout.dones[-1])
    assert ours.advantages == pytest.approx(theirs.advantages, abs=1e-6)
    batches = []
    for buffer in (ours, theirs):
        np.random.seed(3)  # noqa: NPY002
        batches.append(list(buffer.get(8)))
    for a, b in zip(*batches, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.allclose(x, y, atol=1e-6)


def test_a_round_of_twice_the_time_is_discounted_twice() -> None:
    one = np.ones((2, 1))
    rollout = Rollout(
        active=one > 0,
        rewards=np.array([[0.0], [1.0]], np.float32),
        values=np.zeros((2, 1), np.float32),
        elapsed_s=np.array([[2 * REFERENCE_S], [REFERENCE_S]]),
        dones=np.array([[False], [True]]),
        failed=one < 0,
        last_values=np.zeros(1, np.float32),
        last_active=np.array([True]),
    )
    assert rollout.buffer().advantages[0, 0] == pytest.approx(GAMMA**2 * LAMBDA)


def without_empty_slots(rollout: Rollout, keep: list[int]) -> Rollout:
    parts = {name: array[..., keep] for name, array in vars(rollout).items()}
    return Rollout(**parts)


def test_empty_slots_change_no_minibatch() -> None:
    """Slots 1 and 3 are always empty: what is yielded is what a buffer without them yields."""
    full = random_rollout(1, num_agents=4)
    full.active[:, [1, 3]] = False
    full.active[:, [0, 2]] = True
    for row in (full.rewards, full.values):
        row[:, [1, 3]] = 99.0  # must not matter
    few = without_empty_slots(full, [0, 2])
    wide, narrow = full.buffer(), few.buffer()
    narrow.observations = wide.observations[:, [0, 2]].copy()
    narrow.actions, narrow.log_probs = wide.actions[:, [0, 2]], wide.log_probs[:, [0, 2]]
    batches = []
    for buffer in (wide, narrow):
        np.random.seed(7)  # noqa: NPY002
        batches.append([sample for _ in range(2) for sample in buffer.get(5)])
    assert len(batches[0]) == len(batches[1])
    for a, b in zip(*batches, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_only_rows_that_count_are_yielded_and_each_once() -> None:
    rollout = random_rollout(2)
    buffer = rollout.buffer()
    counts = rollout.active & ~rollout.failed
    assert len(buffer.active_observations()) == counts.sum()
    rows = [row for sample in buffer.get(4) for row in sample.observations.numpy()]
    assert len(rows) == counts.sum() == len(buffer.returns) == len(buffer.values)
    assert all(row[0] == 1 for row in rows)
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_a_rollout_in_which_nobody_was_active_is_refused() -> None:
    rollout = random_rollout(0)
    rollout.active = np.zeros_like(rollout.active)
    with pytest.raises(ValueError, match="no agent was active"):
        next(rollout.buffer().get(4))


def test_the_reference_time_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="reference_round_s must be above 0"):
        SlotRolloutBuffer(2, SPACE, ACTIONS, reference_round_s=0.0)
