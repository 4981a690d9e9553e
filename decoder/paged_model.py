"""A model over a paged KV pool: where its keys and values lie, whatever computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdepth.scheduler.state import Ints

from .attention import Backend, LayerKV, PassLayout, build_layout
from .bf16_attention import BLOCK_MULTIPLE, can_attend
from .huge_pages import HugePages
from .roofline import ModelSize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class PagedModel(ABC):
    """What every model of a decoder has. Subclasses set the attributes and run passes."""

    name: str
    device: torch.device
    dtype: torch.dtype
    backend: Backend
    shapes: list[LayerShape]
    """One for each attention layer."""
    layers: list[LayerKV]
    """Empty before `allocate`."""
    block_size: int
    vocab_size: int
    """Columns of its logits."""
    max_positions: int | None
    size: ModelSize
    states: Tensor | None = None
    """Hidden states that the last pass left behind, where somebody reads them."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        values = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.shapes)
        return values * torch.empty((), dtype=self.dtype).element_size()

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the KV pool: `num_blocks` blocks of `block_size` tokens, and one scratch block.

        Raises:
            MemoryError: the device has not so much.

        Zeroed, because masked keys are still multiplied by 0 and an uninitialised NaN would survive.
        """
        self.block_size = block_size
        try:
            memory = HugePages()
            self.layers = [self._layer(num_blocks + 1, block_size, s, memory) for s in self.shapes]
        except (RuntimeError, MemoryError) as error:  # also torch.OutOfMemoryError
            size = num_blocks * block_size * self.kv_bytes_per_token / 2**30
            raise MemoryError(
                f"The KV pool of {self.name} takes {size:.2f} GiB, which {self.device} does not have; "
                "lower kv_cache_bytes or num_kv_blocks."
            ) from error

    def _layer(
        self, num_blocks: int, block_size: int, shape: LayerShape, memory: HugePages
    ) -> LayerKV:
        heads, dims = shape.num_kv_heads, (shape.key_dim, shape.value_dim)
        if self.backend in ("sdpa", "bf16-kernel"):  # gathered and written in one piece
            pool = self._pool(memory, num_blocks, block_size, heads * sum(dims))
            return LayerKV.side_by_side(pool, heads, shape.key_dim)
        keys, values = (self._pool(memory, num_blocks, block_size, heads, dim) for dim in dims)
        return LayerKV(keys, values)

    def _pool(self, memory: HugePages, *shape: int) -> Tensor:
        if self.device.type == "cpu":
            return memory.zeros(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def layout(self, tables: NDArray[np.int32], starts: Ints, query_lens: Ints) -> PassLayout:
        """See `attention.build_layout`."""
        backend = self.backend
        if backend == "bf16-kernel" and self.block_size % BLOCK_MULTIPLE:
            backend = "sdpa"
        return build_layout(
            self.layers, tables, starts, query_lens, self.block_size, self.device, backend
        )

    def has_kernel(self) -> bool:
        """Whether the kernel of `bf16_attention` takes all its heads."""
        return all(can_attend(self.dtype, self.device, s.key_dim, s.value_dim) for s in self.shapes)

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, layout: PassLayout, logit_rows: Ints
    ) -> Tensor:
        """One packed pass.

        Args:
            token_ids: [T] int64 on the device.
            positions: [T] int64.
            layout: where the tokens live.
            logit_rows: [N] rows of the packed row whose logits are wanted; the head runs on them only.

        Returns:
            [N, vocab_size] logits.
        """
