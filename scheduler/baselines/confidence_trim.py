"""What DSpark and vLLM's adaptive verification share: draft K, then verify what is worth it.

Legend: R running sequences, D of them that drafted, K deepest depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np

from specdepth.scheduler.depth import ProposalSignals
from specdepth.scheduler.grading import grade
from specdepth.scheduler.online_logistic import OnlineLogistic, log_odds
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator
from specdepth.scheduler.survival_estimators import MatchLengthSurvival

TRIM_RULES: Final = frozenset({"greedy", "coupled", "prompt-lookup"})
"""Rules that no cut after drafting can bend."""


class ConfidenceTrim(ABC):
    """Base of rules that choose how much of a finished draft to verify.

    With a draft model all sequences draft K tokens, as the authors' drafters do, and `trim` cuts
    by the model's confidence: `OnlineLogistic` on its top-1 probability stands for the trained
    confidence head that a general draft model lacks. What prompt lookup found is known before
    `choose`, which cuts it by `survival` at once.
    """

    lawful_under = TRIM_RULES

    def __init__(self, survival: SurvivalEstimator | None = None) -> None:
        self.survival = MatchLengthSurvival() if survival is None else survival
        self.confidence: OnlineLogistic | None = None
        """With a draft model, from the first round on."""

    def reset(self) -> None:
        """Forget what was learned."""
        self.survival.reset()
        self.confidence = None

    def choose(self, state: RoundState) -> Ints:
        """Return K for each sequence with a draft model, else what is worth verifying, int64 [R]."""
        if not state.num_running:
            return np.zeros(0, np.int64)
        if state.drafter != "draft-model":
            survival = self.survival.survival(state)
            rows = np.arange(state.num_running)
            return self._admit(state, rows, survival, state.max_depths)
        top = state.max_num_speculative_tokens
        if self.confidence is None or len(self.confidence.intercepts) != top:
            self.confidence = OnlineLogistic(top)
        return state.max_depths.copy()

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        """Return how many drafted tokens of each of the D sequences to verify, int64 [D]."""
        if state.drafter != "draft-model" or self.confidence is None:
            return signals.num_proposed
        confidence = self.confidence.predict(log_odds(signals.top1))
        drafted = np.arange(confidence.shape[1]) < signals.num_proposed[:, None]
        known: Floats = np.where(drafted, np.nan_to_num(confidence), 0.0)
        survival = np.asarray(np.cumprod(known, axis=1), np.float64)
        return self._admit(state, signals.rows, survival, signals.num_proposed)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how confidence and acceptance go together."""
        self.survival.observe(outcome)
        if self.confidence is not None:
            grades = grade(outcome, len(self.confidence.intercepts))
            self.confidence.observe(log_odds(outcome.draft_top1), grades.tested, grades.accepted)

    @abstractmethod
    def _admit(self, state: RoundState, rows: Ints, survival: Floats, num_offered: Ints) -> Ints:
        """Return depths [D] for the sequences in `rows` [D], each with `num_offered` [D] tokens whose
        survival is `survival` [D, K].
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.survival!r})"
