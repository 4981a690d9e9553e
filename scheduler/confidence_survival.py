"""Survival from what a draft model was sure of in the last round: lawful under every rule.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from .grading import grade
from .online_logistic import OnlineLogistic, log_odds
from .state import Floats, Ints, RoundOutcome, RoundState
from .survival_estimators import within_depths


class ConfidenceSurvival:
    """`OnlineLogistic` on each sequence's mean confidence in its last drafting round.

    A draft model has shown nothing yet when depths are chosen. The log-odds of its largest
    probabilities in the round before, mean over positions, stand for this round; the logistic model
    is fitted to that use, so it learns how little an old confidence is worth. A sequence without one
    takes the mean of the others.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was learned."""
        self.model: OnlineLogistic | None = None
        """From the first round on."""
        self._seen: tuple[Ints, Floats] | None = None

    def survival(self, state: RoundState) -> Floats:
        """Return products of the predicted acceptance probabilities, float64 [R, K]."""
        top = state.max_num_speculative_tokens
        if self.model is None or len(self.model.intercepts) != top:
            self.model = OnlineLogistic(top)
        odds = log_odds(state.draft_top1)
        known = ~np.isnan(odds)
        num_known = known.sum(axis=1)
        sums = np.where(known, odds, 0.0).sum(axis=1)
        features = np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)
        self._seen = (state.request_ids, features)
        shown = features[num_known > 0]
        filled = np.where(num_known > 0, features, shown.mean() if len(shown) else 0.0)
        rates = self.model.predict(np.repeat(filled[:, None], top, axis=1))
        return within_depths(np.asarray(np.cumprod(rates, axis=1), np.float64), state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in the verdicts of the round that the last `survival` was asked for."""
        if self.model is None or self._seen is None:
            return
        (request_ids, features), self._seen = self._seen, None
        if not np.array_equal(request_ids, outcome.request_ids):
            return  # another scheduler's round
        top = len(self.model.intercepts)
        grades = grade(outcome, top)
        self.model.observe(
            np.repeat(features[:, None], top, axis=1), grades.tested, grades.accepted
        )

    def __repr__(self) -> str:
        return "ConfidenceSurvival()"
