"""What a draft model does step by step, without the model: shared by `DraftModel` and replay.

Legend: R sequences of a round, D those still drafting, K deepest depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, Floats, Ints

from .runner import RoundPlan
from .sequences import SequenceTable


class DraftPass(NamedTuple):
    """One forward pass of a draft model. Arrays over the sequences in it."""

    rows: Ints
    """Indices into the slots asked for."""
    starts: Ints
    """First entry of the cache that it computes."""
    lengths: Ints
    """Entries that it computes, each for one token."""
    is_last: bool
    """Whether it shows the law of everybody's next token; earlier passes only catch up."""


class DraftCache:
    """Which tokens a draft model's cache holds.

    It is kept lazily: a sequence that does not draft costs nothing, and when it drafts again its first
    step computes all that it missed (prompt included), in passes of at most `max_pass_tokens`.

    A model that reads the target's states has an entry for each token but the first, which it sees
    beside the target's state of the token before. The states of drafted tokens are its own guesses, so
    their entries are computed anew once the target has spoken.

    Args:
        sequences: shared arrays over slots; `draft_computed` is moved by `settle`.
        max_pass_tokens: bound on tokens in a catch-up pass.
        reads_target: whether it is such a model.
    """

    def __init__(
        self, sequences: SequenceTable, max_pass_tokens: int, *, reads_target: bool = False
    ) -> None:
        self._seqs, self._max_pass_tokens = sequences, max_pass_tokens
        self.reads_target = reads_target
        self._first_token = int(reads_target)
        self._fed: Ints = np.zeros(sequences.num_slots, np.int64)
        """Tokens of each slot whose draft KV this round computed, drafts included."""
        self._known: Ints = np.zeros(sequences.num_slots, np.int64)
        """Tokens of each slot whose entries need no guess."""

    def can_draft(self, slots: Ints) -> Bools:
        """Whether each of `slots` may draft now: all that it reads must have been computed."""
        if not self.reads_target:
            return np.ones(len(slots), np.bool_)
        lengths = self._seqs.num_tokens.take(slots)
        ready: Bools = (lengths - self._seqs.num_computed.take(slots) == 1) & (lengths > 1)
        return ready

    def begin(self, slots: Ints) -> None:
        """Start a round of `slots`."""
        self._fed[slots] = np.maximum(self._seqs.draft_computed[slots], self._first_token)
        self._known[slots] = self._seqs.num_tokens[slots]

    def passes(self, slots: Ints, positions: Ints) -> Iterator[DraftPass]:
        """Yield the passes that feed each of `slots` all tokens up to `positions` [D] that it lacks."""
        while True:
            fed = self._fed[slots]
            missing = positions - fed
            # Everybody's last token rides in the last pass; earlier ones only catch up.
            over = int(missing.sum()) > max(self._max_pass_tokens, len(slots))
            if over:
                behind = missing - 1
                before = np.cumsum(behind) - behind
                lengths = np.clip(self._max_pass_tokens - before, 0, behind)
                rows = np.flatnonzero(lengths)
            else:
                lengths, rows = missing, np.arange(len(slots))
            yield DraftPass(rows, fed[rows] - self._first_token, lengths[rows], not over)
            self._fed[slots] += lengths
            if not over:
                return

    def settle(self, slots: Ints) -> None:
        """Keep the KV of what stands; a rejected draft's is overwritten when its place comes again."""
        valid = self._known[slots] if self.reads_target else self._seqs.num_tokens[slots] - 1
        self._seqs.draft_computed[slots] = np.minimum(self._fed[slots], valid)


def ask_keep_drafting(plan: RoundPlan, alive: Ints, step: int, signals: Floats) -> Ints:
    """Ask the scheduler how deep `alive` [D] (rows of the plan) may go, given what pass `step` showed.

    Args:
        plan: with `keep_drafting`.
        alive: rows still drafting.
        step: tokens that each has drawn.
        signals: [3, R, at least step + 1] top-1, entropy and margin.

    Returns:
        [D] depths, at most the plan's; one of at most `step` is that of a sequence that stops here.

    Raises:
        ValueError: an answer of another type or shape, or a depth below 0.
    """
    assert plan.keep_drafting is not None
    shown = DraftSignals(plan.rows[alive], step, *signals[:, alive, : step + 1])
    answer: NDArray[Any] = np.asarray(plan.keep_drafting(shown))
    planned = plan.depths[alive]
    if answer.shape != alive.shape or answer.dtype.kind not in "biu":
        raise ValueError(
            f"The scheduler's keep_drafting returned {answer.dtype} of shape {answer.shape}, expected "
            f"bool or whole numbers of shape {alive.shape}: one for each sequence still drafting."
        )
    if answer.dtype == np.bool_:
        return np.where(answer, planned, step)
    if (answer < 0).any():
        raise ValueError(
            f"The scheduler's keep_drafting returned a depth of {answer.min()}, expected 0 or more."
        )
    limits: Ints = np.minimum(answer, planned).astype(np.int64, copy=False)
    return limits


def ask_trim(plan: RoundPlan, lengths: Ints, signals: Floats) -> Ints:
    """Ask the scheduler how much of each proposal to verify.

    Args:
        plan: with `trim`.
        lengths: [R] tokens proposed.
        signals: [3, R, K]; NaN where nothing is known.

    Returns:
        [R] depths, at most `lengths`.

    Raises:
        ValueError: an answer of another type or shape.
    """
    assert plan.trim is not None
    some = np.flatnonzero(lengths)
    if not len(some):
        return lengths
    shown = ProposalSignals(plan.rows[some], lengths[some], *signals[:, some])
    cut = np.asarray(plan.trim(shown))
    if cut.shape != some.shape or cut.dtype.kind not in "iu":
        raise ValueError(
            f"The scheduler's trim returned {cut.dtype} of shape {cut.shape}, expected whole numbers "
            f"of shape {some.shape}: one depth for each proposal."
        )
    trimmed = lengths.copy()
    trimmed[some] = np.clip(cut, 0, lengths[some])
    return trimmed
