"""Engine and sampling settings, in vLLM's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdepth.scheduler.depth import VerificationRule

Lookahead = Literal["reserve", "clip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    seed: int | None = None
    """Seed of this request's own random draws; None is the prompt's place in the call to `generate`, 0
    with `add_request`."""
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Strings that end the text; not part of `.text`."""
    ignore_eos: bool = False
    """Go on to `max_new_tokens` whatever is sampled."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a tuple of strings, got {self.stop!r}.")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the engine batches, stores and verifies."""

    max_num_seqs: int = 32
    """Sequences that run at once (slots)."""
    max_num_speculative_tokens: int = 8
    """K, the deepest depth; 0 switches drafting off."""
    max_num_batched_tokens: int = 512
    """Token budget of a pass for prefill chunks; drafted tokens come on top."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None takes the model's own limit."""
    block_size: int | None = None
    """Tokens in a KV block; None takes the attention backend's own (16, or 256 for varlen kernels)."""
    kv_cache_bytes: int = 2**30
    """Bytes for target and draft KV together; `num_kv_blocks` overrides it. A block holds the same
    tokens of both models, so a draft model takes its share whether it drafts or not."""
    num_kv_blocks: int | None = None
    """Blocks in the pool."""
    lookahead: Lookahead = "reserve"
    """When blocks run out: "reserve" preempts the youngest sequence, "clip" cuts depths first, the
    youngest's before the oldest's."""
    cuda_graphs: bool = True
    """Replay decoding passes from CUDA graphs, where varlen attention runs."""
    verification: VerificationRule = "rejection"
    """Rule for requests with temperature above 0; those at 0 are greedy under each rule."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_num_speculative_tokens < 0:
            raise ValueError(
                f"max_num_speculative_tokens must be 0 or more, got {self.max_num_speculative_tokens}."
            )
        for name in ("max_model_len", "num_kv_blocks", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name, choices in (
            ("lookahead", ("reserve", "clip")),
            ("verification", ("greedy", "rejection", "coupled")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
