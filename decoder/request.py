"""A request, its running result, and what a caller gets back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import SavedHistory

from .config import SamplingParams
from .tokenizers import Detokenizer

FinishReason = Literal["stop", "length", "abort"]
"""An end token or stop string; `max_new_tokens`; `Engine.abort`."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One prompt on its way through the engine."""

    request_id: str
    number: int
    """Arrival number, unique for the engine's life."""
    prompt_token_ids: NDArray[np.int64]
    sampling: SamplingParams
    arrival_s: float
    """When it arrived, on the engine's clock."""
    generated: list[int] = field(default_factory=list)
    """Committed tokens, as of the last time that the request left its slot."""
    first_token_s: float = math.nan
    attempt: int = 0
    """Decoding rounds begun; see `SequenceTable.attempt`."""
    num_rounds: int = 0
    """Decoding rounds behind `generated`."""
    num_preemptions: int = 0
    history: SavedHistory | None = None
    """Acceptance history of a preempted request, from `SequenceHistory.save`."""
    recording: int | None = None
    """Row of the trace that a `ReplayRunner` replays."""
    detokenizer: Detokenizer | None = None
    """Watches the text for `sampling.stop`."""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """How one request was served. Times in seconds on the engine's clock."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_rounds: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    arrival_s: float
    first_token_s: float
    """NaN if it was aborted before its first token."""
    finished_s: float

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a round, bonus included."""
        return self.num_generated_tokens / max(self.num_rounds, 1)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for a single token."""
        return (self.finished_s - self.first_token_s) / max(self.num_generated_tokens - 1, 1)

    @property
    def latency_s(self) -> float:
        """Arrival to last token."""
        return self.finished_s - self.arrival_s

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens over latency."""
        return self.num_generated_tokens / max(self.latency_s, 1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One finished request."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, the end token included."""
    text: str | None
    """Decoded text without end token and stop string; None without a tokenizer."""
    finish_reason: FinishReason
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Tokens that one round committed to one request, for streaming."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None
