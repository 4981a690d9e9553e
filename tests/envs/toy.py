"""A decoder small enough to train on: tiny model, recorded-text drafter, virtual clock."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.recorded_text import LookupLaw, RecordedText
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import VOCAB, tiny_llama

MAX_NEW_TOKENS = 40
NUM_PROMPTS = 8


@functools.cache
def toy_model() -> Any:
    return tiny_llama(0, dtype=torch.float32, num_hidden_layers=1)


@functools.cache
def toy_prompts() -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(0)
    return tuple(tuple(rng.integers(0, VOCAB, 6).tolist()) for _ in range(NUM_PROMPTS))


@functools.cache
def toy_texts() -> tuple[tuple[int, ...], ...]:
    plain = SpeculativeDecoder.from_pretrained(
        toy_model(), "none", dtype=torch.float64, device="cpu", max_num_speculative_tokens=0
    )
    results = plain.generate(toy_prompts(), max_new_tokens=MAX_NEW_TOKENS)
    return tuple(tuple(result.token_ids) for result in results)


def toy_decoder(
    *,
    token_s: float = 0.003,
    accept: float = 0.9,
    max_num_seqs: int = 4,
    max_num_speculative_tokens: int = 4,
    cost: CostModel | None = None,
    draft: Any = None,
    **options: Any,
) -> SpeculativeDecoder:
    """A pass takes 50 ms and `token_s` for each token but the first; proposals are always there and
    each token of them is right with probability `accept`.
    """
    torch.set_num_threads(1)
    cost = cost or CostModel.linear(base_s=0.05, token_s=token_s)
    if draft is None:
        pairs = list(zip(toy_prompts(), toy_texts(), strict=True))
        draft = RecordedText.factory(pairs, law=LookupLaw.constant(accept))
    return SpeculativeDecoder.from_pretrained(
        toy_model(),
        draft,
        max_num_speculative_tokens=max_num_speculative_tokens,
        max_num_seqs=max_num_seqs,
        dtype=torch.float64,
        device="cpu",
        clock=VirtualClock(cost),
        cost=cost,
        **options,
    )
