"""Makes traces: decode once, or take logged outputs, then run any drafter along the texts.

Teacher-forced: at each position of a text the drafter proposes K tokens, which are compared with how the
text goes on; then one token of the text is committed. Many texts advance at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdepth.scheduler.baselines.off import Off
from specdepth.scheduler.state import Floats, Ints

from .config import SamplingParams
from .prompts import Split
from .request import Request
from .runner import RoundPlan
from .speculative_decoder import SpeculativeDecoder
from .trace import Trace, TraceInfo

NO_SLOTS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToRecord:
    """A prompt and, from a log or a decoder, what followed it."""

    id: str
    kind: str
    split: Split
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    token_ids: Sequence[int] = ()
    """Generated tokens, the end token included."""
    stopped: bool = False
    """Whether they ended by themselves."""
    target_top1: Floats = field(default_factory=lambda: np.zeros(0))
    """[tokens]; empty if not known."""
    target_entropy: Floats = field(default_factory=lambda: np.zeros(0))


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
    """
    engine = decoder.engine
    engine.abort_all()
    engine.take_finished()
    engine.set_scheduler(Off())
    seen: dict[int, list[tuple[float, float]]] = {}
    done: dict[str, Any] = {}
    try:
        for place, text in enumerate(texts):
            added = engine.add_request(text.prompt_token_ids, text.sampling, f"record-{place}")
            seen[place] = []
            if place == 0:
                first = added.number
        while engine.has_work:
            outcome = engine.step()
            assert outcome is not None
            committed = np.flatnonzero(outcome.num_committed)
            for row, number in zip(committed, outcome.request_ids[committed] - first, strict=True):
                shown = (float(outcome.target_top1[row]), float(outcome.target_entropy[row]))
                seen[int(number)].append(shown)
            for result in engine.take_finished():
                done[result.request_id] = result
                if progress is not None:
                    progress(len(done))
    except BaseException:
        engine.abort_all()
        engine.take_finished()
        raise
    answered = []
    for place, text in enumerate(texts):
        result = done[f"record-{place}"]
        signals = np.array(seen[place], np.float64).reshape(-1, 2)
        answered.append(
            TextToRecord(
                id=text.id,
                kind=text.kind,
                split=text.split,
                prompt_token_ids=text.prompt_token_ids,
                sampling=text.sampling,
                token_ids=result.token_ids,
                stopped=result.finish_reason == "stop",
                target_top1=signals[:, 0],
                target_entropy=signals[:, 1],
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
        ValueError: no texts, one without tokens or too long, or a K deeper than the decoder's.
        RuntimeError: the decoder is busy.
    """
    return _Recording(decoder, texts, info).run(progress or (lambda done: None))


class _Recording:
    """One call of `record_proposals`. Legend: R slots in use, K deepest depth."""

    def __init__(
        self, decoder: SpeculativeDecoder, texts: Sequence[TextToRecord], info: TraceInfo
    ) -> None:
        if decoder.engine.has_work:
            raise RuntimeError("The engine has requests of its own; step them to their end first.")
        self.top = info.max_num_speculative_tokens
        if self.top > decoder.config.max_num_speculative_tokens:
            raise ValueError(
                f"a trace of depth {self.top} needs max_num_speculative_tokens of at least as much, "
                f"the decoder has {decoder.config.max_num_speculative_tokens}."
            )
        self.texts, self.info = texts, info
        self.drafter = decoder.runner.draft_source
        self.seqs, self.pool = decoder.engine.seqs, decoder.engine.pool
        lengths = [len(text.token_ids) for text in texts]
        if not lengths or not min(lengths):
            raise ValueError("a trace needs texts with at least one token each.")
        self.num_tokens: Ints = np.array(lengths, np.int64)
        self.starts: Ints = np.cumsum(self.num_tokens) - self.num_tokens
        size = int(self.num_tokens.sum())
        self.counts = {
            name: np.zeros(size, np.int64)
            for name in (
                "accepted",
                "proposal_length",
                "match_length",
                "num_matches",
                "num_agreeing",
            )
        }
        has_model = info.drafter == "draft-model"
        self.signals = np.full((3, size, self.top), np.nan) if has_model else None
        # The text of the request in each slot, and what no token equals beyond its end.
        self.text = np.full((self.seqs.num_slots, self.seqs.max_model_len + self.top), -1, np.int64)
        self.place: Ints = np.zeros(self.seqs.num_slots, np.int64)

    @torch.inference_mode()
    def run(self, progress: Callable[[int], None]) -> Trace:
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
                if len(ended):
                    progress(num_done)
        finally:
            self.seqs.active[:] = False
            self.pool.reset()
        return self._trace()

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
        return True

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
            for kept, signal in zip(
                self.signals, (proposal.top1, proposal.entropy, proposal.margin), strict=True
            ):
                if signal is not None:
                    kept[at, : signal.shape[1]] = signal

    def _advance(self, slots: Ints) -> np.ndarray:
        """Commit a token of each text; returns which of them have ended."""
        seqs = self.seqs
        lengths = seqs.num_tokens[slots]
        seqs.tokens[slots, lengths] = self.text[slots, lengths]
        seqs.num_tokens[slots] = lengths + 1
        seqs.num_computed[slots] = lengths
        self.drafter.settle(slots)
        ended: np.ndarray = self.text[slots, lengths + 1] < 0
        return ended

    def _trace(self) -> Trace:
        texts, size = self.texts, int(self.num_tokens.sum())
        known = [text.target_top1 if len(text.target_top1) else None for text in texts]
        top1, entropy = np.full(size, np.nan), np.full(size, np.nan)
        for start, text, one in zip(self.starts, texts, known, strict=True):
            if one is not None:
                top1[start : start + len(one)] = one
                entropy[start : start + len(one)] = text.target_entropy
        signals = self.signals if self.signals is not None else (None, None, None)
        return Trace(
            info=self.info,
            ids=tuple(text.id for text in texts),
            kinds=tuple(text.kind for text in texts),
            held_out=np.array([text.split == "held-out" for text in texts]),
            num_prompt=np.array([len(text.prompt_token_ids) for text in texts], np.int64),
            num_tokens=self.num_tokens,
            max_new_tokens=np.array([text.sampling.max_new_tokens for text in texts], np.int64),
            stopped=np.array([text.stopped for text in texts]),
            looping=np.array([is_looping(text.token_ids) for text in texts]),
            target_top1=top1,
            target_entropy=entropy,
            draft_top1=signals[0],
            draft_entropy=signals[1],
            draft_margin=signals[2],
            **self.counts,
        )


LOOP_TOKENS = 32
"""Tokens at the end of a text that must repeat for it to count as looping."""
LOOP_PERIOD = 24
"""Longest repeated passage."""


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether a text ends in verbatim repetition: its last 32 tokens repeat with a period up to 24."""
    tokens = np.asarray(token_ids)
    if len(tokens) < LOOP_TOKENS:
        return False
    for period in range(1, min(LOOP_PERIOD, len(tokens) - LOOP_TOKENS) + 1):
        if np.array_equal(tokens[-LOOP_TOKENS:], tokens[-LOOP_TOKENS - period : -period]):
            return True
    return False
