"""Calls `bf16_attention.c`, paged attention for bfloat16 on CPUs with AMX or AVX-512.

SDPA over paged keys is bound by its calls there: eight sequences with 250 keys took 19 ms in 30 layers with
AMX, where this takes 7, most of it the time to read the pool.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdepth.scheduler.state import Ints

from . import bf16_kernels

BLOCK_MULTIPLE = 16
"""Keys that the kernel takes at a time: they must lie one behind the other in the pool."""
HEAD_MULTIPLE = 32


class _Pass(ctypes.Structure):
    """`Pass` of the C source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "pool", "tables", "starts", "lens", "out")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("token_stride", "head_stride", "num_sequences", "num_heads", "num_kv_heads"),
                *("head_dim", "block_size", "width", "window"),
            )
        ),
        ("scale", ctypes.c_float),
    )


class KernelPass:
    """What the kernel needs to know of a pass, made once for all its layers.

    Args:
        tables: [N, W] block ids of each sequence.
        starts: [N] position of the first query of each.
        query_lens: [N] queries of each.
        block_size: tokens a block, a multiple of `BLOCK_MULTIPLE`.
    """

    def __init__(
        self, tables: NDArray[np.int32], starts: Ints, query_lens: Ints, block_size: int
    ) -> None:
        self._arrays = (
            np.ascontiguousarray(tables, np.int32),
            np.ascontiguousarray(starts, np.int64),
            np.ascontiguousarray(query_lens, np.int64),
        )
        self._struct = _Pass(
            num_sequences=len(starts), width=tables.shape[1], block_size=block_size
        )
        self._struct.tables, self._struct.starts, self._struct.lens = (
            array.ctypes.data for array in self._arrays
        )

    @property
    def pointer(self) -> Any:
        """To the structure in which the kernels find tables, starts and lengths."""
        return ctypes.byref(self._struct)

    def attend(self, rows: Tensor, pool: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of the packed row; K and V of the pass are in the pool.

        Args:
            rows: [T, H, D] bfloat16 queries.
            pool: [blocks, B, J * D + J * D] bfloat16, a token's K and then its V; contiguous.
            scale: factor on scores, above 0.
            window: a query sees this many last keys, itself included; None: all.

        Returns:
            [T, H, D].

        Raises:
            MemoryError: no memory to work in.
        """
        num_tokens, num_heads, head_dim = rows.shape
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(num_tokens, num_heads, head_dim)
        struct, kernels = self._struct, bf16_kernels.load()
        assert kernels is not None
        struct.queries, struct.pool, struct.out = rows.data_ptr(), pool.data_ptr(), out.data_ptr()
        struct.token_stride, struct.head_stride = rows.stride(0), rows.stride(1)
        struct.num_heads, struct.num_kv_heads = num_heads, pool.shape[2] // (2 * head_dim)
        struct.head_dim, struct.window, struct.scale = head_dim, window or 0, scale
        if kernels.specdepth_bf16_attention(ctypes.byref(struct), torch.get_num_threads()):
            raise MemoryError("the attention kernel got no memory for its scratch space.")
        return out


def can_attend(dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel is there and takes such heads."""
    fits = key_dim == value_dim and key_dim % HEAD_MULTIPLE == 0
    return (
        fits
        and dtype == torch.bfloat16
        and device.type == "cpu"
        and bf16_kernels.load() is not None
    )
