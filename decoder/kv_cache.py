"""Accounting of the paged KV pool: which blocks belong to which slot. Holds no tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Ints


class BlockPool:
    """A stack of free blocks and one block table a slot.

    Target and draft share block ids: block b is rows b of both caches, so the pool's bytes cover both
    and a block is charged once. Invariant: each block is free or in exactly one table.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, max_model_len: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        self.tables: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        """[S, blocks] block ids; only the first `num_allocated[s]` of a row mean anything."""
        self.num_allocated: Ints = np.zeros(num_slots, np.int64)
        self.reset()

    @property
    def used_fraction(self) -> float:
        """Share of blocks in use."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: Ints) -> Ints:
        """Blocks that hold `num_tokens` tokens, elementwise."""
        blocks: Ints = (num_tokens + (self.block_size - 1)) // self.block_size
        return blocks

    def missing(self, slots: Ints, num_tokens: Ints) -> Ints:
        """Blocks each slot still needs to hold `num_tokens` tokens; never negative."""
        missing: Ints = np.maximum(self.blocks_for(num_tokens) - self.num_allocated.take(slots), 0)
        return missing

    def grow(self, slots: Ints, num_tokens: Ints) -> None:
        """Give each slot blocks for `num_tokens` tokens.

        Raises:
            RuntimeError: when the pool has too few; nothing is changed then.
        """
        if not self.try_grow(slots, num_tokens):
            total = int(self.missing(slots, num_tokens).sum())
            raise RuntimeError(f"{total} KV blocks wanted, {self.num_free} free.")

    def try_grow(self, slots: Ints, num_tokens: Ints) -> bool:
        """The same, but say False where the pool has too few."""
        missing = self.missing(slots, num_tokens)
        total = int(np.add.reduce(missing))
        if total == 0:
            return True
        if total > self.num_free:
            return False
        taken = self._free[self.num_free - total : self.num_free]
        rows = np.repeat(slots, missing)
        starts = np.cumsum(missing) - missing
        columns = np.arange(total) - np.repeat(starts - self.num_allocated[slots], missing)
        self.tables[rows, columns] = taken
        self.num_allocated[slots] += missing
        self.num_free -= total
        return True

    def shrink(self, slots: Ints, num_tokens: Ints) -> None:
        """Take back the blocks of each slot beyond those for `num_tokens` tokens (rollback)."""
        held = self.num_allocated.take(slots)
        keep = np.minimum(self.blocks_for(num_tokens), held)
        surplus = held - keep
        total = int(np.add.reduce(surplus))
        if total == 0:
            return
        rows = np.repeat(slots, surplus)
        starts = np.cumsum(surplus) - surplus
        columns = np.arange(total) - np.repeat(starts - keep, surplus)
        self._free[self.num_free : self.num_free + total] = self.tables[rows, columns]
        self.num_free += total
        self.num_allocated[slots] = keep

    def release(self, slots: Ints) -> None:
        """Take back all blocks of `slots`."""
        self.shrink(slots, np.zeros(len(slots), np.int64))

    def reset(self) -> None:
        """Take back every block, whatever the tables say."""
        self.num_allocated[:] = 0
        self._free: NDArray[np.int32] = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = self.num_blocks

    def check(self) -> None:
        """Assert the invariant; cheap enough to run when the engine is idle."""
        owned = [self.tables[s, : self.num_allocated[s]] for s in range(len(self.tables))]
        seen = np.concatenate([*owned, self._free[: self.num_free]])
        assert np.array_equal(np.sort(seen), np.arange(self.num_blocks)), "KV blocks lost or shared"


def consecutive_tables(num_blocks: Ints) -> NDArray[np.int32]:
    """Block tables [N, widest] of sequences that take `num_blocks` [N] blocks each, one after the other
    from block 0: for passes over an idle pool.
    """
    tables = np.zeros((len(num_blocks), int(num_blocks.max())), np.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(num_blocks), num_blocks, strict=True)):
        tables[row, :count] = np.arange(end - count, end)
    return tables
