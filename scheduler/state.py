"""What a depth decision may see (`RoundState`) and what came of it (`RoundOutcome`).

Both are arrays over the running sequences, in one order, oldest sequence first. "Running" means
decoding: a sequence whose prompt is still being prefilled is not in them; its chunk only shows as
`num_prefill_tokens`. A sequence whose last chunk is in this pass decodes in it and is in them.
Unknown counts are -1, unknown reals NaN: another engine may not show all of this.

Legend: R running sequences, K `max_num_speculative_tokens`, S engine slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DrafterKind = Literal["none", "prompt-lookup", "draft-model", "recorded-text"]
"""What proposes tokens. Only "draft-model" costs draft passes and has a proposal law of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """Everything a `DepthScheduler` may look at before a round; never tokens, never the future.

    Arrays have shape [R] unless said otherwise and must not be written to. Rates and fractions are
    in 0..1, entropies in nats, times in seconds.
    """

    num_running: int
    """R."""
    slots: Ints
    """Engine slot of each sequence; stable while a sequence runs, reused afterwards."""
    request_ids: Ints
    """Number of each request, unique for the engine's life (arrival order)."""
    positions: Ints
    """Committed tokens, prompt included: the context length of the next token."""
    num_generated: Ints
    """Committed tokens that the engine produced."""
    num_remaining: Ints
    """Tokens until `max_new_tokens`, at least 1."""
    max_depths: Ints
    """Deepest depth that makes sense for each: tokens on offer, tokens remaining. Deeper choices are
    clipped to it, and reported. Under `lookahead="clip"` free blocks can cut the batch further."""

    acceptance_ema: Floats
    """Moving average of accepted / drafted over the sequence's rounds that drafted, weight 0.3."""
    acceptance_ema_slow: Floats
    """The same with weight 0.08."""
    num_drafted_tokens: Ints
    """Tokens of the sequence verified so far."""
    num_accepted_tokens: Ints
    """Of those, accepted."""
    num_drafted_rounds: Ints
    """Rounds behind `acceptance_ema`; 0 means that it still is the prior."""
    last_depth: Ints
    """Tokens drafted in the previous round; -1 before the first."""
    last_accepted: Ints
    """Tokens accepted in the last round that drafted; -1 before the first."""
    full_streak: Ints
    """Consecutive drafting rounds, up to the last one, in which every drafted token was accepted."""
    rounds_since_draft: Ints
    """Rounds since the sequence last drafted; counts from its first round before that."""

    proposal_length: Ints
    """Tokens on offer: found by prompt lookup, or K for a draft model, which has shown nothing yet."""
    match_length: Ints
    """Length of the n-gram that prompt lookup matched; 0 without a match or with a draft model."""
    num_matches: Ints
    """Earlier places where that n-gram occurs."""
    match_agreement: Floats
    """Share of those places that continue with the first proposed token; 0 without a match."""
    agreement: Floats
    """[R, K] share of all earlier places of the last token that go on like the first 1..K proposed tokens;
    a place counts with the square of its match with the end of the text, up to 16 tokens. It does not
    rise along a row and is defined beyond `proposal_length`; 0 without a match or without prompt lookup.
    In steps of 1/255."""
    match_tokens: Ints
    """Tokens up to the end that agree with those before the place that is continued, 16 at most: where
    `match_length` stops at the longest n-gram that is looked up. 0 as `agreement`."""
    match_distance: Ints
    """Tokens from that place to the end; 0 as `agreement`."""
    match_in_output: Bools
    """Whether the proposal starts among the generated tokens; False as `agreement`."""
    last_match_length: Ints
    """`match_length` of the sequence's previous round; -1 before the first."""
    draft_top1: Floats
    """[R, K] largest draft probability (temperature 1) at each position of the sequence's last drafting
    round, up to the first rejected one; NaN elsewhere."""
    draft_entropy: Floats
    """[R, K] draft entropy at those positions; NaN elsewhere."""
    draft_margin: Floats
    """[R, K] largest minus second largest draft probability; NaN elsewhere."""
    draft_lag: Ints
    """Committed tokens, less the last one, that the draft model's cache lacks; drafting pays for
    them first."""
    target_top1: Floats
    """Target's largest probability (temperature 1) where the last token was taken; NaN before the
    first."""
    target_entropy: Floats
    """Target's entropy there; NaN before the first."""

    round_index: int
    """Rounds that this engine has done before."""
    num_waiting: int
    """Requests that are not admitted yet, or preempted."""
    num_prefill_tokens: int
    """Tokens of this round's verification pass besides one for each running sequence and its drafts:
    prompts being prefilled, and texts recomputed after preemption."""
    num_context_tokens: int
    """Sum of context lengths of all sequences in the pass: what its attention reads."""
    kv_used_fraction: float
    """Share of the KV pool's blocks in use, before this round's drafts are reserved."""
    num_free_blocks: int
    num_blocks: int
    block_size: int
    """Tokens in a block."""
    max_num_seqs: int
    """S."""
    max_num_speculative_tokens: int
    """K."""
    drafter: DrafterKind
    cost: CostModel
    """Prices of passes on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What a round did, in the order of the `RoundState` that it answers. Arrays [R], seconds."""

    slots: Ints
    request_ids: Ints
    depths: Ints
    """Depths asked for by the scheduler."""
    num_drafted: Ints
    """Tokens verified: `depths` less what was clipped, stopped or trimmed; 0 where preempted."""
    num_proposed: Ints
    """Tokens that the drafter made, trimmed ones included."""
    num_accepted: Ints
    """Accepted drafted tokens that were committed, without the bonus or recovered token."""
    num_committed: Ints
    """Tokens added to the text: accepted + 1, less what lay past an end; 0 where preempted."""
    finished: Bools
    preempted: Bools
    """Sequences that gave up their blocks in this round, after `choose`."""
    draft_top1: Floats
    """[R, K] this round's, NaN after the first rejected token and without a draft model."""
    draft_entropy: Floats
    draft_margin: Floats
    target_top1: Floats
    target_entropy: Floats

    num_preempted_prefills: int
    """Sequences preempted in this round that were not decoding yet."""

    num_pass_tokens: int
    """Tokens in the verification pass: pending + drafted + prefill chunks."""
    num_prefill_tokens: int
    num_context_tokens: int
    """Sum of context lengths in the pass."""
    num_prefill_pairs: int
    """Prompt tokens of each sequence times the keys that they see, summed; see `CostModel.pass_s`."""
    draft_pass_sequences: tuple[int, ...]
    """Sequences in each draft pass; its length is the number of draft passes."""
    num_catch_up_tokens: int
    """Tokens that the draft model computed beyond one a sequence: prompts, and what it had sat out."""
    num_waiting: int
    kv_used_fraction: float
    """Before `finished` sequences gave back their blocks."""

    start_s: float
    """Engine clock when the round began; idle waits lie between rounds."""
    draft_s: float
    verify_s: float
    schedule_s: float
    other_s: float

    @property
    def elapsed_s(self) -> float:
        """Whole round, in seconds."""
        return self.draft_s + self.verify_s + self.schedule_s + self.other_s


class SavedHistory(NamedTuple):
    """What `SequenceHistory` knows about one sequence; see there."""

    counts: Ints
    averages: Floats
    draft_signals: Floats


class SequenceHistory:
    """Acceptance history of S slots as arrays: the part of `RoundState` that rounds leave behind.

    The engine and the integrations keep one each, so that a policy sees the same history everywhere.
    """

    ema_weight = 0.3
    """Weight of a new round in `acceptance_ema`."""
    slow_ema_weight = 0.08
    """Weight of a new round in `acceptance_ema_slow`."""
    prior_acceptance = 0.5
    """Both averages before the first drafting round."""
    _ema_weights = np.array([[ema_weight], [slow_ema_weight]])

    def __init__(self, num_slots: int, max_num_speculative_tokens: int) -> None:
        # Rows of three blocks, so that a round gathers all of them with three calls.
        self.counts: Ints = np.empty((8, num_slots), np.int64)
        """[8, S] the counts below, in their order."""
        self.averages: Floats = np.empty((4, num_slots))
        """[4, S] the averages and target signals below, in their order."""
        self.draft_signals: Floats = np.empty((3, num_slots, max_num_speculative_tokens))
        """[3, S, K] the draft signals below, in their order."""
        self._name_rows()
        self.reset(np.arange(num_slots))

    def _name_rows(self) -> None:
        (
            self.num_drafted_tokens,
            self.num_accepted_tokens,
            self.num_drafted_rounds,
            self.full_streak,
            self.rounds_since_draft,
            self.last_depth,
            self.last_accepted,
            self.last_match_length,
        ) = self.counts
        (
            self.acceptance_ema,
            self.acceptance_ema_slow,
            self.target_top1,
            self.target_entropy,
        ) = self.averages
        self.draft_top1, self.draft_entropy, self.draft_margin = self.draft_signals

    def __getstate__(self) -> dict[str, NDArray[Any]]:
        """The blocks; a copy's names must be views of its own."""
        return {name: vars(self)[name] for name in ("counts", "averages", "draft_signals")}

    def __setstate__(self, state: dict[str, NDArray[Any]]) -> None:
        self.__dict__.update(state)
        self._name_rows()

    def reset(self, slots: Ints) -> None:
        """Forget everything about `slots` (a new request took them)."""
        self.counts[:5, slots] = 0
        self.counts[5:, slots] = -1
        self.averages[:2, slots] = self.prior_acceptance
        self.averages[2:, slots] = np.nan
        self.draft_signals[:, slots] = np.nan

    def save(self, slot: int) -> SavedHistory:
        """Copy what is known about `slot`, for a sequence that is preempted."""
        return SavedHistory(
            self.counts[:, slot].copy(),
            self.averages[:, slot].copy(),
            self.draft_signals[:, slot].copy(),
        )

    def restore(self, slot: int, saved: SavedHistory) -> None:
        """Put back what `save` returned, into any slot."""
        self.counts[:, slot], self.averages[:, slot] = saved.counts, saved.averages
        self.draft_signals[:, slot] = saved.draft_signals

    def update(self, slots: Ints, num_drafted: Ints, num_accepted: Ints) -> None:
        """Take in one round of `slots`: tokens drafted and accepted, both [R]."""
        drew = num_drafted > 0
        if not np.count_nonzero(drew):
            self.rounds_since_draft[slots] += 1
            self.last_depth[slots] = 0
            return
        everything = num_accepted == num_drafted
        counts = self.counts.take(slots, axis=1)
        counts[0] += num_drafted
        counts[1] += num_accepted
        counts[2] += drew
        counts[3] = np.where(drew, (counts[3] + 1) * everything, counts[3])
        counts[4] = (counts[4] + 1) * ~drew
        counts[5] = num_drafted
        counts[6] = np.where(drew, num_accepted, counts[6])
        self.counts[:, slots] = counts
        old = self.averages[:2].take(slots, axis=1)
        rate = num_accepted / np.maximum(num_drafted, 1)
        self.averages[:2, slots] = old + self._ema_weights * drew * (rate - old)
