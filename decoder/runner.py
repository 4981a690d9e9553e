"""What runs the models of a round: the `ModelRunner` protocol and the types that pass through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, DrafterKind, Floats, Ints

from .clock import PassWork
from .request import Request

ModelRole = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a drafter shows before depths are chosen. Arrays [R]; see `RoundState` for meanings."""

    length: Ints
    match_length: Ints
    num_matches: Ints
    match_agreement: Floats
    agreement: Floats
    """[R, K]"""
    match_tokens: Ints
    match_distance: Ints
    match_in_output: Bools

    @classmethod
    def without_match(cls, length: Ints, max_length: int) -> Offer:
        """Tokens of which nothing can be seen in the text: `length` of each, K = `max_length`."""
        none = np.zeros(len(length), np.int64)
        return cls(
            length=length,
            match_length=none,
            num_matches=none,
            match_agreement=np.zeros(len(length)),
            agreement=np.zeros((len(length), max_length)),
            match_tokens=none,
            match_distance=none,
            match_in_output=np.zeros(len(length), np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """A round as the engine has settled it. Legend: R decoding sequences, P prefill chunks."""

    slots: Ints
    """[R] decoding sequences; each computes its pending tokens and its drafts."""
    rows: Ints
    """[R] their indices in the `RoundState` (preempted ones are gone)."""
    depths: Ints
    """[R] tokens to draft."""
    prefill_slots: Ints
    """[P] sequences whose prompt is not finished by this pass."""
    prefill_lengths: Ints
    """[P] tokens of their chunks, from `num_computed` on."""
    keep_drafting: Callable[[DraftSignals], Bools | Ints] | None = None
    trim: Callable[[ProposalSignals], Ints] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What came out. Arrays in the order of `RoundPlan.slots`."""

    num_drafted: Ints
    """[R] tokens verified, at most the planned depth."""
    num_proposed: Ints
    """[R] tokens drafted, trimmed ones included."""
    num_accepted: Ints
    """[R]"""
    tokens: Ints | None
    """[R, K + 1]: the accepted tokens, then the bonus or recovered one; the rest is undefined. None where
    only counts are recorded."""
    draft_top1: Floats | None
    """[R, K] signals of this round's drafts, NaN where nothing was drafted; None without a model."""
    draft_entropy: Floats | None
    draft_margin: Floats | None
    target_top1: Floats
    """[R] target's largest probability where `tokens[num_accepted]` was taken."""
    target_entropy: Floats
    """[R] its entropy there, in nats."""
    work: PassWork
    draft_s: float = field(default=0.0)
    verify_s: float = field(default=0.0)


class ModelRunner(Protocol):
    """Drafts and verifies; knows tokens and models, nothing of queues, blocks and policies.

    It shares the engine's `SequenceTable` and block tables; the engine commits tokens and moves
    `num_computed`, the runner moves `draft_computed` in `settle`.
    """

    @property
    def drafter(self) -> DrafterKind:
        """What proposes tokens."""
        ...

    def start(self, slot: int, request: Request) -> None:
        """A request, new or resumed, took `slot`."""
        ...

    def stop(self, slots: Ints) -> None:
        """Sequences left `slots`: finished, preempted or aborted."""
        ...

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Look for proposals of up to `max_length` tokens; runs before depths are chosen."""
        ...

    def run(self, plan: RoundPlan) -> RoundResult:
        """Draft and verify one round. Leaves no trace if its result is dropped."""
        ...

    def settle(self, slots: Ints) -> None:
        """The tokens of the last `run` have been committed for `slots`."""
        ...
