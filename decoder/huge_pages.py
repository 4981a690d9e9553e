"""Memory in pages of 2 MB, for what every pass reads: weights and the KV pool.

In pages of 4 kB a pass of few tokens spends a fifth of its time on looking up addresses, in a virtual machine
twice over.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

PAGE = 2**21
_LINE = 64
_CHUNK = 2**25


class HugePages:
    """Hands out pieces of memory that it asks of the system in large chunks.

    A chunk is freed with the last tensor in it. Only pages that are written to count as used. Where the
    system has no huge pages, or keeps them for others, it is memory as any other.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._at = self._stop = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of zeros on the CPU, aligned to lines of 64 bytes.

        Raises:
            MemoryError: the system has not so much.
        """
        count = prod(shape)
        if not count:
            return torch.zeros(tuple(shape), dtype=dtype)
        size = -(-count * dtype.itemsize // _LINE) * _LINE
        if size > self._stop - self._at:
            self._map(max(size, _CHUNK))
        assert self._chunk is not None
        piece = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._at)
        self._at += size
        return piece.view(tuple(shape))

    def _map(self, size: int) -> None:
        length = -(-size // PAGE) * PAGE + PAGE
        try:
            # Private: huge pages of shared memory are a setting of their own.
            chunk = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"the system has not {length / 2**30:.2f} GiB of memory.") from error
        with contextlib.suppress(OSError, AttributeError):  # a system without them
            chunk.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr()
        self._chunk, self._at = chunk, -start % PAGE
        self._stop = self._at + length - PAGE
