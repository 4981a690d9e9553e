"""Builds and calls `gumbel_race.c`, the exponential race of `gumbel_argmax` on CPUs with AVX-512."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from .native import compiled_for

_SOURCE = Path(__file__).with_suffix(".c")
_NEEDED = ("avx512f", "avx512dq")
_FLAGS = ("-mavx512f", "-mavx512dq")


def can_race(weights: Tensor) -> bool:
    """Whether the kernel is there and takes such weights."""
    fits = weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.float64)
    return fits and load() is not None


def race(weights: Tensor, keys: Tensor) -> Tensor:
    """Argmin of -log(u(key, id)) / weight of each row, ties to the lowest id.

    Args:
        weights: [N, V] float32 or float64, >= 0, for which `can_race`.
        keys: int64 [N], hash of all that a row's noise hangs on but the id.

    Returns:
        int64 [N]; V - 1 for rows that are all 0.
    """
    kernel = load()
    assert kernel is not None
    assert keys.dtype == torch.int64
    assert keys.shape == weights.shape[:1]  # the kernel reads as many, whatever is there
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    keys, ids = keys.contiguous(), torch.empty_like(keys, memory_format=torch.contiguous_format)
    kernel.specdepth_gumbel_race(
        weights.data_ptr(),
        weights.dtype == torch.float64,
        weights.stride(0),
        *weights.shape,
        keys.data_ptr(),
        ids.data_ptr(),
        min(torch.get_num_threads(), len(keys)),
    )
    return ids


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernel; None where it cannot be had, with a line in the log that says why."""
    kernel = compiled_for(
        _NEEDED,
        [_SOURCE],
        _FLAGS,
        without="Gumbel sampling runs without its kernel, ten times slower",
    )
    if kernel is None:
        return None
    kernel.specdepth_gumbel_race.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    )
    kernel.specdepth_gumbel_race.restype = None
    return kernel
