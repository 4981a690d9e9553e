"""Rollouts of agents that come and go, in rounds that take different times.

Legend: N rounds of a rollout, A agents.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import Tensor

from specdepth.envs.observation import ACTIVE
from specdepth.scheduler.state import Bools, Floats

COLUMNS = ("observations", "actions", "values", "log_probs", "advantages", "returns")


class RoundSource(Protocol):
    """What the buffer asks about the last step; `SlotVecEnv` is one."""

    last_elapsed_s: Floats
    """[A] seconds between the last two decisions."""
    last_failed: Bools
    """[A] whether the last step failed and is none."""

    @property
    def active(self) -> Bools:
        """[A] whether each agent has something to decide after the last step."""
        ...


class SlotRolloutBuffer(RolloutBuffer):
    """A rollout buffer that yields the rows of active agents only, and discounts by time.

    stable-baselines3 knows no agents that are absent: it stores and trains on every row. Here a row
    counts where its observation says `active`, so `PPO.train` can be left alone: minibatches,
    their normalised advantages and the explained variance are those of the rows that count.

    An agent's step is from one of its active rounds to the next, however many rounds of others lie
    between (its slot may be empty for a while): the discount of what follows is
    gamma ** (seconds between / `reference_round_s`) [Bradtke & Duff 1994, semi-Markov decision
    problems], and lambda of the generalised advantage estimate [Schulman et al. 2015,
    arXiv 1506.02438] counts own active steps. What lies beyond the rollout is worth the critic's
    value if the agent is active then, and 0 if its slot is empty: rewards are centred, and a value
    of an empty row was never learned. After a failed step the critic's value before it stands.

    Args:
        reference_round_s: seconds over which the discount is gamma; other arguments as in
            `RolloutBuffer`.

    Attributes:
        source: where seconds and activity come from; set it before the first `add`. Without one,
            each step takes `reference_round_s`.
    """

    elapsed_s: Floats
    failed: Bools

    def __init__(self, *args: object, reference_round_s: float = 1.0, **kwargs: object) -> None:
        if not reference_round_s > 0:
            raise ValueError(f"reference_round_s must be above 0, got {reference_round_s}.")
        self.reference_round_s = reference_round_s
        self.source: RoundSource | None = None
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Empty the buffer."""
        super().reset()
        self.elapsed_s = np.full((self.buffer_size, self.n_envs), self.reference_round_s)
        self.failed = np.zeros((self.buffer_size, self.n_envs), np.bool_)
        self._compressed = False

    @property
    def active(self) -> Bools:
        """[N, A] rows that count; valid until `get`."""
        return (self.observations[..., ACTIVE] > 0) & ~self.failed

    def add(
        self,
        obs: NDArray[np.float32],
        action: NDArray[np.int64],
        reward: NDArray[np.float32],
        episode_start: NDArray[np.bool_],
        value: Tensor,
        log_prob: Tensor,
    ) -> None:
        """Store a step of all agents, and what `source` says of it."""
        if self.source is not None:
            self.elapsed_s[self.pos] = self.source.last_elapsed_s
            self.failed[self.pos] = self.source.last_failed
        super().add(obs, action, reward, episode_start, value, log_prob)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: NDArray[np.bool_]) -> None:
        """Fill `advantages` and `returns`; both stay 0 in rows that do not count."""
        present = self.observations[..., ACTIVE] > 0
        active = present & ~self.failed
        discounts = self.gamma ** (self.elapsed_s / self.reference_round_s)
        next_value = last_values.detach().cpu().numpy().reshape(self.n_envs).astype(np.float64)
        if self.source is not None:
            next_value = np.where(self.source.active, next_value, 0.0)
        next_advantage = np.zeros(self.n_envs)
        discount = np.ones(self.n_envs)
        ends = np.asarray(dones, np.bool_)
        for step in reversed(range(self.buffer_size)):
            next_value = np.where(ends, 0.0, next_value)
            next_advantage = np.where(ends, 0.0, next_advantage)
            discount = np.where(ends, 1.0, discount) * discounts[step]
            value = self.values[step].astype(np.float64)
            delta = self.rewards[step] + discount * next_value - value
            advantage = delta + discount * self.gae_lambda * next_advantage
            on, failed = active[step], present[step] & self.failed[step]
            self.advantages[step] = np.where(on, advantage, 0.0)
            next_value = np.where(on | failed, value, next_value)
            next_advantage = np.where(on, advantage, np.where(failed, 0.0, next_advantage))
            discount = np.where(on | failed, 1.0, discount)
            ends = self.episode_starts[step] > 0
        self.returns = np.where(active, self.advantages + self.values, 0.0).astype(np.float32)

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """Yield the rows that count in random minibatches.

        Raises:
            ValueError: no row counts.
        """
        assert self.full
        if not self._compressed:
            keep = self.swap_and_flatten(self.active[..., None]).reshape(-1)
            for name in COLUMNS:
                setattr(self, name, self.swap_and_flatten(getattr(self, name))[keep])
            self._compressed = True
            self.generator_ready = True
        size = len(self.observations)
        if not size:
            raise ValueError("no agent was active in the whole rollout.")
        indices = np.random.permutation(size)  # noqa: NPY002 - seeded by PPO, as the base class
        for start in range(0, size, batch_size or size):
            yield self._get_samples(indices[start : start + (batch_size or size)])

    def active_observations(self) -> NDArray[np.float32]:
        """Return the observations of rows that count, float32 [rows, 1 + F]; valid until `get`."""
        rows: NDArray[np.float32] = self.observations[self.active]
        return rows
