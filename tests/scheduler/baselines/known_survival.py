"""An estimator that knows, random machines, and the best of all depths by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from specdepth.scheduler.baselines.pricing import round_seconds
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Floats, RoundOutcome, RoundState


class KnownSurvival:
    """Says what it was told; a `SurvivalEstimator`."""

    def __init__(self, survival: Any) -> None:
        self.table: Floats = np.asarray(survival, np.float64)
        self.num_observed = 0
        self.num_resets = 0

    def survival(self, state: RoundState) -> Floats:
        return self.table

    def observe(self, outcome: RoundOutcome) -> None:
        self.num_observed += 1

    def reset(self) -> None:
        self.num_resets += 1


def random_survival(rng: np.random.Generator, num_rows: int, depth: int) -> Floats:
    return np.asarray(np.cumprod(rng.random((num_rows, depth)) ** 0.5, axis=1), np.float64)


def random_cost(rng: np.random.Generator, **drafting: Any) -> CostModel:
    """Passes of 1 to 16 tokens that rise by chance, with steps and flat pieces."""
    rises = np.where(rng.random(16) < 0.4, 0.0, rng.random(16) * rng.choice([0.1, 0.5]))
    seconds = 1.0 + np.cumsum(rises)
    return CostModel(
        name="random",
        tokens=tuple(range(1, 17)),
        verify_s=tuple(seconds.tolist()),
        overhead_s=0.1 * rng.random(),
        **drafting,
    )


def goodput(state: RoundState, survival: Floats, depths: Any) -> float:
    """Expected tokens a second of one choice."""
    depths = np.asarray(depths)
    admitted = survival[np.arange(survival.shape[1]) < depths[:, None]].sum()
    return float((state.num_running + admitted) / round_seconds(state, depths))


def best_goodput(state: RoundState, survival: Floats) -> float:
    """The most that any depths make."""
    every = itertools.product(range(survival.shape[1] + 1), repeat=len(survival))
    return max(goodput(state, survival, depths) for depths in every)
