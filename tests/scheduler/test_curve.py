from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.curve import Curve

STAIRS = Curve((1, 8, 9, 16), (1.0, 1.0, 2.0, 1.8))


def test_points_are_returned_as_they_are() -> None:
    assert [STAIRS.at(size) for size in (1, 8, 9, 16)] == [1.0, 1.0, 2.0, 1.8]


def test_between_points_the_curve_is_linear() -> None:
    assert Curve((1, 5), (1.0, 3.0)).at(2) == pytest.approx(1.5)


def test_no_size_costs_nothing() -> None:
    assert STAIRS.at(0) == 0.0
    assert STAIRS.at_each(np.array([0, 1])).tolist() == [0.0, 1.0]


def test_sizes_below_the_first_point_cost_as_much_as_it() -> None:
    assert Curve((4, 8), (1.0, 2.0)).at(1) == 1.0


def test_beyond_the_last_point_the_last_slope_goes_on() -> None:
    assert Curve((1, 2, 4), (1.0, 1.0, 3.0)).at(10) == pytest.approx(9.0)


def test_a_falling_end_goes_on_with_the_mean_slope() -> None:
    assert STAIRS.at(31) == pytest.approx(1.8 + 15 * 0.8 / 15)


def test_a_curve_that_falls_as_a_whole_stays_flat() -> None:
    assert Curve((1, 2), (2.0, 1.5)).at(100) == 1.5


def test_one_point_is_a_constant() -> None:
    assert Curve((1,), (0.5,)).at(1000) == 0.5


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_arrays_and_numbers_agree(sizes: list[int]) -> None:
    each = STAIRS.at_each(np.array(sizes))
    assert each.tolist() == pytest.approx([STAIRS.at(size) for size in sizes])


@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=8),
    st.floats(0.05, 60.0),
)
def test_first_at_least_is_the_first(seconds: list[float], wanted: float) -> None:
    curve = Curve(tuple(range(1, 4 * len(seconds), 4)), tuple(seconds))
    found = curve.first_at_least(wanted, 400)
    brute = next((size for size in range(1, 400) if curve.at(size) >= wanted), 400)
    assert found == brute


GRAPHS = Curve((1, 8, 64), (1.0, 1.7, 7.3), (2, 8, 16))


def test_a_size_up_to_the_last_step_costs_what_the_next_step_does() -> None:
    assert GRAPHS.at(1) == GRAPHS.at(2) == pytest.approx(1.1)
    assert GRAPHS.at(3) == GRAPHS.at(8) == 1.7
    assert GRAPHS.at(9) == GRAPHS.at(16) == pytest.approx(2.5)


def test_sizes_above_the_last_step_are_not_padded() -> None:
    assert GRAPHS.at(17) == pytest.approx(2.6)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_arrays_are_padded_as_numbers_are(sizes: list[int]) -> None:
    assert GRAPHS.at_each(np.array(sizes)).tolist() == pytest.approx([GRAPHS.at(n) for n in sizes])


@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6),
    st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True),
    st.floats(0.05, 60.0),
)
def test_first_at_least_is_the_first_on_a_staircase(
    seconds: list[float], steps: list[int], wanted: float
) -> None:
    curve = Curve(tuple(range(1, 4 * len(seconds), 4)), tuple(seconds), tuple(sorted(steps)))
    brute = next((size for size in range(1, 400) if curve.at(size) >= wanted), 400)
    assert curve.first_at_least(wanted, 400) == brute


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=5))
def test_sizes_in_a_row_cost_what_each_does(asked: list[tuple[int, int]]) -> None:
    """Whatever was asked before: the table grows."""
    curve = Curve((1, 8, 64), (1.0, 1.7, 7.3), (2, 8, 16))
    for first, count in asked:
        in_row = curve.in_row(first, count)
        assert in_row.tolist() == curve.at_each(np.arange(first, first + count)).tolist()


def test_the_table_of_a_curve_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Curve((1, 5), (1.0, 3.0)).in_row(1, 2)[0] = 0.0
