"""Spans laid back to back, against the same thing written with loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdepth.decoder.packing import pack, tail_rows

spans = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9), st.integers(0, 9)), max_size=12)


@given(spans)
def test_pack_says_whose_and_which_position_each_row_is(shape: list[tuple[int, int, int]]) -> None:
    starts = np.array([start for start, _, _ in shape], np.int64)
    lengths = np.array([length for _, length, _ in shape], np.int64)
    packed = pack(starts, lengths)
    rows = [(i, start + j) for i, (start, length, _) in enumerate(shape) for j in range(length)]
    assert packed.sequence.tolist() == [sequence for sequence, _ in rows]
    assert packed.positions.tolist() == [position for _, position in rows]
    assert packed.ends.tolist() == np.cumsum(lengths).tolist()


@given(spans, st.integers(0, 12))
def test_tail_rows_are_the_last_of_each_of_the_first_spans(
    shape: list[tuple[int, int, int]], first: int
) -> None:
    lengths = [length for _, length, _ in shape]
    counts = [min(length, count) for _, length, count in shape][:first]
    packed = pack(np.zeros(len(shape), np.int64), np.array(lengths, np.int64))
    wanted = [
        row
        for i, count in enumerate(counts)
        for row in range(sum(lengths[: i + 1]) - count, sum(lengths[: i + 1]))
    ]
    assert tail_rows(packed, np.array(counts, np.int64)).tolist() == wanted
