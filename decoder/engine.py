"""The round loop: continuous batching over a paged KV pool, one depth a sequence and round.

One `Engine` serves every runner: models on a wall clock, or recorded traces on a virtual one. It counts;
tokens are the runner's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import (
    DepthScheduler,
    DraftSignals,
    ProposalSignals,
    check_depths,
    check_lawful,
)
from specdepth.scheduler.state import Bools, Floats, Ints, RoundOutcome, RoundState

from .batch import Batch
from .clock import Clock
from .config import EngineConfig, SamplingParams
from .delivery import Delivery
from .kv_cache import BlockPool
from .metrics import EngineMetrics
from .request import GenerationResult, Request, TokenDelta
from .runner import ModelRunner, Offer, RoundPlan, RoundResult
from .sequences import SequenceTable
from .text_end import TextEnd
from .tokenizers import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMPTY: Ints = np.zeros(0, np.int64)


@dataclass(slots=True)
class _OpenRound:
    """A round between `begin_round` and `finish_round`."""

    slots: Ints
    """[R] decoding sequences."""
    chunk_slots: Ints
    """[P] sequences that only prefill."""
    chunk_lengths: Ints
    num_prefill_tokens: int
    num_context_tokens: int
    offer: Offer
    start_s: float
    shown_s: float = 0.0
    """When the state was shown to the scheduler."""
    run_s: float = 0.0
    """When the depths were settled."""
    state: RoundState | None = None
    num_preempted_prefills: int = 0
    asked_slots: Ints = field(default_factory=lambda: EMPTY)
    """Sequences whose drafts `keep_drafting` or `trim` was asked about."""


class Engine:
    """Runs requests to their end, a round at a time.

    `step` is a whole round. An environment that decides depths itself calls `begin_round` and
    `finish_round` instead; there is no other difference.

    Args:
        config: batching, pool and verification settings, `block_size`, `num_kv_blocks` and
            `max_model_len` filled in.
        runner: drafts and verifies.
        sequences: arrays over slots, shared with `runner`.
        pool: KV blocks, shared with `runner`.
        clock: where time comes from.
        cost: prices shown to the scheduler.
        end_token_ids: tokens that end a text.
        tokenizer: turns tokens into text; None leaves `.text` None and refuses stop strings.
        vocab_size: prompts may hold tokens below it; None checks nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        sequences: SequenceTable,
        pool: BlockPool,
        clock: Clock,
        cost: CostModel,
        end_token_ids: Iterable[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.seqs = sequences
        self.pool = pool
        self.clock = clock
        self.cost = cost
        self._sampled_cost = cost, cost.sampled(config.verification)
        self.metrics = EngineMetrics(config.max_num_speculative_tokens)
        self.batch = Batch(config, runner, sequences, pool)
        self.round_index = 0
        self._text_end = TextEnd(end_token_ids)
        self._delivery = Delivery(tokenizer, self._text_end)
        self._vocab_size = vocab_size
        self._scheduler: DepthScheduler | None = None
        self._keep_drafting: Callable[[RoundState, DraftSignals], Bools | Ints] | None = None
        self._trim: Callable[[RoundState, ProposalSignals], Ints] | None = None
        self._open: _OpenRound | None = None
        self._observe_s = 0.0
        self._ids: set[str] = set()
        """Of all requests, waiting and running."""
        self._aborts: set[str] = set()
        self._next_number = 0

    # ---------------------------------------------------------------- requests

    def set_scheduler(self, scheduler: DepthScheduler) -> None:
        """Let `scheduler` choose depths from the next round on, with the hooks that it has now.

        Raises:
            ValueError: it would bend the law of a request in the engine, or is no scheduler.
        """
        if not isinstance(scheduler, DepthScheduler):
            raise ValueError(
                f"{scheduler!r} is no depth scheduler, which has the methods choose and observe; "
                "make_scheduler makes one from a name."
            )
        for request in self.batch.requests():
            self._check_lawful(scheduler, request.sampling)
        self._scheduler = scheduler
        self._keep_drafting = getattr(scheduler, "keep_drafting", None)
        self._trim = getattr(scheduler, "trim", None)

    @property
    def scheduler(self) -> DepthScheduler | None:
        """What chooses depths in `step`."""
        return self._scheduler

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        arrival_s: float | None = None,
        recording: int | None = None,
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt_token_ids: at least one token.
            sampling: how to go on.
            request_id: to know it by; its number by default.
            arrival_s: when it came, on the engine's clock; now by default.
            recording: row of the trace that a `ReplayRunner` replays.

        Raises:
            ValueError: empty or too long prompt, tokens outside the vocabulary, a pool too small for
                it, stop strings without a tokenizer, a rule that the sampling does not fit, or an id in
                use.
        """
        tokens = np.fromiter(prompt_token_ids, np.int64)
        self._check_request(tokens, sampling)
        if self._scheduler is not None:
            self._check_lawful(self._scheduler, sampling)
        name = str(self._next_number) if request_id is None else request_id
        if name in self._ids:
            raise ValueError(
                f"A request with the id {name!r} is still in the engine; choose another id."
            )
        request = Request(
            request_id=name,
            number=self._next_number,
            prompt_token_ids=tokens,
            sampling=sampling,
            arrival_s=self.clock.now() if arrival_s is None else arrival_s,
            recording=recording,
        )
        if sampling.stop:
            assert self._delivery.tokenizer is not None
            request.detokenizer = Detokenizer(self._delivery.tokenizer, sampling.stop)
        self._next_number += 1
        self._ids.add(name)
        self.batch.waiting.append(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a request at the end of the current round; False if it is not here. What it has
        generated comes out with `finish_reason="abort"`.
        """
        if request_id not in self._ids:
            return False
        self._aborts.add(request_id)
        if self._open is None:
            self._carry_out_aborts()
        return True

    def abort_all(self) -> None:
        """Drop every request and any round under way. Right after an interrupt at any point, too."""
        self._open = None
        for request in self.batch.take_all():
            self._abort(request)
        self._aborts.clear()
        self._ids.clear()  # an interrupt may have lost a request

    @property
    def num_running(self) -> int:
        """Sequences in slots, prefilling ones included."""
        return len(self.batch.order)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self.batch.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.num_running or self.num_waiting)

    @property
    def collect_deltas(self) -> bool:
        """Whether rounds keep `TokenDelta`s for `take_deltas`."""
        return self._delivery.collect_deltas

    @collect_deltas.setter
    def collect_deltas(self, collect: bool) -> None:
        self._delivery.collect_deltas = collect

    def take_finished(self) -> list[GenerationResult]:
        """Results since the last call."""
        return self._delivery.take_finished()

    def take_deltas(self) -> list[TokenDelta]:
        """Tokens committed since the last call, if `collect_deltas`."""
        return self._delivery.take_deltas()

    # ------------------------------------------------------------------ rounds

    def step(self) -> RoundOutcome | None:
        """Run one round with the scheduler; None if there is nothing to do.

        A round that fails can be run again. Where its law could suffer, its requests are aborted
        instead; see `finish_round`.
        """
        state = self.begin_round()
        if state is None:
            return None
        try:
            outcome = self.finish_round(self._choose(state))
        except BaseException:
            self.cancel_round()
            raise
        if self._scheduler is not None and state.num_running:
            before = self.clock.now()
            self._scheduler.observe(outcome)
            self._observe_s = self.clock.now() - before
        return outcome

    def begin_round(self) -> RoundState | None:
        """Admit requests, plan prefill chunks, ask the drafter for offers, and show the state.

        Returns:
            The state, with `num_running` 0 when the round only prefills; None if there is no work.
        """
        if self._open is not None:
            raise RuntimeError(
                "begin_round was called twice; finish_round or cancel_round comes first."
            )
        start_s = self.clock.now()
        self.batch.admit()
        order, seqs = self.batch.order, self.seqs
        if not len(order):
            return None
        lengths = seqs.num_tokens.take(order)
        extra = lengths - seqs.num_computed.take(order) - 1
        slots, chunk_slots, chunk_lengths = order, EMPTY, EMPTY
        num_prefill, num_context = 0, int(np.add.reduce(lengths))
        if np.count_nonzero(extra):
            # Every sequence may decode; what is left of the budget goes to prompts, oldest first.
            budget = max(self.config.max_num_batched_tokens - len(order), 1)
            granted = np.clip(budget - (np.cumsum(extra) - extra), 0, extra)
            decodes = granted == extra
            chunked = ~decodes & (granted > 0)
            slots, chunk_slots, chunk_lengths = order[decodes], order[chunked], granted[chunked]
            num_prefill = int(granted.sum())
            computed = seqs.num_computed[order] + granted
            num_context = int(computed[decodes | chunked].sum()) + len(slots)
        opened = _OpenRound(
            slots=slots,
            chunk_slots=chunk_slots,
            chunk_lengths=chunk_lengths,
            num_prefill_tokens=num_prefill,
            num_context_tokens=num_context,
            offer=self.runner.offer(slots, self.config.max_num_speculative_tokens),
            start_s=start_s,
        )
        opened.state = self._state(opened)
        opened.shown_s = self.clock.now()
        self._open = opened
        return opened.state

    def finish_round(self, depths: Ints) -> RoundOutcome:
        """Draft and verify with `depths` [R], commit the tokens, and say what came of it.

        A round that fails after `keep_drafting` or `trim` saw what a draft model made of its draws is
        never drawn again under rejection sampling: the requests in it that sample are aborted.

        Raises:
            ValueError: depths of a wrong shape or out of range; the round can be finished again.
        """
        opened = self._open
        if opened is None or opened.state is None:
            raise RuntimeError("finish_round needs a begin_round before it.")
        asked = check_depths(depths, opened.state, self._scheduler or self)
        opened.run_s = self.clock.now()
        try:
            plan = self._plan(opened, asked)
            outcome = self._commit(opened, asked, plan, self.runner.run(plan))
        except BaseException as error:
            self._abort_asked(opened.asked_slots, error)
            self.cancel_round()
            raise
        self._open = None
        self.round_index += 1
        self.metrics.on_round(outcome, opened.state)
        self._carry_out_aborts()
        return outcome

    def cancel_round(self) -> None:
        """Drop a round that was begun and not finished: no token is committed, blocks roll back."""
        self._open = None
        order = self.batch.order
        self.pool.shrink(order, self.seqs.num_tokens[order])
        self._carry_out_aborts()

    # ------------------------------------------------------------ parts of a round

    def _choose(self, state: RoundState) -> Ints:
        if self._scheduler is None:
            raise RuntimeError("No depth scheduler; call set_scheduler first.")
        return self._scheduler.choose(state) if state.num_running else EMPTY

    def _state(self, opened: _OpenRound) -> RoundState:
        seqs, history, slots, config = self.seqs, self.batch.history, opened.slots, self.config
        positions = seqs.num_tokens.take(slots)
        remaining = seqs.max_tokens.take(slots) - positions
        length = opened.offer.length
        # `take` is three times as fast as indexing here
        counts = history.counts.take(slots, axis=1)
        averages = history.averages.take(slots, axis=1)
        draft_signals = history.draft_signals.take(slots, axis=1)
        return RoundState(
            num_running=len(slots),
            slots=slots,
            request_ids=seqs.number.take(slots),
            positions=positions,
            num_generated=positions - seqs.num_prompt.take(slots),
            num_remaining=remaining,
            max_depths=np.minimum(length, remaining - 1),
            num_drafted_tokens=counts[0],
            num_accepted_tokens=counts[1],
            num_drafted_rounds=counts[2],
            full_streak=counts[3],
            rounds_since_draft=counts[4],
            last_depth=counts[5],
            last_accepted=counts[6],
            last_match_length=counts[7],
            acceptance_ema=averages[0],
            acceptance_ema_slow=averages[1],
            target_top1=averages[2],
            target_entropy=averages[3],
            proposal_length=length,
            match_length=opened.offer.match_length,
            num_matches=opened.offer.num_matches,
            match_agreement=opened.offer.match_agreement,
            agreement=opened.offer.agreement,
            match_tokens=opened.offer.match_tokens,
            match_distance=opened.offer.match_distance,
            match_in_output=opened.offer.match_in_output,
            draft_top1=draft_signals[0],
            draft_entropy=draft_signals[1],
            draft_margin=draft_signals[2],
            draft_lag=positions - 1 - seqs.draft_computed.take(slots),
            round_index=self.round_index,
            num_waiting=len(self.batch.waiting),
            num_prefill_tokens=opened.num_prefill_tokens,
            num_context_tokens=opened.num_context_tokens,
            kv_used_fraction=self.pool.used_fraction,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_speculative_tokens=config.max_num_speculative_tokens,
            drafter=self.runner.drafter,
            cost=self._prices(slots),
        )

    def _prices(self, slots: Ints) -> CostModel:
        """`cost`, or that of sampling where most sequences of the round sample."""
        if 2 * np.count_nonzero(self.seqs.temperature.take(slots)) <= len(slots):
            return self.cost
        if self._sampled_cost[0] is not self.cost:
            self._sampled_cost = self.cost, self.cost.sampled(self.config.verification)
        return self._sampled_cost[1]

    def _plan(self, opened: _OpenRound, asked: Ints) -> RoundPlan:
        """Settle depths, find blocks for them, and fix who takes part."""
        state = opened.state
        assert state is not None
        rows, depths, victims = self.batch.reserve(
            opened.slots, np.minimum(asked, state.max_depths)
        )
        if victims:
            stays = ~np.isin(opened.chunk_slots, victims)
            opened.chunk_slots = opened.chunk_slots[stays]
            opened.chunk_lengths = opened.chunk_lengths[stays]
            opened.num_preempted_prefills = len(victims) - (len(asked) - len(rows))
        slots = opened.slots.take(rows)
        # Before the run: a round that fails after its draws must not draw the same again.
        self.seqs.attempt[slots] += 1
        drafting = slots[depths > 0]

        def ask_about_drafts(hook: Callable[[RoundState, Any], Any], signals: Any) -> Any:
            opened.asked_slots = drafting
            return hook(state, signals)

        keep_drafting, trim = self._keep_drafting, self._trim
        return RoundPlan(
            slots=slots,
            rows=rows,
            depths=depths,
            prefill_slots=opened.chunk_slots,
            prefill_lengths=opened.chunk_lengths,
            keep_drafting=keep_drafting and partial(ask_about_drafts, keep_drafting),
            trim=trim and partial(ask_about_drafts, trim),
        )

    def _commit(
        self, opened: _OpenRound, asked: Ints, plan: RoundPlan, result: RoundResult
    ) -> RoundOutcome:
        """Add the tokens that stand, remember what was seen, and let go of those that ended."""
        seqs, slots, clock = self.seqs, plan.slots, self.clock
        draft_s, verify_s = clock.pass_times(result.work, result.draft_s, result.verify_s)
        now = clock.now()
        lengths = seqs.num_tokens.take(slots)
        count, reasons = self._text_end.cut(self.batch, slots, result)
        ends = lengths + count
        if result.tokens is not None:
            rows = np.repeat(np.arange(len(slots)), count)
            columns = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
            seqs.tokens[slots[rows], lengths[rows] + columns] = result.tokens[rows, columns]
        seqs.num_tokens[slots] = ends
        seqs.num_computed[slots] = ends - 1
        if len(plan.prefill_slots):
            seqs.num_computed[plan.prefill_slots] += plan.prefill_lengths
        first = np.isnan(seqs.first_token_s.take(slots))
        if np.count_nonzero(first):
            seqs.first_token_s[slots[first]] = now
        seqs.num_rounds[slots] += 1
        self.runner.settle(slots)
        accepted = np.minimum(result.num_accepted, count)
        signals = self._note_history(opened, plan, result, accepted)
        used = self.pool.used_fraction
        self.pool.shrink(slots, ends)
        if self.collect_deltas:
            for row, slot in enumerate(slots.tolist()):
                new = seqs.tokens[slot, lengths[row] : ends[row]].tolist()
                self._delivery.note(self.batch[slot].request_id, new, reasons.get(row))
        finished = np.zeros(len(slots), np.bool_)
        if reasons:
            finished[list(reasons)] = True
        left = [(self.batch.leave(int(slots[row])), reason) for row, reason in reasons.items()]
        for request, reason in left:
            self._ids.discard(request.request_id)
            self._delivery.finish(request, reason, now, self.metrics)
        observe_s, self._observe_s = self._observe_s, 0.0
        schedule_s = opened.run_s - opened.shown_s + observe_s
        total_s = clock.now() - opened.start_s + observe_s
        size, work = len(asked), result.work
        return RoundOutcome(
            slots=opened.slots,
            request_ids=opened.state.request_ids,  # type: ignore[union-attr]
            depths=asked,
            num_drafted=_scatter(result.num_drafted, plan.rows, size, 0),
            num_proposed=_scatter(result.num_proposed, plan.rows, size, 0),
            num_accepted=_scatter(accepted, plan.rows, size, 0),
            num_committed=_scatter(count, plan.rows, size, 0),
            finished=_scatter(finished, plan.rows, size, False),
            preempted=_scatter(np.zeros(len(slots), np.bool_), plan.rows, size, True),
            draft_top1=_scatter(signals[0], plan.rows, size, np.nan),
            draft_entropy=_scatter(signals[1], plan.rows, size, np.nan),
            draft_margin=_scatter(signals[2], plan.rows, size, np.nan),
            target_top1=_scatter(result.target_top1, plan.rows, size, np.nan),
            target_entropy=_scatter(result.target_entropy, plan.rows, size, np.nan),
            num_preempted_prefills=opened.num_preempted_prefills,
            num_pass_tokens=work.num_pass_tokens,
            num_prefill_tokens=work.num_prefill_tokens,
            num_context_tokens=work.num_context_tokens,
            num_prefill_pairs=work.num_prefill_pairs,
            draft_pass_sequences=work.draft_pass_sequences,
            num_catch_up_tokens=work.num_catch_up_tokens,
            num_waiting=len(self.batch.waiting),
            kv_used_fraction=used,
            start_s=opened.start_s,
            draft_s=draft_s,
            verify_s=verify_s,
            schedule_s=schedule_s,
            other_s=max(total_s - draft_s - verify_s - schedule_s, 0.0),
        )

    def _note_history(
        self, opened: _OpenRound, plan: RoundPlan, result: RoundResult, accepted: Ints
    ) -> tuple[Floats, Floats, Floats]:
        """Remember acceptance and signals; returns the draft signals up to the first rejection."""
        history, slots, top = self.batch.history, plan.slots, self.config.max_num_speculative_tokens
        history.update(slots, result.num_drafted, accepted)
        history.last_match_length[slots] = opened.offer.match_length.take(plan.rows)
        history.target_top1[slots] = result.target_top1
        history.target_entropy[slots] = result.target_entropy
        if result.draft_top1 is None or result.draft_entropy is None or result.draft_margin is None:
            none = np.full((len(slots), top), np.nan)
            return none, none, none
        # Past the first rejection the draft went on from a token that is not in the text.
        hidden = np.arange(top) > accepted[:, None]
        shown = [
            np.where(hidden, np.nan, signal)
            for signal in (result.draft_top1, result.draft_entropy, result.draft_margin)
        ]
        drew = result.num_drafted > 0
        for kept, signal in zip(
            (history.draft_top1, history.draft_entropy, history.draft_margin), shown, strict=True
        ):
            kept[slots[drew]] = signal[drew]
        return shown[0], shown[1], shown[2]

    def _abort_asked(self, slots: Ints, error: BaseException) -> None:
        """Have the requests aborted whose draws a failed round may not repeat, and say so on the error.

        A hook knows from later laws what was drawn. If a failure, of the hook or of a pass that it made
        longer, led to fresh draws, it could fail until it likes them.
        """
        if self.config.verification != "rejection" or self.runner.drafter != "draft-model":
            return  # the same draws again
        ids = self.batch.request_ids(slots[self.seqs.temperature[slots] > 0])
        self._aborts |= ids
        if ids:
            error.add_note(
                f"{len(ids)} sampled requests were aborted: the round failed after the scheduler had seen "
                "signals of their drafts, and fresh draws would bend the output's law."
            )

    def _carry_out_aborts(self) -> None:
        for name in self._aborts:
            slot = self.batch.slot_of(name)
            if slot is not None:
                request = self.batch.leave(slot)
            else:
                found = [r for r in self.batch.waiting if r.request_id == name]
                if not found:
                    continue  # it ended by itself in this round
                request = found[0]
                self.batch.waiting.remove(request)
            self._abort(request)
        self._aborts.clear()

    def _abort(self, request: Request) -> None:
        self._ids.discard(request.request_id)
        if self.collect_deltas:
            self._delivery.note(request.request_id, [], "abort")
        self._delivery.finish(request, "abort", self.clock.now(), self.metrics)

    # ---------------------------------------------------------------- checks

    def _check_request(self, tokens: Ints, sampling: SamplingParams) -> None:
        total = len(tokens) + sampling.max_new_tokens
        limit = self.seqs.max_model_len
        if not len(tokens):
            raise ValueError("The prompt is empty; at least one token is needed.")
        if self._vocab_size is not None:
            wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if len(wrong):
                raise ValueError(
                    f"The prompt holds the token id {wrong[0]}, the vocabulary has "
                    f"0..{self._vocab_size - 1}."
                )
        if total > limit:
            raise ValueError(
                f"The prompt has {len(tokens)} tokens and asks for {sampling.max_new_tokens} more; the "
                f"model holds {limit} (max_model_len). Shorten the prompt or lower max_new_tokens."
            )
        needed = -(-total // self.pool.block_size)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"The prompt of {len(tokens)} tokens with {sampling.max_new_tokens} new ones needs "
                f"{needed} KV blocks of {self.pool.block_size} tokens, the pool has "
                f"{self.pool.num_blocks}; raise kv_cache_bytes or num_kv_blocks."
            )
        if sampling.stop and self._delivery.tokenizer is None:
            raise ValueError("Stop strings need a tokenizer, and this model folder has none.")
        if sampling.temperature > 0 and self.config.verification == "greedy":
            raise ValueError(
                f'verification="greedy" samples nothing, but the request has temperature '
                f'{sampling.temperature}; use temperature 0, or verification="rejection" or "coupled".'
            )

    def _check_lawful(self, scheduler: DepthScheduler, sampling: SamplingParams) -> None:
        rule = self.config.verification if sampling.temperature > 0 else "greedy"
        check_lawful(scheduler, rule, self.runner.drafter == "draft-model")


def _scatter(values: NDArray[Any], rows: Ints, size: int, fill: Any) -> NDArray[Any]:
    """Put `values` of the planned rows back among all rows of the state."""
    if len(rows) == size:
        return values
    full = np.full((size, *values.shape[1:]), fill, values.dtype)
    full[rows] = values
    return full
