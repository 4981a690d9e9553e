"""What a depth decision may see (`RoundState`) and what came of it (`RoundOutcome`).

Both are arrays over the running sequences, in one order, oldest sequence first. "Running" means
decoding: a sequence whose prompt is still being prefilled is not in them; its chunk only shows as
`num_prefill_tokens`. A sequence whose last chunk is in this pass decodes in it and is in them.
Unknown counts are -1, unknown reals NaN: another engine may not show all of this.

Legend: R running sequences, K `max_num_speculative_tokens`, S engine slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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

    def __init__(self, num_slots: int, max_num_speculative_tokens: int) -> None:
        shape = (num_slots, max_num_speculative_tokens)
        self.acceptance_ema: Floats = np.empty(num_slots)
        self.acceptance_ema_slow: Floats = np.empty(num_slots)
        self.num_drafted_rounds: Ints = np.empty(num_slots, np.int64)
        self.num_drafted_tokens: Ints = np.empty(num_slots, np.int64)
        self.num_accepted_tokens: Ints = np.empty(num_slots, np.int64)
        self.last_depth: Ints = np.empty(num_slots, np.int64)
        self.last_accepted: Ints = np.empty(num_slots, np.int64)
        self.last_match_length: Ints = np.empty(num_slots, np.int64)
        self.full_streak: Ints = np.empty(num_slots, np.int64)
        self.rounds_since_draft: Ints = np.empty(num_slots, np.int64)
        self.draft_top1: Floats = np.empty(shape)
        self.draft_entropy: Floats = np.empty(shape)
        self.draft_margin: Floats = np.empty(shape)
        self.target_top1: Floats = np.empty(num_slots)
        self.target_entropy: Floats = np.empty(num_slots)
        self.reset(np.arange(num_slots))

    def reset(self, slots: Ints) -> None:
        """Forget everything about `slots` (a new request took them)."""
        self.acceptance_ema[slots] = self.acceptance_ema_slow[slots] = self.prior_acceptance
        for count in (
            self.num_drafted_rounds,
            self.num_drafted_tokens,
            self.num_accepted_tokens,
            self.full_streak,
            self.rounds_since_draft,
        ):
            count[slots] = 0
        for last in (self.last_depth, self.last_accepted, self.last_match_length):
            last[slots] = -1
        for signal in (self.draft_top1, self.draft_entropy, self.draft_margin):
            signal[slots] = np.nan
        self.target_top1[slots] = np.nan
        self.target_entropy[slots] = np.nan

    def save(self, slot: int) -> dict[str, NDArray[Any]]:
        """Copy what is known about `slot`, for a sequence that is preempted."""
        return {name: array[slot].copy() for name, array in vars(self).items()}

    def restore(self, slot: int, saved: dict[str, NDArray[Any]]) -> None:
        """Put back what `save` returned, into any slot."""
        for name, value in saved.items():
            getattr(self, name)[slot] = value

    def update(self, slots: Ints, num_drafted: Ints, num_accepted: Ints) -> None:
        """Take in one round of `slots`: tokens drafted and accepted, both [R]."""
        self.last_depth[slots] = num_drafted
        self.rounds_since_draft[slots] += 1
        drew = num_drafted > 0
        if not drew.all():
            slots, num_drafted, num_accepted = slots[drew], num_drafted[drew], num_accepted[drew]
        if not len(slots):
            return
        rate = num_accepted / num_drafted
        for average, weight in (
            (self.acceptance_ema, self.ema_weight),
            (self.acceptance_ema_slow, self.slow_ema_weight),
        ):
            old = average[slots]
            average[slots] = old + weight * (rate - old)
        self.num_drafted_rounds[slots] += 1
        self.num_drafted_tokens[slots] += num_drafted
        self.num_accepted_tokens[slots] += num_accepted
        self.last_accepted[slots] = num_accepted
        self.full_streak[slots] = np.where(
            num_accepted == num_drafted, self.full_streak[slots] + 1, 0
        )
        self.rounds_since_draft[slots] = 0
