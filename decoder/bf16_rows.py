"""Calls `bf16_rows.c`: what a round asks of each row of logits, in one or two passes over it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import bf16_kernels


def can_read(logits: Tensor) -> bool:
    """Whether the kernels are there and take such logits [N, V]."""
    fits = logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.shape[1] > 0
    return fits and bf16_kernels.load() is not None


def argmax(logits: Tensor) -> Tensor:
    """First largest entry of each row [N, V], int64 [N]."""
    return _read("argmax", logits, torch.empty(len(logits), dtype=torch.int64))


def signals(logits: Tensor) -> Tensor:
    """Largest probability, entropy in nats, and largest less second largest probability of each row
    [N, V] at temperature 1; float64 [3, N].
    """
    return _read("signals", logits, torch.empty(3, len(logits), dtype=torch.float64))


def _read(kernel: str, logits: Tensor, out: Tensor) -> Tensor:
    """Fill `out` by the kernel of that name."""
    kernels = bf16_kernels.load()
    assert kernels is not None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    getattr(kernels, f"specdepth_bf16_{kernel}")(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
