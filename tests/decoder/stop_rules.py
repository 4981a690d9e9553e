"""Stop rules that go by everything they are shown, as nastily as they can, and rules that go by what
they must not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from specdepth.decoder.sampling import Stream, uniform
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.baselines.confidence_trim import TRIM_RULES
from specdepth.scheduler.baselines.lawful import EVERY_RULE
from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState


class Adversary:
    """Drafts all it may; subclasses stop. Lawful by its own word."""

    lawful_under: frozenset[str] = EVERY_RULE

    def choose(self, state: RoundState) -> Ints:
        return state.max_depths.copy()

    def observe(self, outcome: RoundOutcome) -> None:
        pass


class StopsWhenSure(Adversary):
    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        return signals.top1[:, -1] < 0.6


class StopsWhenUnsure(Adversary):
    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        return signals.top1[:, -1] > 0.6


class Alternates(Adversary):
    """Sure and unsure by turns, of rounds and of positions."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        turn = (state.round_index + signals.num_drafted) % 2 == 0
        return (signals.margin[:, -1] > 0.3) == turn


class GoesByEarlierTokens(Adversary):
    """Each law says which token was drawn before it; goes by this round's and the last one's."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        before = np.nan_to_num(state.draft_entropy[signals.rows, 0], nan=0.7)
        if signals.num_drafted:
            before = signals.entropy[:, -2]
        return signals.entropy[:, -1] < before


class GoesByOthers(Adversary):
    """Goes on where a sequence is surer than the rest of its batch, which were sure of what they drew."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        crowd = signals.top1.mean() if len(signals.rows) > 1 else 0.55
        return signals.top1[:, -1] >= crowd


class RemembersDiscarded(Adversary):
    """Goes by laws and times that give away tokens which were drawn and thrown away."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}
        self.was_slow = False

    def choose(self, state: RoundState) -> Ints:
        shown = [self.seen.get(number, 1.0) for number in state.request_ids.tolist()]
        lucky = (np.array(shown) > 0.55) ^ (state.last_accepted > 0) ^ self.was_slow
        return np.where(lucky, state.max_depths, 0)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        numbers = state.request_ids[signals.rows].tolist()
        before = np.array([self.seen.get(number, 0.55) for number in numbers])
        self.seen.update(zip(numbers, signals.top1[:, -1].tolist(), strict=True))
        return (signals.top1[:, -1] > before) | (signals.num_drafted == 0)

    def observe(self, outcome: RoundOutcome) -> None:
        self.was_slow = round(100 * outcome.elapsed_s) % 2 == 0


class AnswersDepths(Adversary):
    """Says none, one, or all that follow, by how sure the draft model is; never as in the pass before."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
        turn = state.round_index + signals.num_drafted + (signals.top1[:, -1] > 0.6)
        depths: Ints = np.choose(turn % 3, (signals.num_drafted + 1, 99, 0))
        return depths


def as_depths(answer: Bools | Ints) -> Ints:
    """An answer of `keep_drafting` in its other form: True as deep as may be, False as none."""
    depths: Ints = np.where(answer, 99, 0) if answer.dtype == np.bool_ else answer.astype(np.int64)
    return depths


LAWFUL: list[Callable[[], Any]] = [
    StopsWhenSure,
    StopsWhenUnsure,
    Alternates,
    GoesByEarlierTokens,
    GoesByOthers,
    RemembersDiscarded,
    AnswersDepths,
]


class CutsByTheNextLaw(Adversary):
    """Unlawful: verifies a token only where what follows it, hence the token itself, looks right.

    It lies: it declares every rule.
    """

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        liked = signals.top1[:, 1] > 0.65  # False for NaN
        return np.where(liked, signals.num_proposed, 0)


class BudgetOfThisRound(CutsByTheNextLaw):
    """Unlawful: a budget for the batch from all confidences of this round, later ones too."""

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        survival = np.cumprod(np.nan_to_num(signals.top1), axis=1)
        pays = survival.sum() > 1.1 * len(signals.rows)
        return np.where(pays, signals.num_proposed, 0)


class Honest(CutsByTheNextLaw):
    lawful_under = TRIM_RULES


class FailsUntilLiked(Adversary):
    """Unlawful: lets a round fail, so that it is drawn anew, until what was drawn looks right."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        if signals.num_drafted == 1 and (signals.top1[:, 1] < 0.65).any():
            raise ZeroDivisionError("by accident")
        return np.ones(len(signals.rows), np.bool_)


class AnswersBadlyUntilLiked(FailsUntilLiked):
    """The same with an answer that the engine refuses."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Any:
        try:
            return super().keep_drafting(state, signals)
        except ZeroDivisionError:
            return None


class FailsInTrim(Adversary):
    """The same after drafting."""

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        if (signals.top1[:, 1] < 0.65).any():
            raise ZeroDivisionError("by accident")
        return signals.num_proposed


class TrimsLate(Adversary):
    """Has no `trim` when it is set."""

    def choose(self, state: RoundState) -> Ints:
        self.trim = CutsByTheNextLaw().trim
        return super().choose(state)


class Peeks(Adversary):
    """Unlawful: computes the draw before it is made, and lets only the first tokens of the law through."""

    def __init__(self) -> None:
        self.decoder: SpeculativeDecoder | None = None

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        assert self.decoder is not None
        slots, sequences = state.slots[signals.rows], self.decoder.engine.seqs
        draws = uniform(
            torch.from_numpy(sequences.seed[slots]),
            torch.from_numpy(state.positions[signals.rows] + signals.num_drafted),
            torch.from_numpy(sequences.attempt[slots]),
            Stream.DRAFT,
        )
        return (draws < 0.3).numpy()
