"""Texts on their way into a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Floats

from .config import SamplingParams
from .loops import is_looping
from .prompt_lookup import LookupConfig
from .prompts import Split
from .text_lookup import lookup_runs
from .trace import Trace, TraceInfo

BATCH_TOKENS = 1 << 20
"""Tokens looked up at once; bounds the memory."""


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


def record_lookup(
    texts: Sequence[TextToRecord],
    info: TraceInfo,
    lookup: LookupConfig | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Run prompt lookup along `texts`; needs no model.

    Args:
        texts: with tokens.
        info: goes into the trace; its K is recorded.
        lookup: which matches count.
        progress: called with the number of texts that are done.

    Raises:
        ValueError: no texts, or one without prompt or tokens.
    """
    check_texts(texts)
    sizes = [len(text.prompt_token_ids) + len(text.token_ids) for text in texts]
    batch = np.cumsum(sizes) // BATCH_TOKENS
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(texts)]
    parts = []
    for start, end in pairwise(edges):
        parts.append(
            lookup_runs(
                [text.prompt_token_ids for text in texts[start:end]],
                [text.token_ids for text in texts[start:end]],
                info.max_num_speculative_tokens,
                lookup or LookupConfig(),
            )
        )
        if progress is not None:
            progress(end)
    counts = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return assemble_trace(texts, info, counts)


def check_texts(texts: Sequence[TextToRecord]) -> None:
    """Refuse what a trace cannot hold.

    Raises:
        ValueError: no texts, or one without prompt or tokens; the sentence names it.
    """
    if not texts:
        raise ValueError("a trace needs at least one text.")
    for text in texts:
        if not len(text.prompt_token_ids) or not len(text.token_ids):
            missing = "tokens" if len(text.prompt_token_ids) else "prompt"
            raise ValueError(f"{text.id} has no {missing}, and a trace needs both.")


def assemble_trace(
    texts: Sequence[TextToRecord],
    info: TraceInfo,
    counts: Mapping[str, NDArray[Any]],
    draft_signals: Mapping[str, Floats] | None = None,
) -> Trace:
    """Put together what is known of the texts and what a drafter got from them.

    Args:
        texts: N, in the trace's order.
        info: how it was made.
        counts: [M] arrays by field of `Trace`, and what prompt lookup shows, with it.
        draft_signals: [M, K] arrays by field of `Trace`; None without a draft model.
    """

    def signal(name: str) -> Floats:
        known = [getattr(text, name) for text in texts]
        return np.concatenate(
            [
                values if len(values) else np.full(len(text.token_ids), np.nan)
                for text, values in zip(texts, known, strict=True)
            ]
        )

    recorded: dict[str, Any] = {**counts, **(draft_signals or {})}
    return Trace(
        info=info,
        ids=tuple(text.id for text in texts),
        kinds=tuple(text.kind for text in texts),
        held_out=np.array([text.split == "held-out" for text in texts]),
        num_prompt=np.array([len(text.prompt_token_ids) for text in texts], np.int64),
        num_tokens=np.array([len(text.token_ids) for text in texts], np.int64),
        max_new_tokens=np.array([text.sampling.max_new_tokens for text in texts], np.int64),
        stopped=np.array([text.stopped for text in texts]),
        looping=np.array([is_looping(text.token_ids) for text in texts]),
        target_top1=signal("target_top1"),
        target_entropy=signal("target_entropy"),
        **recorded,
    )
