from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.baselines.admission import expected_tokens, rank_tokens
from specdepth.scheduler.state import Floats


def test_the_likeliest_tokens_come_first() -> None:
    ranked = rank_tokens(np.array([[0.9, 0.3], [0.6, 0.5]]))
    assert ranked.survival.tolist() == [0.9, 0.6, 0.5, 0.3]
    assert ranked.rows.tolist() == [0, 1, 1, 0]
    assert ranked.columns.tolist() == [0, 0, 1, 1]
    assert expected_tokens(ranked, 2) == pytest.approx([2, 2.9, 3.5, 4.0, 4.3])


def test_tokens_that_are_not_above_a_survival_are_left_out() -> None:
    ranked = rank_tokens(np.array([[0.9, 0.3], [0.6, 0.5], [0.0, 0.0]]), above=0.5)
    assert ranked.survival.tolist() == [0.9, 0.6]
    assert ranked.depths(2, 3).tolist() == [1, 1, 0]


def test_ties_go_to_the_shallower_token() -> None:
    ranked = rank_tokens(np.full((2, 2), 0.5))
    assert ranked.columns.tolist() == [0, 0, 1, 1]


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 100))
def test_any_budget_is_a_prefix_of_each_row(num_rows: int, depth: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    halves: Floats = rng.integers(0, 3, (num_rows, depth)) / 2.0
    survival = np.asarray(np.cumprod(halves, axis=1), np.float64)
    ranked = rank_tokens(survival)
    assert len(ranked.rows) == np.count_nonzero(survival)
    for budget in range(len(ranked.rows) + 1):
        depths = ranked.depths(budget, num_rows)
        assert depths.sum() == budget
        admitted = survival[np.arange(depth) < depths[:, None]]
        assert admitted.sum() == pytest.approx(ranked.survival[:budget].sum())
