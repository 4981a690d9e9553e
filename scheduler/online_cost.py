"""Keeps a cost model true while an engine runs: `OnlineCost`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .cost import CostModel
from .state import RoundOutcome

MAX_BUCKETS = 22
"""Powers of two up to the largest pass of a cost model, 2^20 tokens, and one for 0."""
MAX_DIP = 0.5
"""What `CostModel` takes between neighbours of a staircase."""


class OnlineCost:
    """Corrects a cost model by rounds that really ran.

    Passes are put into buckets of token counts, each twice the last. A bucket has one factor on the
    measured price; it follows the median of (measured / predicted) by steps of at most `step` a round,
    so that a slow round moves it no more than any other, and never leaves 1/`bound`..`bound`. Draft
    passes have one factor of their own. Prices of context, catching up and overhead stay.

    Args:
        cost: to start from.
        step: largest change of a factor's logarithm by one round.
        width: errors of this size in the logarithm make a full step; smaller ones less.
        bound: factors lie in 1/bound..bound.

    Raises:
        ValueError: step or width not above 0, bound below 1.
    """

    def __init__(
        self, cost: CostModel, *, step: float = 0.01, width: float = 0.1, bound: float = 1.5
    ) -> None:
        if not (0 < step < math.inf and 0 < width < math.inf and 1 <= bound < math.inf):
            raise ValueError(
                f"step and width must be above 0 and bound at least 1, got {step}, {width}, {bound}."
            )
        self._start = cost
        self._step, self._width, self._limit = step, width, math.log(bound)
        self._log_factors = np.zeros(MAX_BUCKETS)
        self._num_rounds = np.zeros(MAX_BUCKETS, np.int64)
        self._log_draft_factor = 0.0

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in one round."""
        cost, size = self._start, outcome.num_pass_tokens
        if size:
            bucket = min(size.bit_length(), MAX_BUCKETS - 1)
            attention_s = (
                cost.context_s * outcome.num_context_tokens
                + cost.prefill_pair_s * outcome.num_prefill_pairs
            )
            predicted_s = cost.pass_s(size, outcome.num_prefill_tokens)
            self._log_factors[bucket] = self._moved(
                float(self._log_factors[bucket]), outcome.verify_s - attention_s, predicted_s
            )
            self._num_rounds[bucket] += 1
        draft_s = cost.draft_round_s(outcome.draft_pass_sequences, outcome.num_catch_up_tokens)
        if draft_s:
            self._log_draft_factor = self._moved(self._log_draft_factor, outcome.draft_s, draft_s)

    @property
    def cost(self) -> CostModel:
        """The model as corrected so far. Sizes between two buckets that ran get a factor between
        theirs, sizes beyond them the nearest one's.
        """
        known = np.flatnonzero(self._num_rounds)
        if not len(known):
            return self._start
        # Bucket b holds 2^(b - 1) .. 2^b - 1 tokens; its middle is 2^(b - 0.5).
        places = np.log2(np.array(self._start.tokens)) + 0.5
        factors = np.exp(np.interp(places, known, self._log_factors[known]))
        return replace(
            self._start,
            verify_s=_scaled(self._start.verify_s, factors),
            prefill_s=_scaled(self._start.prefill_s, factors),
            draft_s=tuple(s * math.exp(self._log_draft_factor) for s in self._start.draft_s),
        )

    def _moved(self, log_factor: float, measured_s: float, predicted_s: float) -> float:
        error = math.log(max(measured_s, 1e-12) / predicted_s) - log_factor
        moved = log_factor + self._step * max(-1.0, min(error / self._width, 1.0))
        return max(-self._limit, min(moved, self._limit))


def _scaled(seconds: tuple[float, ...], factors: np.ndarray) -> tuple[float, ...]:
    scaled = np.array(seconds) * factors
    # Two factors may pull neighbours further apart than a staircase of kernels ever is.
    floor = MAX_DIP * np.maximum.accumulate(scaled)
    return tuple(np.maximum(scaled, floor).tolist())
