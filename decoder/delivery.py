"""What goes back to callers: finished results, and tokens as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .metrics import EngineMetrics
from .request import FinishReason, GenerationResult, Request, RequestMetrics, TokenDelta
from .text_end import TextEnd
from .tokenizers import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Delivery:
    """Collects results until somebody takes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, text_end: TextEnd) -> None:
        self.collect_deltas = False
        """Whether `note` keeps anything."""
        self.tokenizer = tokenizer
        self._text_end = text_end
        self._finished: list[GenerationResult] = []
        self._deltas: list[TokenDelta] = []

    def take_finished(self) -> list[GenerationResult]:
        """Results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_deltas(self) -> list[TokenDelta]:
        """Deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def note(self, request_id: str, token_ids: list[int], reason: FinishReason | None) -> None:
        """Keep newly committed tokens for a stream."""
        self._deltas.append(
            TokenDelta(request_id=request_id, token_ids=token_ids, finish_reason=reason)
        )

    def finish(
        self, request: Request, reason: FinishReason, now: float, metrics: EngineMetrics
    ) -> None:
        """Hand out a request that has left its slot, or never had one."""
        # A request without history never ran.
        drafted, accepted = (0, 0) if request.history is None else request.history.counts[:2]
        served = RequestMetrics(
            num_prompt_tokens=len(request.prompt_token_ids),
            num_generated_tokens=len(request.generated),
            num_rounds=request.num_rounds,
            num_drafted_tokens=int(drafted),
            num_accepted_tokens=int(accepted),
            num_preemptions=request.num_preemptions,
            arrival_s=request.arrival_s,
            first_token_s=request.first_token_s,
            finished_s=now,
        )
        metrics.on_finished(served)
        self._finished.append(
            GenerationResult(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids.tolist(),
                token_ids=request.generated,
                text=self._text(request),
                finish_reason=reason,
                metrics=served,
            )
        )

    def _text(self, request: Request) -> str | None:
        if self.tokenizer is None:
            return None
        if request.detokenizer is not None and request.detokenizer.stopped:
            return request.detokenizer.text
        tokens = request.generated
        if tokens and not request.sampling.ignore_eos and tokens[-1] in self._text_end.token_ids:
            tokens = tokens[:-1]
        return decode(self.tokenizer, tokens)
