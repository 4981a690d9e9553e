"""Replay: the same `Engine` on a recorded trace and a virtual clock.

Any policy gets exactly the rounds that the live engine would do; only time is modelled.
Legend: R decoding sequences of a round, K deepest depth of the engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import DrafterKind, Floats, Ints

from .clock import PassWork, VirtualClock
from .config import EngineConfig, SamplingParams
from .draft_steps import DraftCache, ask_keep_drafting, ask_trim
from .engine_profile import EngineProfile, LaggedEngine
from .kv_cache import BlockPool
from .packing import prefill_pairs
from .prompt_lookup import AGREEMENT_STEPS
from .request import Request
from .runner import Offer, RoundPlan, RoundResult
from .sequences import SequenceTable
from .trace import Trace
from .workload import WorkloadRequest

BLOCK_SIZE = 16
MAX_KV_TOKENS = 1 << 20
"""Size of the pool unless the config says: more than any shipped trace fills."""


class ReplayRunner:
    """A `ModelRunner` that looks outcomes up in a trace.

    Requests name their row by `Request.recording`.

    Args:
        trace: recorded with at least the engine's K.
        sequences: arrays over slots, shared with the engine.
        config: the engine's.
        pad_drafts: see `EngineProfile`.
    """

    def __init__(
        self,
        trace: Trace,
        sequences: SequenceTable,
        config: EngineConfig,
        *,
        pad_drafts: bool = False,
    ) -> None:
        self.trace, self._pad_drafts = trace, pad_drafts
        self._seqs, self._top = sequences, config.max_num_speculative_tokens
        self._cache = DraftCache(
            sequences, config.max_num_batched_tokens, reads_target=trace.info.reads_target
        )
        self._base: Ints = np.zeros(sequences.num_slots, np.int64)
        """Position in the trace of a slot with t tokens is base + t."""
        # A round that ends a text points one past it.
        end = np.zeros(1, np.int64)
        self._accepted = np.concatenate([trace.accepted, end])
        self._offers = np.stack(
            [
                *(trace.proposal_length, trace.match_length, trace.num_matches),
                *(trace.match_tokens, trace.match_distance, trace.match_in_output),
            ],
            axis=1,
        )
        self._match_agreement = trace.match_agreement
        self._agreement = trace.agreement[:, : self._top]
        shown = np.stack([trace.target_top1, trace.target_entropy], axis=1)
        self._target = np.concatenate([shown, np.full((1, 2), np.nan)])
        self._draft: Floats | None = None
        if trace.draft_top1 is not None:
            assert trace.draft_entropy is not None
            assert trace.draft_margin is not None
            self._draft = np.stack([trace.draft_top1, trace.draft_entropy, trace.draft_margin])

    @property
    def drafter(self) -> DrafterKind:
        """What proposed when the trace was recorded."""
        return self.trace.info.drafter

    def start(self, slot: int, request: Request) -> None:
        """Find the request's recording.

        Raises:
            ValueError: it names none, or asks for more tokens than were recorded.
        """
        row, trace, seqs = request.recording, self.trace, self._seqs
        if row is None or not 0 <= row < trace.num_requests:
            raise ValueError(
                f"replay needs the row of a recording, 0..{trace.num_requests - 1}, got {row}; make "
                "requests with ReplayDecoder.requests."
            )
        num_prompt, recorded = int(seqs.num_prompt[slot]), int(trace.num_tokens[row])
        wanted = int(seqs.max_tokens[slot]) - num_prompt
        if wanted > recorded and not trace.stopped[row]:
            raise ValueError(
                f"{trace.ids[row]} was recorded for {recorded} tokens, the request asks for {wanted}; "
                "lower max_new_tokens or record longer texts."
            )
        self._base[slot] = trace.starts[row] - num_prompt
        if trace.stopped[row]:
            seqs.end_at[slot] = num_prompt + recorded

    def stop(self, slots: Ints) -> None:
        """Nothing to do."""

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """What the drafter showed at these positions."""
        at = self._base.take(slots) + self._seqs.num_tokens.take(slots)
        offers = self._offers.take(at, axis=0)
        length = np.minimum(offers[:, 0], max_length)
        if self._cache.reads_target:
            length = np.where(self._cache.can_draft(slots), length, 0)
        return Offer(
            length=length,
            match_length=offers[:, 1],
            num_matches=offers[:, 2],
            match_agreement=self._match_agreement.take(at),
            agreement=self._agreement.take(at, axis=0) / AGREEMENT_STEPS,
            match_tokens=offers[:, 3],
            match_distance=offers[:, 4],
            match_in_output=offers[:, 5] > 0,
        )

    def run(self, plan: RoundPlan) -> RoundResult:
        """Look up what would be accepted, and count the work of the passes."""
        seqs, slots = self._seqs, plan.slots
        lengths = seqs.num_tokens.take(slots)
        at = self._base.take(slots) + lengths
        num_proposed, num_catch_up = plan.depths, 0
        signals: Floats | None = None
        passes: tuple[int, ...] = ()
        if self._draft is not None:
            num_proposed, signals, passes, num_catch_up = self._run_draft(plan, at)
        drafted = num_proposed
        if plan.trim is not None:
            unknown = np.full((3, len(slots), self._top), np.nan)
            drafted = ask_trim(plan, num_proposed, unknown if signals is None else signals)
        accepted = np.minimum(self._accepted.take(at), drafted)
        shown = self._target.take(at + accepted, axis=0)
        num_drafted = int(np.add.reduce(drafted))
        num_tokens = int(np.add.reduce(lengths)) + num_drafted
        computed = seqs.num_computed.take(slots)
        num_pass = num_tokens - int(np.add.reduce(computed))
        num_decode = len(slots) + num_drafted
        chunk, num_chunks, num_pairs = 0, len(plan.prefill_slots), 0
        if num_pass > num_decode:
            num_pairs = prefill_pairs(computed, lengths - computed - 1)
        if num_chunks:
            chunk = int(plan.prefill_lengths.sum())
            before = seqs.num_computed[plan.prefill_slots]
            num_tokens += int(before.sum()) + chunk
            num_pairs += prefill_pairs(before, plan.prefill_lengths)
        work = PassWork(
            num_pass_tokens=num_pass + chunk,
            num_prefill_tokens=num_pass + chunk - num_decode,
            num_seqs=len(slots) + num_chunks,
            num_logit_rows=num_decode or 1,
            num_context_tokens=num_tokens,
            num_prefill_pairs=num_pairs,
            draft_pass_sequences=passes,
            num_catch_up_tokens=num_catch_up,
        )
        return RoundResult(
            num_drafted=drafted,
            num_proposed=num_proposed,
            num_accepted=accepted,
            tokens=None,
            draft_top1=None if signals is None else signals[0],
            draft_entropy=None if signals is None else signals[1],
            draft_margin=None if signals is None else signals[2],
            target_top1=shown[:, 0],
            target_entropy=shown[:, 1],
            work=work,
        )

    def settle(self, slots: Ints) -> None:
        """Move the draft model's cache along."""
        if self._draft is not None:
            self._cache.settle(slots)

    def _run_draft(self, plan: RoundPlan, at: Ints) -> tuple[Ints, Floats, tuple[int, ...], int]:
        """Draft in shrinking batches, as `DraftModel.draft` does.

        Returns:
            Tokens drafted [R], signals [3, R, K], sequences of each pass, tokens caught up on.
        """
        assert self._draft is not None
        slots, lengths = plan.slots, np.zeros(len(plan.slots), np.int64)
        signals = np.full((3, len(slots), self._top), np.nan)
        passes: list[int] = []
        num_catch_up = 0
        depths = plan.depths.copy()
        alive = np.flatnonzero(depths > 0)
        self._cache.begin(slots)
        for step in range(int(depths.max(initial=0))):
            alive = alive[depths[alive] > step]
            if not len(alive):
                break
            positions = self._seqs.num_tokens[slots[alive]] + step
            for one in self._cache.passes(slots[alive], positions):
                passes.append(len(alive))
                num_catch_up += int(one.lengths.sum())
            num_catch_up -= len(alive)
            signals[:, alive, step] = self._draft[:, at[alive], step]
            if plan.keep_drafting is not None:
                depths[alive] = ask_keep_drafting(plan, alive, step, signals)
                stays = depths[alive] > step
                signals[:, alive[~stays], step] = np.nan
                alive = alive[stays]
            lengths[alive] = step + 1
        if self._pad_drafts:
            passes = [len(slots)] * len(passes)
        return lengths, signals, tuple(passes), num_catch_up


class ReplayDecoder:
    """An engine over a trace, ready to serve: what `SpeculativeDecoder` is over models.

    Args:
        trace: what to replay.
        cost: prices of the machine, here those of sampling where the trace was sampled; they move the
            clock and are shown to schedulers.
        config: of the engine; K must not pass the trace's. Sizes that are None are filled in.
        profile: of an engine that is not ours.

    Attributes:
        engine: on a `VirtualClock`; see `Engine`.
        trace: the trace.
        model_pair: names of target and drafter.

    Raises:
        ValueError: a K deeper than recorded, or a rule that the trace does not fit.
    """

    tokenizer = None

    def __init__(
        self,
        trace: Trace,
        cost: CostModel,
        config: EngineConfig | None = None,
        profile: EngineProfile | None = None,
    ) -> None:
        profile = profile or EngineProfile()
        recorded = trace.info.max_num_speculative_tokens
        config = config or EngineConfig(max_num_speculative_tokens=recorded)
        if config.max_num_speculative_tokens > recorded:
            raise ValueError(
                f"max_num_speculative_tokens={config.max_num_speculative_tokens}, but the trace was "
                f"recorded up to {recorded}; lower it or record deeper."
            )
        # A recorded text stands for every rule under which it does not depend on depths.
        config = replace(config, verification=trace.info.verification)
        longest = int((trace.num_prompt + trace.max_new_tokens).max())
        block_size = config.block_size or BLOCK_SIZE
        config = replace(
            config,
            max_model_len=config.max_model_len or longest,
            block_size=block_size,
            num_kv_blocks=config.num_kv_blocks or -(-MAX_KV_TOKENS // block_size),
        )
        assert config.max_model_len is not None
        assert config.num_kv_blocks is not None
        self.trace, self.model_pair = trace, trace.info.model_pair
        sequences = SequenceTable(config.max_num_seqs, config.max_model_len)
        pool = BlockPool(
            config.num_kv_blocks, block_size, config.max_num_seqs, config.max_model_len
        )
        self.runner = ReplayRunner(trace, sequences, config, pad_drafts=profile.pad_drafts)
        cost = prices_for(trace, cost)
        self.engine = LaggedEngine(config, self.runner, sequences, pool, VirtualClock(cost), cost)
        self.engine.lag = profile.decision_lag

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with what was filled in."""
        return self.engine.config

    def requests(
        self, rows: Ints | None = None, max_new_tokens: int | None = None
    ) -> tuple[WorkloadRequest, ...]:
        """Requests that replay these rows of the trace, all by default, in this order.

        Args:
            rows: indices, as from `Trace.rows`.
            max_new_tokens: cut texts to as many.
        """
        trace = self.trace
        chosen = range(trace.num_requests) if rows is None else rows.tolist()
        return tuple(_request(trace, row, max_new_tokens) for row in chosen)


def prices_for(trace: Trace, cost: CostModel) -> CostModel:
    """`cost` for requests that sample, or do not, as those of `trace` did."""
    return cost.sampled(trace.info.verification) if trace.info.temperature > 0 else cost


def _request(trace: Trace, row: int, max_new_tokens: int | None) -> WorkloadRequest:
    info, limit = trace.info, int(trace.max_new_tokens[row])
    return WorkloadRequest(
        prompt_token_ids=(0,) * int(trace.num_prompt[row]),
        sampling=SamplingParams(
            temperature=info.temperature,
            top_k=info.top_k,
            top_p=info.top_p,
            seed=0,
            max_new_tokens=limit if max_new_tokens is None else min(limit, max_new_tokens),
        ),
        kind=trace.kinds[row],
        recording=row,
    )
