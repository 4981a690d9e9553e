"""Goodput with a measured acceptance rate for each position: one depth, no geometric assumption.

Sources: vLLM #32374, `vllm/v1/spec_decode/dynamic/manager.py` (removed before the merge), and SGLang
#28045, `srt/speculative/throughput_aware_params.py`.

Legend: K deepest depth.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from specdepth.scheduler.grading import grade
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE
from .uniform import goodput_of, uniform_depths


class PositionGoodputDepth:
    """vLLM's discarded manager: argmax of (1 + sum of p_i for i <= k) over the time at depth k.

    p_i is the share of drafts of at least i tokens in which the first i were accepted, since the
    start. Drafts that the text's end cut short count where their fate is known. vLLM takes a
    position never drafted as hopeless; here it follows its predecessors geometrically, as in SGLang,
    or a shallow start would never be left.

    Args:
        warmup: rounds that use the geometric prior 0.7 ** i instead, where vLLM reads an offline
            profile.

    Raises:
        ValueError: when `warmup` is negative.
    """

    lawful_under = EVERY_RULE

    prior_rate = 0.7

    def __init__(self, warmup: int = 10) -> None:
        if warmup < 0:
            raise ValueError(f"warmup is a number of rounds, 0 or more, got {warmup}.")
        self.warmup = warmup
        self.reset()

    def reset(self) -> None:
        """Forget all counts."""
        self._rounds = 0
        self._counts: Floats = np.zeros((2, 0))

    def choose(self, state: RoundState) -> Ints:
        """Return the best depth, cut to what each sequence has on offer, int64 [R]."""
        depths = uniform_depths(state)
        if not state.num_running:
            return state.max_depths.copy()
        top = state.max_num_speculative_tokens
        if self._counts.shape[1] < top:
            self._counts = np.pad(self._counts, ((0, 0), (0, top - self._counts.shape[1])))
        survived, drafted = self._counts[:, :top]
        if self._rounds < self.warmup:
            drafted = np.zeros(top)
        rates = np.where(drafted > 0, survived / np.maximum(drafted, 1), np.nan)
        scores = goodput_of(state, depths, extrapolate(rates, self.prior_rate))
        best: Ints = depths[scores.argmax()]
        return best

    def observe(self, outcome: RoundOutcome) -> None:
        """Count how far the drafts came."""
        self._rounds += 1
        self._counts += survival_counts(outcome, self._counts.shape[1])

    def __repr__(self) -> str:
        return f"PositionGoodputDepth(warmup={self.warmup})"


class WindowGoodputDepth:
    """SGLang's throughput-aware policy: rates over the last rounds, a new depth every few rounds.

    It starts in the middle, waits until every position of the current depth has a full window, and
    moves when another depth scores better by `hysteresis`. When the depth falls, deeper windows are
    emptied. Depths start at 1: at 0 it would see nothing and stay there.

    Args:
        window: rounds that a rate is the mean of.
        interval: rounds between decisions.
        hysteresis: how much better another depth must be, as a fraction.

    Raises:
        ValueError: a window or interval below 1, or a negative hysteresis.
    """

    lawful_under = EVERY_RULE

    def __init__(self, window: int = 20, interval: int = 5, hysteresis: float = 0.1) -> None:
        if window < 1 or interval < 1 or not hysteresis >= 0:
            raise ValueError(
                "window and interval are 1 round or more and hysteresis 0 or more, got "
                f"{window}, {interval} and {hysteresis}."
            )
        self.window, self.interval, self.hysteresis = window, interval, hysteresis
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        self._depth = 0
        self._rounds = 0
        self._windows: list[deque[float]] = []

    def choose(self, state: RoundState) -> Ints:
        """Return the current depth, cut to what each sequence has on offer, int64 [R]."""
        top = state.max_num_speculative_tokens
        if not top or not state.num_running:
            return np.zeros(state.num_running, np.int64)
        if len(self._windows) != top:
            self.reset()
            self._windows = [deque(maxlen=self.window) for _ in range(top)]
            self._depth = (top + 2) // 2
        if self._rounds >= self.interval:
            self._rounds = 0
            if all(len(window) == self.window for window in self._windows[: self._depth]):
                self._decide(state)
        return np.minimum(self._depth, state.max_depths)

    def observe(self, outcome: RoundOutcome) -> None:
        """Put the round's rates into the windows."""
        survived, drafted = survival_counts(outcome, len(self._windows))
        if not drafted.any():
            return
        self._rounds += 1
        for window, reached, all_of_them in zip(self._windows, survived, drafted, strict=True):
            if all_of_them:
                window.append(reached / all_of_them)

    def _decide(self, state: RoundState) -> None:
        rates = np.array([sum(w) / len(w) if w else np.nan for w in self._windows])
        scores = goodput_of(state, uniform_depths(state), extrapolate(rates, 0.0))
        best = 1 + int(scores[1:].argmax())
        if scores[best] > scores[self._depth] * (1 + self.hysteresis):
            for window in self._windows[best:]:
                window.clear()
            self._depth = best

    def __repr__(self) -> str:
        return f"WindowGoodputDepth({self.window}, {self.interval}, {self.hysteresis:g})"


def survival_counts(outcome: RoundOutcome, max_num_speculative_tokens: int) -> Floats:
    """Return [2, K]: drafts whose first i tokens were accepted, and drafts where that is known."""
    grades = grade(outcome, max_num_speculative_tokens)
    drafted = np.arange(max_num_speculative_tokens) < outcome.num_drafted[:, None]
    # A draft that was rejected at some token did not get past it, so deeper ones have failed too.
    known = grades.accepted | (grades.rejected[:, None] & drafted)
    return np.array((grades.accepted.sum(axis=0), known.sum(axis=0)), np.float64)


def extrapolate(rates: Floats, prior: float) -> Floats:
    """Fill unknown rates [K], NaN, and make them non-increasing.

    An unknown rate is its predecessor times the mean step of those before (their geometric mean), or
    its predecessor where there is one only; with nothing known, powers of `prior`.
    """
    if np.isnan(rates[:1]).any():
        return prior ** np.arange(1.0, len(rates) + 1)
    filled = rates.copy()
    for i in np.flatnonzero(np.isnan(rates)):
        first, last = filled[0], filled[i - 1]
        step = (last / first) ** (1 / (i - 1)) if i > 1 and first > 0 else 1.0
        filled[i] = last * step
    return np.minimum.accumulate(filled)
