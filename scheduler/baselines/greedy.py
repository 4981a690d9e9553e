"""Greedy goodput per sequence that prices the verification pass alone.

The rule of DSpark and of vLLM's adaptive verification without their drafter: admit drafted tokens by
survival while that pays. It ignores that draft passes go by the deepest sequence, which costs it up
to a fifth of the throughput with a draft model; `CappedGreedyDepth` does not.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator

from .admission import expected_tokens, rank_tokens
from .lawful import EVERY_RULE
from .pricing import verify_seconds


class GreedyDepth:
    """The B likeliest tokens of the batch, B chosen to maximise expected tokens a second.

    For a price that depends on the sum of depths alone this is the best of all depths, whatever the
    shape of the price.

    Args:
        survival: estimates from history, and from what prompt lookup shows.
    """

    # Nothing in a RoundState depends on a token that a draft model has yet to draw.
    lawful_under = EVERY_RULE

    def __init__(self, survival: SurvivalEstimator) -> None:
        self.survival = survival

    def reset(self) -> None:
        """Let the estimator forget."""
        self.survival.reset()

    def choose(self, state: RoundState) -> Ints:
        """Return the admitted tokens of each sequence, int64 [R]."""
        if not state.num_running:
            return np.zeros(0, np.int64)
        ranked = rank_tokens(self.survival.survival(state))
        tokens = expected_tokens(ranked, state.num_running)
        budget = int((tokens / verify_seconds(state, len(tokens) - 1)).argmax())
        return ranked.depths(budget, state.num_running)

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the estimator learn."""
        self.survival.observe(outcome)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.survival!r})"
