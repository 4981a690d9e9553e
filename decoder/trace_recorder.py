"""Makes traces: decode once, or take logged outputs, then run any drafter along the texts.

Prompt lookup goes along whole texts at once, see `record_lookup`. Any other drafter is teacher-forced:
at each position of a text it proposes K tokens, which are compared with how the text goes on; then one
token of the text is committed. Many texts advance at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdepth.scheduler.baselines.off import Off
from specdepth.scheduler.state import Bools, Floats, Ints

from .drafters import Drafter, PromptLookup
from .eagle_drafter import EagleDrafter
from .loops import is_looping as is_looping
from .request import GenerationResult, Request
from .runner import RoundPlan
from .speculative_decoder import SpeculativeDecoder
from .trace import Trace, TraceInfo
from .trace_text import TextToRecord as TextToRecord
from .trace_text import assemble_trace, check_texts, record_lookup

COUNTS = (
    *("accepted", "proposal_length", "match_length", "num_matches", "num_agreeing"),
    *("match_tokens", "match_distance"),
)
DRAFT_SIGNALS = ("draft_top1", "draft_entropy", "draft_margin")
NO_SLOTS: Ints = np.zeros(0, np.int64)


def decode_texts(
    decoder: SpeculativeDecoder,
    texts: Sequence[TextToRecord],
    progress: Callable[[int], None] | None = None,
) -> list[TextToRecord]:
    """Let the target answer the prompts, without speculation.

    Args:
        decoder: idle.
        texts: prompts and sampling; their tokens are replaced.
        progress: called with the number of texts that are done.

    Raises:
        ValueError: a prompt that the decoder refuses.
        RuntimeError: the decoder is busy.
    """
    engine = decoder.engine
    _check_idle(decoder)
    engine.set_scheduler(Off())
    signals: list[list[tuple[float, float]]] = [[] for _ in texts]
    places: dict[int, int] = {}
    done: dict[str, GenerationResult] = {}
    try:
        for place, text in enumerate(texts):
            added = engine.add_request(text.prompt_token_ids, text.sampling, str(place))
            places[added.number] = place
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            # Without speculation, a committed token a sequence.
            committed = np.flatnonzero(outcome.num_committed)
            for row, number in zip(committed, outcome.request_ids[committed], strict=True):
                shown = (float(outcome.target_top1[row]), float(outcome.target_entropy[row]))
                signals[places[int(number)]].append(shown)
            done |= {result.request_id: result for result in engine.take_finished()}
            if progress is not None:
                progress(len(done))
    except BaseException:
        engine.abort_all()
        engine.take_finished()
        raise
    answered = []
    for place, text in enumerate(texts):
        result, shown_here = done[str(place)], np.array(signals[place], np.float64)
        answered.append(
            replace(
                text,
                token_ids=result.token_ids,
                stopped=result.finish_reason == "stop",
                target_top1=shown_here[:, 0],
                target_entropy=shown_here[:, 1],
            )
        )
    return answered


def record_proposals(
    decoder: SpeculativeDecoder,
    texts: Sequence[TextToRecord],
    info: TraceInfo,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Run the decoder's drafter along `texts`.

    Args:
        decoder: idle; its drafter proposes, its target does nothing.
        texts: with tokens.
        info: goes into the trace; its K is recorded.
        progress: called with the number of texts that are done.

    Raises:
        ValueError: no texts, one without tokens or too long, or an info that does not fit the decoder.
        RuntimeError: the decoder is busy.
    """
    check_texts(texts)
    _check_idle(decoder)
    drafter, top = decoder.runner.draft_source, info.max_num_speculative_tokens
    if info.drafter != drafter.kind:
        raise ValueError(f"the trace is to be of {info.drafter}, the decoder has {drafter.kind}.")
    if top > decoder.config.max_num_speculative_tokens:
        raise ValueError(
            f"a trace of depth {top} needs max_num_speculative_tokens of at least as much, the "
            f"decoder has {decoder.config.max_num_speculative_tokens}."
        )
    if info.reads_target != isinstance(drafter, EagleDrafter):
        raise ValueError(
            f"the trace is to be of a draft model with reads_target={info.reads_target}, the decoder's "
            f"is a {type(drafter).__name__}."
        )
    if isinstance(drafter, PromptLookup):
        return record_lookup(texts, info, drafter.config, progress)
    return _Recording(decoder, drafter, texts, info).run(progress)


def _check_idle(decoder: SpeculativeDecoder) -> None:
    if decoder.engine.has_work:
        raise RuntimeError("The engine has requests of its own; step them to their end first.")


class _Recording:
    """One call of `record_proposals`. Legend: R slots in use, K deepest depth."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        drafter: Drafter,
        texts: Sequence[TextToRecord],
        info: TraceInfo,
    ) -> None:
        self.texts, self.info, self.drafter = texts, info, drafter
        self.top = info.max_num_speculative_tokens
        self.seqs, self.pool = decoder.engine.seqs, decoder.engine.pool
        self.target, self.max_pass = decoder.target, decoder.config.max_num_batched_tokens
        num_tokens = np.array([len(text.token_ids) for text in texts])
        self.starts: Ints = np.cumsum(num_tokens) - num_tokens
        size = int(num_tokens.sum())
        self.counts: dict[str, NDArray[Any]] = {name: np.zeros(size, np.int64) for name in COUNTS}
        # Other drafters find no places in the text; see `Offer.without_match`.
        self.counts["match_in_output"] = np.zeros(size, np.bool_)
        self.counts["agreement"] = np.zeros((size, self.top), np.uint8)
        self.signals: dict[str, Floats] | None = None
        if info.drafter == "draft-model":
            self.signals = {name: np.full((size, self.top), np.nan) for name in DRAFT_SIGNALS}
        # The text of the request in each slot, and what no token equals beyond its end.
        self.text = np.full((self.seqs.num_slots, self.seqs.max_model_len + self.top), -1, np.int64)
        self.place: Ints = np.zeros(self.seqs.num_slots, np.int64)

    @torch.inference_mode()
    def run(self, progress: Callable[[int], None] | None) -> Trace:
        """Advance all texts, a token a step."""
        waiting = list(range(len(self.texts)))[::-1]
        num_done = 0
        try:
            while waiting or self.seqs.active.any():
                while waiting and self._admit(waiting[-1]):
                    waiting.pop()
                slots = np.flatnonzero(self.seqs.active)
                self._propose(slots)
                ended = slots[self._advance(slots)]
                for slot in ended.tolist():
                    self.seqs.active[slot] = False
                self.pool.release(ended)
                num_done += len(ended)
                if len(ended) and progress is not None:
                    progress(num_done)
        finally:
            self.seqs.active[:] = False
            self.pool.reset()
        return assemble_trace(self.texts, self.info, self.counts, self.signals)

    def _admit(self, index: int) -> bool:
        """Put a text's prompt into a free slot, if there is one with blocks for the whole text."""
        text = self.texts[index]
        length = len(text.prompt_token_ids) + len(text.token_ids)
        end = min(length + self.top, self.seqs.max_model_len)
        blocks = self.pool.blocks_for(np.array([end]))
        if length > self.seqs.max_model_len or blocks[0] > self.pool.num_blocks:
            room = min(self.seqs.max_model_len, self.pool.num_blocks * self.pool.block_size)
            raise ValueError(f"{text.id} has {length} tokens, the decoder holds {room}.")
        if self.seqs.active.all() or blocks[0] > self.pool.num_free:
            return False
        slot = int(self.seqs.active.argmin())
        request = Request(
            request_id=text.id,
            number=index,
            prompt_token_ids=np.array(text.prompt_token_ids, np.int64),
            sampling=text.sampling,
            arrival_s=0.0,
        )
        self.seqs.start(slot, request)
        self.pool.grow(np.array([slot]), np.array([end]))
        self.drafter.start(slot, request)
        first = len(text.prompt_token_ids)
        self.text[slot] = -1
        self.text[slot, first:length] = text.token_ids
        self.place[slot] = self.starts[index] - first
        self.seqs.num_computed[slot] = first - 1
        if isinstance(self.drafter, EagleDrafter):
            self._read(self.drafter, slot, (*text.prompt_token_ids, *text.token_ids))
        return True

    def _read(self, drafter: EagleDrafter, slot: int, token_ids: tuple[int, ...]) -> None:
        """Let the target read a whole text, for a drafter that looks at its states."""
        ids = torch.tensor(token_ids, device=self.target.device)
        tables = self.pool.tables[[slot]]
        for start in range(0, len(ids), self.max_pass):
            chunk = ids[start : start + self.max_pass]
            layout = self.target.layout(tables, np.array([start]), np.array([len(chunk)]))
            positions = torch.arange(start, start + len(chunk), device=ids.device)
            self.target.forward(chunk, positions, layout, np.array([len(chunk) - 1]))
            assert self.target.states is not None
            drafter.read_target(layout.write_index, self.target.states)

    def _propose(self, slots: Ints) -> None:
        """Draft as deep as possible everywhere, and compare with the texts."""
        lengths, counts = self.seqs.num_tokens[slots], self.counts
        at = self.place[slots] + lengths
        offer = self.drafter.offer(slots, self.top)
        depths = np.minimum(offer.length, self.seqs.max_model_len - lengths)
        proposal = self.drafter.draft(
            RoundPlan(
                slots=slots,
                rows=np.arange(len(slots)),
                depths=depths,
                prefill_slots=NO_SLOTS,
                prefill_lengths=NO_SLOTS,
            )
        )
        tokens = proposal.token_ids.cpu().numpy()
        columns = np.arange(tokens.shape[1])
        same = tokens == self.text[slots[:, None], lengths[:, None] + columns]
        same &= columns < proposal.lengths[:, None]
        counts["accepted"][at] = np.logical_and.accumulate(same, axis=1).sum(1)
        counts["proposal_length"][at] = np.minimum(offer.length, self.top)
        counts["match_length"][at] = offer.match_length
        counts["num_matches"][at] = offer.num_matches
        counts["num_agreeing"][at] = np.rint(offer.match_agreement * offer.num_matches)
        if self.signals is not None:
            shown = (proposal.top1, proposal.entropy, proposal.margin)
            for name, signal in zip(DRAFT_SIGNALS, shown, strict=True):
                assert signal is not None
                self.signals[name][at, : signal.shape[1]] = signal

    def _advance(self, slots: Ints) -> Bools:
        """Commit a token of each text; returns which of them have ended."""
        seqs = self.seqs
        lengths = seqs.num_tokens[slots]
        seqs.tokens[slots, lengths] = self.text[slots, lengths]
        seqs.num_tokens[slots] = lengths + 1
        seqs.num_computed[slots] = lengths
        self.drafter.settle(slots)
        ended: Bools = self.text[slots, lengths + 1] < 0
        return ended
