"""When the requests of a workload come: open loops (arrival times) and closed loops (concurrency)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np


class Arrivals(Protocol):
    """When requests come. Times in seconds from the workload's start.

    A request is running, waiting or finished from its release on, so the three counts add up to those
    released; implementations keep no state of their own.
    """

    def due(self, *, now_s: float, num_running: int, num_waiting: int, num_finished: int) -> int:
        """Requests to release now, without regard to how many there are."""
        ...

    def next_s(self, now_s: float, num_released: int) -> float | None:
        """When time alone makes the next request due, after `now_s`; None if it never does."""
        ...

    def check(self, num_requests: int) -> None:
        """Raise ValueError if `num_requests` would not all be released."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests come at given times, whatever the engine does."""

    times_s: tuple[float, ...]
    """Arrival time of each request, in order; a user's log or one of the methods below."""

    def __post_init__(self) -> None:
        times = np.asarray(self.times_s, np.float64)
        if not np.isfinite(times).all() or (times < 0).any() or (np.diff(times) < 0).any():
            raise ValueError("arrival times must be finite, 0 or more, and in order.")

    @classmethod
    def poisson(cls, num_requests: int, rate: float, rng: np.random.Generator) -> OpenLoop:
        """Independent arrivals, `rate` a second on average."""
        _check_positive(rate=rate)
        gaps = rng.exponential(1 / rate, num_requests)
        return cls(times_s=tuple(np.cumsum(gaps).tolist()))

    @classmethod
    def bursty(
        cls,
        num_requests: int,
        *,
        quiet_rate: float,
        burst_rate: float,
        mean_quiet_s: float,
        mean_burst_s: float,
        rng: np.random.Generator,
    ) -> OpenLoop:
        """Poisson arrivals whose rate switches between two values at random times.

        A Markov-modulated Poisson process with two states, which last an exponential time. On average
        requests come at (quiet_rate * mean_quiet_s + burst_rate * mean_burst_s) /
        (mean_quiet_s + mean_burst_s) a second. It starts quiet or in a burst as it would be found.

        Args:
            num_requests: how many.
            quiet_rate: arrivals a second between bursts; may be 0.
            burst_rate: arrivals a second in a burst.
            mean_quiet_s: mean time between bursts.
            mean_burst_s: mean length of a burst.
            rng: where randomness comes from.
        """
        _check_positive(burst_rate=burst_rate, mean_quiet_s=mean_quiet_s, mean_burst_s=mean_burst_s)
        if not quiet_rate >= 0:
            raise ValueError(f"quiet_rate must be 0 or more, got {quiet_rate}.")
        rates, means = (quiet_rate, burst_rate), (mean_quiet_s, mean_burst_s)
        state = int(rng.random() < mean_burst_s / (mean_quiet_s + mean_burst_s))
        start_s, times = 0.0, list[float]()
        while len(times) < num_requests:
            end_s = start_s + rng.exponential(means[state])
            count = rng.poisson(rates[state] * (end_s - start_s))
            # Given their number, arrivals of a Poisson process are uniform over the time.
            times += np.sort(rng.uniform(start_s, end_s, count)).tolist()
            start_s, state = end_s, 1 - state
        return cls(times_s=tuple(times[:num_requests]))

    def due(self, *, now_s: float, num_running: int, num_waiting: int, num_finished: int) -> int:
        """Requests whose time has come."""
        come = int(np.searchsorted(self.times_s, now_s, side="right"))
        return max(come - (num_running + num_waiting + num_finished), 0)

    def next_s(self, now_s: float, num_released: int) -> float | None:
        """The next request's time."""
        if num_released >= len(self.times_s):
            return None
        return max(self.times_s[num_released], now_s)

    def check(self, num_requests: int) -> None:
        """As many times as requests."""
        if num_requests != len(self.times_s):
            raise ValueError(f"{num_requests} requests have {len(self.times_s)} arrival times.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a closed loop with one concurrency."""

    concurrency: int
    """Requests that are kept in the engine, running or waiting."""
    until: float = float("inf")
    """End of the phase, in the unit of the `ClosedLoop`; the last phase goes on whatever it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """A fixed or varying number of users, each of whom sends the next request when one is answered.

    When concurrency falls, requests that are in the engine go on and none is released until fewer are
    left than the new number.
    """

    phases: tuple[Phase, ...]
    unit: Literal["fraction", "seconds"] = "fraction"
    """What `Phase.until` counts: finished requests as a fraction of all, or time."""
    num_requests: int = 0
    """All requests; needed for fractions only."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("a closed loop needs at least one phase.")
        if self.unit not in ("fraction", "seconds"):
            raise ValueError(f"unit must be 'fraction' or 'seconds', got {self.unit!r}.")
        ends = [phase.until for phase in self.phases[:-1]]
        if any(b <= a for a, b in zip([0.0, *ends], ends, strict=False)):
            raise ValueError(f"phases must end later and later, after 0, got {ends}.")
        if self.unit == "fraction":
            if len(self.phases) > 1 and self.num_requests < 1:
                raise ValueError("phases by fraction need num_requests.")
            if ends and ends[-1] >= 1:
                raise ValueError(f"all phases but the last must end before 1, got {ends}.")
        # With fractions a pause would never end; with seconds, the last phase would not.
        paused = self.phases if self.unit == "fraction" else self.phases[-1:]
        if any(phase.concurrency < 1 for phase in paused):
            raise ValueError("concurrency must be at least 1, except in phases before the last.")
        if any(phase.concurrency < 0 for phase in self.phases):
            raise ValueError("concurrency must be 0 or more.")

    @classmethod
    def constant(cls, concurrency: int) -> ClosedLoop:
        """The same concurrency throughout."""
        return cls(phases=(Phase(concurrency=concurrency),))

    @classmethod
    def varying(
        cls, num_requests: int, concurrencies: Iterable[int], rng: np.random.Generator
    ) -> ClosedLoop:
        """Each of `concurrencies` for an equal share of the requests, in random order."""
        order = rng.permutation(np.asarray(list(concurrencies), np.int64)).tolist()
        phases = [
            Phase(concurrency=concurrency, until=(i + 1) / len(order))
            for i, concurrency in enumerate(order)
        ]
        return cls(phases=tuple(phases), num_requests=num_requests)

    def concurrency(self, now_s: float, num_finished: int) -> int:
        """Requests that should be in the engine."""
        by_time = self.unit == "seconds"
        at = now_s if by_time else num_finished / max(self.num_requests, 1)
        for phase in self.phases[:-1]:
            if at < phase.until:
                return phase.concurrency
        return self.phases[-1].concurrency

    def due(self, *, now_s: float, num_running: int, num_waiting: int, num_finished: int) -> int:
        """Requests that are missing in the engine."""
        return max(self.concurrency(now_s, num_finished) - num_running - num_waiting, 0)

    def next_s(self, now_s: float, num_released: int) -> float | None:
        """The end of the current phase, if the loop goes by seconds."""
        if self.unit == "seconds":
            for phase in self.phases[:-1]:
                if now_s < phase.until:
                    return phase.until
        return None

    def check(self, num_requests: int) -> None:
        """The number that fractions refer to."""
        if len(self.phases) > 1 and self.unit == "fraction" and num_requests != self.num_requests:
            raise ValueError(
                f"the closed loop was made for {self.num_requests} requests, got {num_requests}."
            )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0, got {value}.")
