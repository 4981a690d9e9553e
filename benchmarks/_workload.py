"""Decoders and token lists that several benchmarks use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdepth.decoder.engine import Engine
    from specdepth.decoder.prompts import Prompt
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.state import Ints, RoundOutcome

MAX_NUM_SPECULATIVE_TOKENS = 8


def load_decoder(
    target: str,
    draft: Any = "prompt-lookup",
    max_num_speculative_tokens: int = MAX_NUM_SPECULATIVE_TOKENS,
    dtype: str = "bfloat16",
    **options: Any,
) -> SpeculativeDecoder:
    """A decoder on the CPU whose engine reads the thread's CPU time."""
    from specdepth.decoder.clock import ThreadClock
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(
        target,
        draft,
        max_num_speculative_tokens=max_num_speculative_tokens,
        dtype=dtype,
        device="cpu",
        clock=ThreadClock(),
        **options,
    )


def load_plain(target: str, dtype: str = "bfloat16") -> PreTrainedModel:
    """The same model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    from specdepth.decoder.default_model import default_model_path

    path = default_model_path() if target == "default" else Path(target)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model


def mixed_prompts(decoder: SpeculativeDecoder, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out prompts of all kinds; 16 are those of the speed benchmarks.

    A model folder without a tokenizer gets random tokens.
    """
    from specdepth.decoder.prompts import benchmark_prompts, default_mix

    chosen = benchmark_prompts()
    return rendered(decoder, chosen if count == len(chosen) else default_mix(count), seed)


def train_prompts(decoder: SpeculativeDecoder, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that nothing is reported on, to choose settings with."""
    from specdepth.decoder.prompts import default_mix

    return rendered(decoder, default_mix(count, seed, split="train"), seed)


def rendered(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], seed: int = 0
) -> list[list[int]]:
    """Token ids of `prompts`; random ones for a model folder without a tokenizer."""
    from specdepth.decoder.prompts import render

    if decoder.tokenizer is not None:
        return [render(decoder.tokenizer, prompt) for prompt in prompts]
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 48, len(prompts))
    return [rng.integers(0, decoder.target.vocab_size, n).tolist() for n in lengths]


def windows(decoder: SpeculativeDecoder, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` pieces of exactly `length` tokens, cut from the mixed prompts laid end to end."""
    stream = [t for prompt in mixed_prompts(decoder, 32, seed) for t in prompt]
    while len(stream) < count * length:
        stream += stream
    return [stream[i * length : (i + 1) * length] for i in range(count)]


def start(engine: Engine, prompts: list[list[int]], num_tokens: int) -> None:
    """Queue `prompts`, step at depth 0 until all of them decode, and leave each room for
    `num_tokens` tokens more.
    """
    from specdepth.decoder.config import SamplingParams
    from specdepth.scheduler.baselines.fixed import FixedDepth

    engine.abort_all()
    engine.take_finished()
    engine.set_scheduler(FixedDepth(0))
    # Those that are prefilled first generate while the others still wait for the token budget.
    prefills = sum(map(len, prompts)) // engine.config.max_num_batched_tokens + len(prompts) + 2
    sampling = SamplingParams(max_new_tokens=num_tokens + prefills, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, sampling)
    while True:
        outcome = engine.step()
        assert outcome is not None
        if len(outcome.slots) == len(prompts) and not outcome.num_prefill_tokens:
            return


def round_at(engine: Engine, depths: Ints) -> RoundOutcome:
    """Run one round with these depths."""
    state = engine.begin_round()
    assert state is not None
    return engine.finish_round(depths)
