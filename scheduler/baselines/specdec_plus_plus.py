"""SpecDec++: stop when a rejection among the drafted tokens has become too likely.

Source: Huang et al. 2024, "SpecDec++" (arXiv 2405.19715), which proves that for a fixed price of a draft
pass the best stop is a threshold on P(at least one of the drafted tokens is rejected).
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator

from .lawful import EVERY_RULE


class SpecDecPlusPlus:
    """Draft until 1 - P(all drafted tokens are accepted) exceeds a threshold; the last token stays.

    The authors predict acceptance with a head on the draft model's hidden state, which the seam does not
    show. Two things can take its place:

    * a `SurvivalEstimator`: depths are known before drafting, no pass is wasted, with any drafter;
    * without one, the draft model's largest probability at each position. The seam asks before a token
      is drawn, so a stop costs one draft pass more than was used. The authors' code pays for that pass
      too (its head sees a token one pass later) and verifies the token it yields; the paper's rule,
      followed here, does not. Prompt lookup proposes with certainty, so without an estimator all that
      is on offer is drafted, up to K.

    Args:
        threshold: largest probability of a rejection that still drafts on; the authors use 0.3 to 0.7.
        survival: estimator; `observe` and `reset` go to it too.

    Raises:
        ValueError: when the threshold is outside 0..1.
    """

    # Estimators see `RoundState` and past outcomes only; top-1 values are of earlier positions.
    lawful_under = EVERY_RULE

    def __init__(self, threshold: float = 0.5, survival: SurvivalEstimator | None = None) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(
                f"SpecDec++'s threshold is a probability of rejection in 0..1, got {threshold}."
            )
        self.threshold = threshold
        self.survival = survival

    def reset(self) -> None:
        """Reset the estimator."""
        if self.survival is not None:
            self.survival.reset()

    def choose(self, state: RoundState) -> Ints:
        """Return depths, int64 [R]: by the estimator, or what is on offer."""
        most = np.minimum(state.max_depths, state.max_num_speculative_tokens)
        if self.survival is None:
            return most
        goes_on = 1 - self.survival.survival(state) <= self.threshold
        depths: Ints = np.minimum(1 + goes_on.sum(axis=1), most)
        return depths

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: whether the tokens drawn so far are still likely to be all accepted."""
        if self.survival is not None:
            return np.ones(len(signals.rows), np.bool_)
        accepted = np.prod(signals.top1[:, : signals.num_drafted], axis=1)
        return np.asarray(1 - accepted <= self.threshold)

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass the outcome on to the estimator."""
        if self.survival is not None:
            self.survival.observe(outcome)

    def __repr__(self) -> str:
        return f"SpecDecPlusPlus({self.threshold:g}, survival={self.survival!r})"
