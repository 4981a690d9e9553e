"""Calls `bf16_layer.c`: the small operations of a Llama layer, in torch a quarter of a small round."""

from __future__ import annotations

import torch
from torch import Tensor

from . import bf16_kernels

WIDTH_MULTIPLE = 16
"""Of a row that is normed or gated."""
HEAD_MULTIPLE = 32
"""Of heads that are rotated."""


def can_run(weight: Tensor) -> bool:
    """Whether the kernels are there and take rows like the weight [width] of a norm."""
    fits = len(weight) % WIDTH_MULTIPLE == 0 and weight.dtype == torch.bfloat16
    return fits and weight.device.type == "cpu" and bf16_kernels.load() is not None


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`LlamaRMSNorm` of [T, width] bfloat16 with rows in one piece."""
    kernels = bf16_kernels.load()
    assert kernels is not None
    out = x.new_empty(x.shape)
    kernels.specdepth_bf16_norm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        epsilon,
        *x.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rotate_and_keep(
    qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int, pool: Tensor, rows: Tensor
) -> None:
    """Rotate queries and keys in place, and write keys and values into the pool.

    Args:
        qkv: [T, queries, keys and values of all heads] bfloat16, contiguous.
        cos: [T, 1, D] of `LeanRotary`.
        sin: [T, 1, D] of `LeanRotary`, the first half negative.
        rotated: heads of queries and keys.
        pool: [places, keys and values of all heads] contiguous.
        rows: int64 [T] place of each token.
    """
    kernels = bf16_kernels.load()
    assert kernels is not None
    kernels.specdepth_bf16_rotate(
        qkv.data_ptr(),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        len(qkv),
        rotated,
        cos.shape[-1],
        qkv.shape[1] - pool.shape[1],
        pool.data_ptr(),
        rows.data_ptr(),
        pool.shape[1],
        torch.get_num_threads(),
    )


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for [T, gate and up] bfloat16, contiguous."""
    kernels = bf16_kernels.load()
    assert kernels is not None
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    kernels.specdepth_bf16_gate(
        gate_up.data_ptr(), len(gate_up), width, out.data_ptr(), torch.get_num_threads()
    )
    return out
