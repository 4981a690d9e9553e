"""The draft model's cache, step by step, without a model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdepth.decoder.draft_steps import DraftCache
from specdepth.decoder.sequences import SequenceTable


def table(num_tokens: list[int], computed: list[int]) -> SequenceTable:
    sequences = SequenceTable(len(num_tokens), 512)
    sequences.num_tokens[:] = num_tokens
    sequences.draft_computed[:] = computed
    return sequences


def test_a_cache_in_step_takes_one_pass_of_one_token_each() -> None:
    cache = DraftCache(table([5, 9], [4, 8]), 64)
    slots = np.arange(2)
    cache.begin(slots)
    (only,) = cache.passes(slots, np.array([5, 9]))
    assert only.is_last
    assert only.starts.tolist() == [4, 8]
    assert only.lengths.tolist() == [1, 1]


def test_a_long_absence_is_made_up_for_in_bounded_passes() -> None:
    cache = DraftCache(table([100, 9], [0, 8]), 40)
    slots = np.arange(2)
    cache.begin(slots)
    first, second, last = cache.passes(slots, np.array([100, 9]))
    assert (first.is_last, second.is_last, last.is_last) == (False, False, True)
    assert (first.rows.tolist(), first.lengths.tolist()) == ([0], [40])
    assert (second.starts.tolist(), second.lengths.tolist()) == ([40], [40])
    assert (last.rows.tolist(), last.lengths.tolist()) == ([0, 1], [20, 1])


def test_settling_keeps_what_stands_and_leaves_the_last_token_pending() -> None:
    sequences = table([5], [4])
    cache = DraftCache(sequences, 64)
    slots = np.arange(1)
    cache.begin(slots)
    for step in range(3):  # drafts three tokens
        list(cache.passes(slots, np.array([5 + step])))
    sequences.num_tokens[0] = 6  # the first was rejected, another token stands there
    cache.settle(slots)
    assert sequences.draft_computed[0] == 5


def test_a_round_that_is_dropped_leaves_no_trace() -> None:
    sequences = table([5], [2])
    cache = DraftCache(sequences, 64)
    slots = np.arange(1)
    for _ in range(2):
        cache.begin(slots)
        (one,) = cache.passes(slots, np.array([5]))
        assert one.starts.tolist() == [2]
    assert sequences.draft_computed[0] == 2


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6),
    st.integers(1, 50),
)
def test_passes_cover_what_is_missing_once_and_keep_the_bound(
    sequences: list[tuple[int, int]], bound: int
) -> None:
    computed = [have for have, _ in sequences]
    lengths = [have + missing for have, missing in sequences]
    cache = DraftCache(table(lengths, computed), bound)
    slots = np.arange(len(sequences))
    cache.begin(slots)
    reached = np.array(computed)
    passes = list(cache.passes(slots, np.array(lengths)))
    for one in passes:
        assert (reached[one.rows] == one.starts).all()
        assert (one.lengths > 0).all()
        assert one.lengths.sum() <= max(bound, len(sequences))
        reached[one.rows] += one.lengths
    assert reached.tolist() == lengths
    assert [one.is_last for one in passes] == [False] * (len(passes) - 1) + [True]
    assert (passes[-1].rows == slots).all()
