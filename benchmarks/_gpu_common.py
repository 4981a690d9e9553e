"""What the sections of `gpu_check.py` share: sizes, results so far, and where they are written."""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _measure import Printer

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is computed."""

    hidden: int = 2048
    layers: int = 16
    vocab: int = 128256
    dtype: str = "bfloat16"
    max_num_speculative_tokens: int = 8
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    loads: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 32
    new_tokens: int = 64
    num_train_prompts: int = 64
    num_held_out_prompts: int = 96
    repeats: int = 3
    """Of each depth and batch; the first is dropped."""
    pass_tokens: tuple[int, ...] = (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
        640,
    )
    kv_cache_bytes: int = 4 * 2**30
    profile_s: float = 40.0
    train_minutes: float = 1.2
    evaluate_minutes: float = 1.0
    small_hidden: int = 512
    """Of the models that numbers are compared on."""
    check_tokens: int = 48
    check_depths: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)


TINY = Scale(
    hidden=128,
    layers=2,
    vocab=512,
    dtype="float32",
    batches=(1, 4),
    loads=(1, 4),
    prompt_tokens=8,
    new_tokens=16,
    num_train_prompts=6,
    num_held_out_prompts=8,
    repeats=2,
    pass_tokens=(1, 4, 16, 36),
    kv_cache_bytes=2**24,
    profile_s=2.0,
    train_minutes=0.05,
    evaluate_minutes=0.05,
    small_hidden=128,
    check_tokens=12,
    check_depths=(0, 1, 4, 8),
)


@dataclass(slots=True)
class Check:
    """What is known so far."""

    scale: Scale
    device: torch.device
    out: Path
    deadline_s: float
    printer: Printer
    seed: int
    document: dict[str, Any]
    texts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompts and recorded texts: those to train on, then those held out."""
    decoder: SpeculativeDecoder | None = None
    """Proposes the recorded texts."""
    model: Any = None
    """The large one."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the large model."""
        kind = getattr(torch, self.scale.dtype)
        assert isinstance(kind, torch.dtype)
        return kind

    @property
    def left_s(self) -> float:
        """Seconds until the end of the time allowed."""
        return self.deadline_s - time.perf_counter()

    def need_decoder(self) -> SpeculativeDecoder:
        """The decoder that proposes the recorded texts.

        Raises:
            Skip: an earlier section failed to make it.
        """
        if self.decoder is None:
            raise Skip("the large model did not decode")
        return self.decoder

    def save(self) -> None:
        """Write the document, whole or not at all."""
        partial = self.out.with_name(self.out.name + ".partial")
        partial.write_text(json.dumps(self.document, indent=1, allow_nan=False) + "\n")
        os.replace(partial, self.out)


class Skip(Exception):
    """This section cannot run here; the message says why."""


def free(device: torch.device) -> None:
    """Give unused memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(0, vocab, length)] for _ in range(count)]
