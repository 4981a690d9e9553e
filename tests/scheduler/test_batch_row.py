from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.batch_row import MAX_DEPTH, batch_row
from specdepth.scheduler.features import HIGH, LOW, feature_matrix


def test_a_batch_of_one_is_that_sequence(make_state: Any) -> None:
    rows = feature_matrix(make_state(1))
    assert np.array_equal(batch_row(rows), rows[0])
    assert batch_row(rows).dtype == np.float32


def test_sequences_count_alike_and_the_deepest_possible_depth_is_kept(make_state: Any) -> None:
    state = make_state(
        3,
        max_depths=np.array([0, 2, 8]),
        acceptance_ema=np.array([0.2, 0.4, 0.9]),
        num_remaining=np.array([5, 50, 500]),
    )
    rows = feature_matrix(state)
    common = batch_row(rows)
    others = np.arange(rows.shape[1]) != MAX_DEPTH
    assert common[others] == pytest.approx(rows.mean(0)[others])
    assert common[MAX_DEPTH] == rows[2, MAX_DEPTH] == 1.0
    assert (common >= LOW).all()
    assert (common <= HIGH).all()


def test_what_is_true_of_the_whole_round_is_left_as_it_is(make_state: Any) -> None:
    rows = feature_matrix(make_state(16))
    shared = (rows == rows[0]).all(0)
    assert shared.any()
    assert batch_row(rows)[shared] == pytest.approx(rows[0, shared])


def test_the_rows_are_left_alone(make_state: Any) -> None:
    rows = feature_matrix(make_state(3))
    before = rows.copy()
    batch_row(rows)[:] = 7
    batch_row(rows[:1])[:] = 7
    assert np.array_equal(rows, before)
