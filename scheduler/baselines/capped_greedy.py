"""Greedy goodput per sequence with draft time and a cap on depth: the strongest causal rule here.

Source: design notes of this project, section 7. Charging draft passes by the deepest sequence and
searching over a cap repairs the greedy rule with a draft model; pulling estimates towards the batch
mean looks past the present round.

Legend: R running sequences, K deepest depth, N tokens that may survive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator

from .admission import expected_tokens, rank_tokens
from .lawful import EVERY_RULE
from .pricing import verify_seconds

_PRUNING_STEPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrinkage:
    """How far to trust estimates and prices. The defaults change nothing.

    Raises:
        ValueError: a number out of range.
    """

    pull: float = 0.0
    """Weight of the batch mean in each sequence's survival, 0..1, position by position.

    The greedy rule serves easy requests first and is left with the hard ones. Treating sequences more
    alike than they are gives up a little now for a better mix later, and tempers noisy estimates.
    """
    exponent: float = 1.0
    """Survival is raised to it, before the pull: above 1 corrects estimates that are too high."""
    price: float = 1.0
    """Factor on the time that drafting adds to a round without drafts: above 1 drafts less."""
    stop_price: float = 1.0
    """Factor on what tokens and passes cost once drafting has begun; for `PricedStops` around the rule."""

    def __post_init__(self) -> None:
        prices = self.price >= 0 and self.stop_price >= 0
        if not (0 <= self.pull <= 1 and self.exponent > 0 and prices):
            raise ValueError(
                "shrinkage: expected a pull in 0..1, an exponent above 0 and prices of 0 or more, got "
                f"{self.pull}, {self.exponent}, {self.price} and {self.stop_price}."
            )


class CappedGreedyDepth:
    """For every cap on depth admit tokens by survival; take the best expected tokens a second.

    A candidate is a cap and a number of tokens, the likeliest ones no deeper than the cap. Its price
    is the target pass over all tokens and the draft passes over the sequences that are that deep. No
    depths at all are better where a draft pass costs the same for any number of sequences, or that
    plus a constant for each (an affine price); elsewhere it is a search over the plausible ones.
    With a free drafter it is `GreedyDepth`.

    Args:
        survival: estimates from history, and from what prompt lookup shows.
        shrinkage: one for all loads, or by number of running sequences; between two numbers it is
            interpolated over the logarithm, outside them it stays.

    Raises:
        ValueError: an empty mapping, or numbers of sequences below 1.
    """

    # Nothing in a RoundState depends on a token that a draft model has yet to draw.
    lawful_under = EVERY_RULE

    def __init__(
        self,
        survival: SurvivalEstimator,
        shrinkage: Shrinkage | Mapping[int, Shrinkage] | None = None,
    ) -> None:
        self.survival = survival
        if shrinkage is None:
            shrinkage = Shrinkage()
        self.shrinkage = {1: shrinkage} if isinstance(shrinkage, Shrinkage) else dict(shrinkage)
        """By number of running sequences."""
        if not self.shrinkage or min(self.shrinkage) < 1:
            raise ValueError(
                "shrinkage by load needs at least one number of sequences, all 1 or more, got "
                f"{sorted(self.shrinkage)}."
            )
        self._by_load: dict[int, Shrinkage] = {}

    def reset(self) -> None:
        """Let the estimator forget."""
        self.survival.reset()

    def shrinkage_at(self, num_running: int) -> Shrinkage:
        """Return what holds for `num_running` sequences."""
        if num_running not in self._by_load:
            loads = sorted(self.shrinkage)
            logs = [math.log(load) for load in loads]
            at = math.log(num_running)
            known = [asdict(self.shrinkage[load]) for load in loads]
            values = {name: np.interp(at, logs, [one[name] for one in known]) for name in known[0]}
            self._by_load[num_running] = Shrinkage(**{n: float(v) for n, v in values.items()})
        return self._by_load[num_running]

    def choose(self, state: RoundState) -> Ints:
        """Return the best candidate's depths, int64 [R]."""
        num_running = state.num_running
        if not num_running:
            return np.zeros(0, np.int64)
        shrinkage = self.shrinkage_at(num_running)
        survival = self.survival.survival(state)
        seconds = verify_seconds(state, int(state.max_depths.sum()))
        seconds = seconds[0] + shrinkage.price * (seconds - seconds[0])
        if state.drafter == "draft-model" and not state.cost.drafter_is_free:
            survival = shrink(survival, state.max_depths, shrinkage)
            return _best_capped(state, survival, seconds, shrinkage.price)
        offers = state.max_depths.nonzero()[0]  # with prompt lookup a third has none
        survival = shrink(survival[offers], state.max_depths[offers], shrinkage)
        ranked = rank_tokens(survival, above=_worth_by_rank(survival, seconds, num_running))
        tokens = expected_tokens(ranked, num_running)
        budget = int((tokens / seconds[: len(tokens)]).argmax())
        depths = np.zeros(num_running, np.int64)
        depths[offers] = ranked.depths(budget, len(offers))
        return depths

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the estimator learn."""
        self.survival.observe(outcome)

    def __repr__(self) -> str:
        values = {load: self.shrinkage[load] for load in sorted(self.shrinkage)}
        return f"CappedGreedyDepth({self.survival!r}, {values})"


def shrink(survival: Floats, max_depths: Ints, shrinkage: Shrinkage) -> Floats:
    """Return `survival` [R, K] raised to the exponent and pulled towards the mean of the batch.

    The mean at a position is over the sequences that may draft so deep. Rows stay non-increasing.
    """
    if shrinkage.exponent != 1:
        survival = survival**shrinkage.exponent
    if not shrinkage.pull:
        return survival
    possible = np.arange(survival.shape[1]) < max_depths[:, None]
    mean = np.add.reduce(survival) / np.maximum(np.add.reduce(possible), 1)
    pulled = (survival + shrinkage.pull * (mean - survival)) * possible
    # Fewer sequences are behind the mean at deeper positions, so it may rise from one to the next.
    return np.minimum.accumulate(pulled, axis=1)


def _worth_by_rank(survival: Floats, verify_s: Floats, num_running: int) -> float:
    """Return a survival that every token of the best candidate exceeds where drafting is free, or 0.

    Where all tokens after the first m survive less than their time is worth at the rate without drafts,
    however many of them are taken, no candidate with more than m is better than that of m. Beyond the
    tokens that stand out the price of *any* number of further ones is hardly less than that of one, also
    where the measured curve is flat for a step.

    Args:
        survival: [at most R, K], of those that have something on offer.
        verify_s: price of the round by drafted tokens, up to all that can be drafted.
        num_running: R.
    """
    rate = num_running / float(verify_s[0])
    worth, kept = math.inf, 0
    for _ in range(_PRUNING_STEPS):
        added_s = verify_s[kept + 1 :] - verify_s[kept]
        least_s = np.minimum.reduce(added_s / np.arange(1, len(added_s) + 1), initial=math.inf)
        # A hair less, so that the last bits of two scores decide as they would without it.
        least = (1 - 1e-9) * rate * float(least_s)
        if least >= worth:
            return worth
        worth = least
        if worth <= 0:
            break
        kept = int(np.count_nonzero(survival > worth))
    return 0.0


def _least_worth(verify_s: Floats, num_running: int, draft_s: float) -> float:
    """Return the survival that the last token of the best candidate exceeds, or 0.

    A last token whose survival is below what its time is worth at the rate without drafts, is too
    dear: the candidate without it commits more tokens a second, or no drafts at all do.

    Args:
        verify_s: as in `_best_capped`.
        num_running: R.
        draft_s: weighed draft time that a token adds at the least.
    """
    added_s = float(np.minimum.reduce(verify_s[1:] - verify_s[:-1], initial=math.inf)) + draft_s
    # A hair less, so that the last bits of two scores decide as they would without it.
    return max((1 - 1e-9) * added_s * num_running / float(verify_s[0]), 0.0)


def _best_capped(state: RoundState, survival: Floats, verify_s: Floats, price: float) -> Ints:
    """Search all caps with draft passes charged.

    Args:
        state: of a round with a draft model.
        survival: [R, K].
        verify_s: weighed price of the round by drafted tokens, up to all that can be drafted, without
            draft passes.
        price: weight of the draft time.
    """
    num_running = state.num_running
    pass_s = state.cost.draft_passes_s(num_running)
    by_sequence = pass_s[1:] - pass_s[:-1]
    least_draft_s = price * float(by_sequence.min())
    ranked = rank_tokens(survival, above=_least_worth(verify_s, num_running, least_draft_s))
    num_tokens = len(ranked.rows)
    if not num_tokens:
        return np.zeros(num_running, np.int64)
    rows, columns = ranked.rows, ranked.columns
    caps = np.arange(int(columns.max()) + 2)  # 0 is no drafts
    allowed = columns < caps[:, None]  # [caps, N]
    counts = np.add.accumulate(allowed, axis=1, dtype=np.int64)
    # Draft pass j holds the sequences with more than j tokens. The token that makes a sequence so
    # deep adds it to that pass, and which number it has there is the same under every cap.
    at = np.arange(num_tokens)
    in_pass = counts[columns + 1, at] - counts[columns, at]
    # Catching up serves the rest of the text, so a round pays one token's share of it.
    share_s = state.cost.draft_token_s * np.maximum(state.draft_lag, 0)
    share_s = share_s / np.maximum(state.num_remaining, 1)
    added_s = by_sequence[in_pass - 1] + np.where(columns == 0, share_s[rows], 0.0)
    tokens = num_running + np.add.accumulate(allowed * ranked.survival, axis=1)
    seconds = verify_s[counts] + price * np.add.accumulate(allowed * added_s, axis=1)
    cap, last = divmod(int((tokens / seconds).argmax()), num_tokens)
    admitted = rows[: last + 1][allowed[cap, : last + 1]]
    return np.bincount(admitted, minlength=num_running)
