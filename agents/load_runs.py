"""Numbers of several policies at one load, from the same requests: `LoadRuns`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.serving import ServeResult

from .intervals import CONFIDENCE, NUM_RESAMPLES, Interval

OFF = "off"
MIN_REQUESTS = 4
"""Below, no interval is given: so few requests say nothing about others."""


def load_name(load: int | str) -> str:
    """A load as tables and sentences call it: "load 4", "varying"."""
    return f"load {load}" if isinstance(load, int) else load


class LoadRuns:
    """Complete blocks of one load.

    Attributes:
        policies: names.
        num_blocks: complete ones.
        metrics: by policy, over all its blocks.
        num_repeats: times that requests were served.
        noise: standard deviation of the logarithm of a run's time, from the machine alone; widens the
            intervals. A run is one block under one policy.
        makespan_s, wall_s: by policy, the sum over blocks, on the engine's clock and by the wall.
        decision_s: by policy, wall time of its decisions where the engine's clock does not show it.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self.policies = tuple(policies)
        self.num_blocks = 0
        self.num_repeats = 0
        self.noise = 0.0
        self.metrics: dict[str, EngineMetrics] = {}
        self.makespan_s = dict.fromkeys(self.policies, 0.0)
        self.wall_s = dict.fromkeys(self.policies, 0.0)
        self.decision_s: dict[str, float] = {}
        self._in_flight_s = dict.fromkeys(self.policies, 0.0)
        self._texts: dict[str, list[int]] = {name: [] for name in self.policies}
        self._rows: dict[int, int] = {}
        self._resampled: dict[tuple[str, int], NDArray[np.float64]] = {}
        self._sums: dict[str, NDArray[np.float64]] = {
            name: np.zeros((0, 3)) for name in self.policies
        }

    def add(self, block: Sequence[int], repeat: int, served: Mapping[str, ServeResult]) -> None:
        """Take in what each policy made of the requests `block`.

        Args:
            block: indices of requests; one that is served more than once is in it more than once.
            repeat: how often they were served before.
            served: by policy, with metrics that include all earlier blocks.
        """
        self._resampled.clear()
        self.num_blocks += 1
        self.num_repeats = max(self.num_repeats, repeat + 1)
        for index in block:
            self._rows.setdefault(index, len(self._rows))
        at = [self._rows[index] for index in block]
        for name, one in served.items():
            missing = len(self._rows) - len(self._sums[name])
            sums = np.concatenate([self._sums[name], np.zeros((missing, 3))])
            tokens = [len(result.token_ids) for result in one.results]
            np.add.at(sums, at, np.column_stack([tokens, one.request_s, one.request_wall_s]))
            self._sums[name] = sums
            self.makespan_s[name] += one.makespan_s
            self.wall_s[name] += one.wall_s
            self._in_flight_s[name] += one.mean_in_flight * one.makespan_s
            self._texts[name] += [hash(tuple(result.token_ids)) for result in one.results]
            self.metrics[name] = one.metrics

    def add_alias(self, alias: str, policy: str) -> None:
        """Show `policy` a second time, under the name of what it stands for at this load."""
        self.policies = (*self.policies, alias)
        times = (self.makespan_s, self.wall_s, self.decision_s, self._in_flight_s)
        stores: list[dict[str, Any]] = [self.metrics, *times, self._texts, self._sums]
        for values in stores:
            if policy in values:
                values[alias] = values[policy]

    @property
    def num_requests(self) -> int:
        """Different requests."""
        return len(self._rows)

    def sums(self, policy: str) -> dict[int, tuple[float, float]]:
        """Tokens and seconds of the engine's clock of each request, by its index."""
        rows = self._sums[policy][:, :2].tolist()
        return {index: (rows[at][0], rows[at][1]) for index, at in self._rows.items()}

    def policy_ms(self, policy: str) -> float:
        """Milliseconds of deciding a round."""
        metrics = self.metrics[policy]
        seconds = self.decision_s.get(policy, metrics.schedule_s)
        return 1e3 * seconds / max(metrics.num_rounds, 1)

    def mean_in_flight(self, policy: str) -> float:
        """Requests in the engine, averaged over time."""
        return self._in_flight_s[policy] / self.makespan_s[policy]

    def share_of_different_texts(self, policy: str, reference: str = OFF) -> float:
        """Share of answers that differ from those of `reference`: rounding, where decoding is exact."""
        pairs = list(zip(self._texts[policy], self._texts[reference], strict=True))
        return sum(a != b for a, b in pairs) / len(pairs)

    def throughput(self, policy: str, *, wall: bool = False, seed: int = 0) -> Interval:
        """Tokens a second of the engine's clock, or of wall time, with an interval over requests."""
        return self._estimate(policy, None, wall, seed)

    def ratio(self, policy: str, reference: str, *, wall: bool = False, seed: int = 0) -> Interval:
        """Throughput of `policy` over that of `reference`; requests are resampled in pairs."""
        return self._estimate(policy, reference, wall, seed)

    def gap_closed(self, policy: str, reference: str, oracle: str, *, seed: int = 0) -> Interval:
        """Share of the way from the throughput of `reference` to that of `oracle` that `policy` makes.

        The noise of a machine is not in the interval. There is none where some resamples leave no gap
        to close.
        """
        names = (policy, reference, oracle)
        mine, low, high = (self._rates(name, 1, None) for name in names)
        value = float((mine - low) / (high - low))
        mines, lows, highs = (self._rates(name, 1, seed) for name in names)
        if not (highs > lows).all():
            return Interval(value, math.nan, math.nan)
        return self._interval(value, lambda: np.asarray((mines - lows) / (highs - lows)))

    def _estimate(self, policy: str, reference: str | None, wall: bool, seed: int) -> Interval:
        column = 2 if wall else 1
        if policy == reference:
            return Interval(1.0, 1.0, 1.0)

        def value(seed: int | None) -> NDArray[np.float64]:
            rate = self._rates(policy, column, seed)
            return rate if reference is None else rate / self._rates(reference, column, seed)

        def samples() -> NDArray[np.float64]:
            rng = np.random.default_rng(seed)
            num_runs = self.num_blocks / (1 if reference is None else 2)
            noise = np.exp(self.noise / math.sqrt(num_runs) * rng.standard_normal(NUM_RESAMPLES))
            return value(seed) * noise

        return self._interval(float(value(None)), samples)

    def _interval(self, value: float, samples: Callable[[], NDArray[np.float64]]) -> Interval:
        if self.num_requests < MIN_REQUESTS:
            return Interval(value, math.nan, math.nan)
        low, high = np.quantile(samples(), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Interval(value, float(low), float(high))

    def _rates(self, policy: str, column: int, seed: int | None) -> NDArray[np.float64]:
        """Tokens a second of all requests, or of each resample of them.

        Args:
            policy: name.
            column: of the sums, 1 for the engine's clock and 2 for the wall.
            seed: of the resamples; None takes all requests once.

        Returns:
            [] or [NUM_RESAMPLES].
        """
        totals = self._sums[policy].sum(0) if seed is None else self._resamples(policy, seed)
        return np.asarray(totals[..., 0] / np.maximum(totals[..., column], 1e-12))

    def _resamples(self, policy: str, seed: int) -> NDArray[np.float64]:
        """Sums over requests drawn with replacement, the same draws for all policies."""
        if (policy, seed) not in self._resampled:
            weights = _draws(self.num_requests, seed)
            self._resampled[policy, seed] = weights @ self._sums[policy]
        return self._resampled[policy, seed]


@lru_cache(maxsize=4)
def _draws(count: int, seed: int) -> NDArray[np.float64]:
    """[NUM_RESAMPLES, count] how often each of `count` requests is in each resample."""
    picks = np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))
    picks += count * np.arange(NUM_RESAMPLES)[:, None]
    counts = np.bincount(picks.ravel(), minlength=NUM_RESAMPLES * count)
    return counts.reshape(NUM_RESAMPLES, count).astype(np.float64)
