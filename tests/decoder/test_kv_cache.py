"""Block accounting: nothing lost, nothing shared, never more than there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdepth.decoder.kv_cache import BlockPool, consecutive_tables

NUM_SLOTS = 5
MAX_LEN = 30


class PoolMachine(RuleBasedStateMachine):
    """Random growth and rollback against a model that only counts."""

    @initialize(num_blocks=st.integers(1, 25), block_size=st.integers(1, 7))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size, NUM_SLOTS, MAX_LEN)
        self.held = [0] * NUM_SLOTS

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    @rule(wanted=st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_LEN)))
    def grow(self, wanted: dict[int, int]) -> None:
        slots, lengths = np.array([*wanted], np.int64), np.array([*wanted.values()], np.int64)
        missing = [max(self.blocks(n) - self.held[s], 0) for s, n in wanted.items()]
        assert self.pool.missing(slots, lengths).tolist() == missing
        before = [self.pool.tables[s, : self.held[s]].copy() for s in range(NUM_SLOTS)]
        if sum(missing) > self.pool.num_blocks - sum(self.held):
            with pytest.raises(RuntimeError, match=rf"{sum(missing)} KV blocks wanted"):
                self.pool.grow(slots, lengths)
        else:
            self.pool.grow(slots, lengths)
            for slot, count in zip(wanted, missing, strict=True):
                self.held[slot] += count
        for slot, blocks in enumerate(before):  # what a sequence has written stays where it is
            assert np.array_equal(self.pool.tables[slot, : len(blocks)], blocks)

    @rule(kept=st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.integers(0, MAX_LEN)))
    def shrink(self, kept: dict[int, int]) -> None:
        self.pool.shrink(np.array([*kept], np.int64), np.array([*kept.values()], np.int64))
        for slot, tokens in kept.items():
            self.held[slot] = min(self.held[slot], self.blocks(tokens))

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def release(self, slots: set[int]) -> None:
        self.pool.release(np.array(sorted(slots), np.int64))
        for slot in slots:
            self.held[slot] = 0

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.held = [0] * NUM_SLOTS

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_allocated.tolist() == self.held
        assert self.pool.num_free == self.pool.num_blocks - sum(self.held) >= 0
        assert self.pool.used_fraction == pytest.approx(sum(self.held) / self.pool.num_blocks)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30)


def test_check_finds_a_block_with_two_owners_and_a_lost_one() -> None:
    pool = BlockPool(8, 4, 2, 32)
    pool.grow(np.array([0, 1]), np.array([8, 8]))
    pool.check()
    pool.tables[0, 0] = pool.tables[1, 0]
    with pytest.raises(AssertionError, match="lost or shared"):
        pool.check()


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_for_tokens_round_up(tokens: int, block_size: int) -> None:
    pool = BlockPool(1, block_size, 1, block_size)
    (blocks,) = pool.blocks_for(np.array([tokens]))
    assert blocks * block_size >= tokens > (blocks - 1) * block_size


def test_a_reset_pool_is_whole_whatever_was_half_done() -> None:
    pool = BlockPool(8, 4, 2, 32)
    pool.grow(np.array([0]), np.array([20]))
    pool.num_free -= 2  # as an interrupt between two lines would leave it
    pool.reset()
    pool.check()
    assert pool.num_free == 8


def test_consecutive_tables_share_no_block() -> None:
    tables = consecutive_tables(np.array([2, 1, 3]))
    assert tables.tolist() == [[0, 1, 0], [2, 0, 0], [3, 4, 5]]
