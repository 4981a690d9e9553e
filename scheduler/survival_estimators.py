"""Simple `SurvivalEstimator`s: moving averages and counts, nothing fitted beforehand.

All read the `RoundState` and graded outcomes only: they know nothing of a token that a draft model
draws in this round.

Legend: R running sequences, K deepest depth, G groups of proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .grading import grade
from .state import Floats, Ints, RoundOutcome, RoundState, SequenceHistory


def within_depths(survival: Floats, state: RoundState) -> Floats:
    """Return `survival` with zeros beyond `state.max_depths`, as wide as the engine is deep: [R, K].

    What says nothing of deeper tokens gives them no chance; what says more is cut.
    """
    deepest, columns = state.max_num_speculative_tokens, np.arange(survival.shape[1])
    within = np.where(columns < state.max_depths[:, None], survival, 0.0)
    if len(columns) < deepest:
        return np.pad(within, ((0, 0), (0, deepest - len(columns))))
    return within[:, :deepest]


class EmaSurvival:
    """Geometric survival from each sequence's own moving average: P(first j accepted) = average^j.

    A sequence that stopped drafting shows nothing new, so its average goes back to the prior while
    it sits out; otherwise one bad stretch would keep it from ever drafting again.

    Args:
        half_life: rounds without drafting after which an average is half-way back to the prior.

    Raises:
        ValueError: when `half_life` is not above 0.
    """

    def __init__(self, half_life: float = 16.0) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life is a number of rounds above 0, got {half_life}.")
        self.half_life = half_life

    def survival(self, state: RoundState) -> Floats:
        """Return the powers of `acceptance_ema`, float64 [R, K]."""
        prior = SequenceHistory.prior_acceptance
        trust = 0.5 ** (state.rounds_since_draft / self.half_life)
        rate = prior + trust * (state.acceptance_ema - prior)
        powers = np.arange(1, state.max_num_speculative_tokens + 1)
        return within_depths(rate[:, None] ** powers, state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn: the engine keeps the averages."""

    def reset(self) -> None:
        """Nothing to forget."""

    def __repr__(self) -> str:
        return f"EmaSurvival(half_life={self.half_life:g})"


class CountedSurvival:
    """Acceptance rates by group of proposals and position, counted online from a prior.

    The chance that token j is accepted if those before it were is the mean of a beta law: accepted
    over tested tokens, with `weight` made-up ones at the prior rate. Survival is the product.
    `_groups` says which group each sequence is in.

    Args:
        first: [G] prior rate at the first position.
        later: prior rate at all others.
        weight: how many tested tokens the prior counts for.
    """

    def __init__(self, first: Sequence[float], later: float, weight: float) -> None:
        rates = (*first, later)
        if not all(0 < rate < 1 for rate in rates) or not weight > 0:
            raise ValueError(
                f"prior acceptance rates lie between 0 and 1 and their weight above 0, got {rates} "
                f"and {weight}."
            )
        self.first, self.later, self.weight = tuple(first), later, weight
        self.reset()

    def reset(self) -> None:
        """Go back to the prior."""
        self._tested: Floats = np.empty((len(self.first), 0))
        self._accepted: Floats = np.empty((len(self.first), 0))
        self._table: Floats | None = None
        self._seen: tuple[Ints, Ints] | None = None

    def survival(self, state: RoundState) -> Floats:
        """Return the table's row for each sequence, float64 [R, K]."""
        depth = state.max_num_speculative_tokens
        missing = depth - self._tested.shape[1]
        if missing > 0:
            self._grow(missing)
        table = self._table
        if table is None:
            rates: Floats = self._accepted / self._tested
            table = self._table = np.asarray(np.cumprod(rates, axis=1), np.float64)
        groups = self._groups(state)
        self._seen = (state.request_ids, groups)
        return within_depths(table[groups, :depth], state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Count the verdicts of the round that the last `survival` was asked for."""
        if self._seen is None or not np.array_equal(self._seen[0], outcome.request_ids):
            return  # another scheduler's round
        groups = self._seen[1]
        self._seen = None
        grades = grade(outcome, self._tested.shape[1])
        if not grades.tested.any():
            return
        member = np.arange(len(self.first))[:, None] == groups
        self._tested += member @ grades.tested.astype(np.float64)
        self._accepted += member @ grades.accepted.astype(np.float64)
        self._table = None

    def _groups(self, state: RoundState) -> Ints:
        raise NotImplementedError

    def _grow(self, missing: int) -> None:
        rates = np.full((len(self.first), missing), self.later)
        if not self._tested.shape[1]:
            rates[:, 0] = self.first
        self._tested = np.hstack([self._tested, np.full(rates.shape, self.weight)])
        self._accepted = np.hstack([self._accepted, rates * self.weight])
        self._table = None


class PositionSurvival(CountedSurvival):
    """One rate for each position, the same for all sequences.

    Args:
        first: prior rate at the first position.
        later: prior rate at the others, given that those before were accepted.
        weight: how many tested tokens the prior counts for.

    Raises:
        ValueError: a prior rate outside 0..1, or a weight that is not above 0.
    """

    def __init__(self, first: float = 0.6, later: float = 0.75, weight: float = 16.0) -> None:
        super().__init__((first,), later, weight)

    def _groups(self, state: RoundState) -> Ints:
        return np.zeros(state.num_running, np.int64)

    def __repr__(self) -> str:
        return f"PositionSurvival({self.first[0]:g}, {self.later:g}, {self.weight:g})"


class MatchLengthSurvival(CountedSurvival):
    """Rates by the length of the n-gram that prompt lookup matched, 0 to 4 and more, and position.

    The default prior is what SmolLM2 showed on code, maths, chat and summaries. With a draft model
    every proposal is in group 0, which then means the position alone.

    Args:
        first: prior rates at the first position for matches of 0, 1, ... tokens; the last one stands
            for all longer ones too.
        later: prior rate at later positions, given that those before were accepted.
        weight: how many tested tokens the prior counts for.

    Raises:
        ValueError: a prior rate outside 0..1, or a weight that is not above 0.
    """

    def __init__(
        self,
        first: Sequence[float] = (0.6, 0.25, 0.5, 0.6, 0.85),
        later: float = 0.8,
        weight: float = 8.0,
    ) -> None:
        super().__init__(first, later, weight)

    def _groups(self, state: RoundState) -> Ints:
        return np.clip(state.match_length, 0, len(self.first) - 1)

    def __repr__(self) -> str:
        return f"MatchLengthSurvival({self.first}, {self.later:g}, {self.weight:g})"
