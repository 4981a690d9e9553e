"""Clocks: the wall, a thread's CPU time, or a virtual one that a cost model moves."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

from specdepth.scheduler.cost import CostModel

GRID_S = 2.0**-36
"""Virtual time moves in steps of this (15 ps), so that differences of moments are exact for 18 hours: the
same round takes the same time to the last bit, whenever it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What the model passes of one round computed; enough to price it."""

    num_pass_tokens: int
    """Tokens in the verification pass, prefill included."""
    num_prefill_tokens: int
    """Of those, tokens besides one for each decoding sequence and its drafts."""
    num_seqs: int
    """Sequences in the pass."""
    num_logit_rows: int
    """Rows that went through the output head."""
    num_context_tokens: int
    """Sum of the context lengths that its attention read."""
    num_prefill_pairs: int
    """See `CostModel.pass_s`."""
    draft_pass_sequences: tuple[int, ...]
    """Sequences in each draft pass."""
    num_catch_up_tokens: int
    """Tokens that draft passes computed beyond one a sequence."""


class Clock(Protocol):
    """Where the engine takes time from, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def wait_until(self, moment: float) -> None:
        """Let time pass to `moment`; returns at once if that is over."""
        ...

    def pass_times(self, work: PassWork, draft_s: float, verify_s: float) -> tuple[float, float]:
        """Return (draft, verify) seconds to book, given those that the runner measured."""
        ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Sleep."""
        time.sleep(max(moment - self.now(), 0.0))

    def pass_times(self, work: PassWork, draft_s: float, verify_s: float) -> tuple[float, float]:
        """Measured times as they are."""
        return draft_s, verify_s


class ThreadClock(WallClock):
    """CPU time of the calling thread: what benchmarks on shared cores read. With torch at one thread
    it is the whole work; time spent waiting for the core is not in it.
    """

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        """CPU seconds of this thread, waits added."""
        return time.thread_time() + self._skipped

    def wait_until(self, moment: float) -> None:
        """Skip ahead: a sleeping thread uses no CPU time."""
        self._skipped += max(moment - self.now(), 0.0)


class VirtualClock:
    """Stands still except for `pass_times`, which moves it by what `cost` says; deterministic."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Jump to `moment`."""
        self._now = max(self._now, math.ceil(moment / GRID_S) * GRID_S)

    def pass_times(self, work: PassWork, draft_s: float, verify_s: float) -> tuple[float, float]:
        """Modelled times; the measured ones are ignored."""
        draft_s = _on_grid(
            self.cost.draft_round_s(work.draft_pass_sequences, work.num_catch_up_tokens)
        )
        verify_s = _on_grid(
            self.cost.pass_s(
                work.num_pass_tokens,
                work.num_prefill_tokens,
                work.num_context_tokens,
                work.num_prefill_pairs,
            )
        )
        self._now += draft_s + verify_s + _on_grid(self.cost.overhead_s)
        return draft_s, verify_s


def _on_grid(seconds: float) -> float:
    return round(seconds / GRID_S) * GRID_S
