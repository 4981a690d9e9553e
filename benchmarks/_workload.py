"""Decoders and token lists that several benchmarks use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdepth.decoder.engine import Engine
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.state import Ints, RoundOutcome

MAX_NUM_SPECULATIVE_TOKENS = 8


def load_decoder(target: str, draft: Any = "prompt-lookup", **options: Any) -> SpeculativeDecoder:
    """A decoder on the CPU in bf16 whose engine reads the thread's CPU time."""
    from specdepth.decoder.clock import ThreadClock
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(
        target,
        draft,
        max_num_speculative_tokens=MAX_NUM_SPECULATIVE_TOKENS,
        dtype="bfloat16",
        device="cpu",
        clock=ThreadClock(),
        **options,
    )


def load_plain(target: str) -> PreTrainedModel:
    """The same model as transformers loads it, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdepth.decoder.default_model import default_model_path

    path = default_model_path() if target == "default" else Path(target)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.eval()
    return model


def mixed_prompts(decoder: SpeculativeDecoder, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out prompts, the 16 of the speed benchmarks first.

    A model folder without a tokenizer gets random tokens of such lengths.
    """
    from specdepth.decoder.prompts import benchmark_prompts, default_mix, render

    if decoder.tokenizer is None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(8, 48, count)
        return [rng.integers(0, decoder.target.vocab_size, n).tolist() for n in lengths]
    prompts = benchmark_prompts() if count == len(benchmark_prompts()) else default_mix(count)
    return [render(decoder.tokenizer, prompt) for prompt in prompts]


def windows(decoder: SpeculativeDecoder, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` pieces of exactly `length` tokens, cut from the mixed prompts laid end to end."""
    stream = [t for prompt in mixed_prompts(decoder, 32, seed) for t in prompt]
    while len(stream) < count * length:
        stream += stream
    return [stream[i * length : (i + 1) * length] for i in range(count)]


def start(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Queue `prompts` and step at depth 0 until all of them decode."""
    from specdepth.decoder.config import SamplingParams
    from specdepth.scheduler.baselines.fixed import FixedDepth

    engine.abort_all()
    engine.take_finished()
    engine.set_scheduler(FixedDepth(0))
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
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
