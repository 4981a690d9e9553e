"""A model folder of a few kilobytes with a byte-level tokenizer, and prompts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import WorkloadRequest
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import tiny_llama

COST = CostModel.linear(base_s=0.05, token_s=0.002, knee=8, overhead_s=0.001, name="tiny")

SPREAD = 0.1
"""Of the weights: small enough for texts to repeat themselves, so that prompt lookup finds something."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_tiny_target(folder: Path, *, with_tokenizer: bool = True) -> Path:
    """Write model and tokenizer; returns the folder."""
    model = tiny_llama(
        vocab_size=257,
        max_position_embeddings=1024,
        initializer_range=SPREAD,
        dtype=torch.float32,
    )
    model.save_pretrained(folder)
    if with_tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def write_prompts(path: Path, count: int = 60) -> Path:
    """Prompts that repeat themselves, so that prompt lookup finds something; half are held out."""
    lines = [f"{i} abc abc {i % 7} abcd abc {i}" for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_decoder(**options: Any) -> SpeculativeDecoder:
    """A float64 decoder on a virtual clock, so that times are exact."""
    defaults: dict[str, Any] = {
        "clock": VirtualClock(COST),
        "cost": COST,
        "max_num_seqs": 8,
        "num_kv_blocks": 400,
    }
    return SpeculativeDecoder.from_pretrained(
        tiny_llama(initializer_range=SPREAD),
        dtype="float64",
        device="cpu",
        **(defaults | options),
    )


def tiny_requests(count: int, max_new_tokens: int = 24) -> list[WorkloadRequest]:
    """Token prompts of various lengths."""
    return [
        WorkloadRequest(
            prompt_token_ids=tuple((i + j * j) % 97 for j in range(5 + i % 4)),
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
        )
        for i in range(count)
    ]
