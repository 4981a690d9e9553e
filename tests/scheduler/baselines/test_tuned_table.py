from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.baselines.table import OPEN_END
from specdepth.scheduler.baselines.tuned_table import tuned_table

SWEEP = {
    1: {0: 10.0, 2: 14.0, 4: 15.0},
    4: {0: 30.0, 2: 36.0, 4: 33.0},
    16: {0: 80.0, 2: 70.0, 4: 50.0},
}


def test_each_load_gets_its_best_depth_up_to_halfway_to_the_next() -> None:
    # Halfway between 1 and 4 on a log scale is 2, between 4 and 16 it is 8.
    assert tuned_table(SWEEP).ranges == ((1, 2, 4), (3, 8, 2), (9, OPEN_END, 0))


def test_inherited_ranges_end_before_the_next_load() -> None:
    table = tuned_table(SWEEP, boundaries="inherit")
    assert table.ranges == ((1, 3, 4), (4, 15, 2), (16, OPEN_END, 0))


def test_the_first_load_also_holds_below_it() -> None:
    sweep = {8: {0: 1.0, 3: 2.0}, 32: {0: 2.0, 3: 1.0}}
    assert tuned_table(sweep).ranges == ((1, 16, 3), (17, OPEN_END, 0))


def test_neighbours_of_the_same_depth_share_a_range() -> None:
    sweep = {load: {0: 1.0, 3: 2.0} for load in (1, 2, 3, 4, 8)}
    assert tuned_table(sweep).ranges == ((1, OPEN_END, 3),)


def test_equally_good_depths_give_the_shallowest() -> None:
    sweep = {1: {4: 2.0, 2: 2.0, 0: 1.0}}
    for monotone in (False, True):
        assert tuned_table(sweep, monotone=monotone).ranges == ((1, OPEN_END, 2),)


def test_a_monotone_table_gives_up_the_smaller_gain() -> None:
    # Best alone: 2, 4. Falling: 4 4 loses 14/15 at load 1, 2 2 loses 33/36 at load 4.
    sweep = {1: {2: 15.0, 4: 14.0}, 4: {2: 33.0, 4: 36.0}}
    assert tuned_table(sweep).ranges == ((1, 2, 2), (3, OPEN_END, 4))
    assert tuned_table(sweep, monotone=True).ranges == ((1, OPEN_END, 4),)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_a_monotone_table_is_the_best_of_all_that_fall(
    seed: int, num_loads: int, num_depths: int
) -> None:
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(1, 2, (num_loads, num_depths))
    loads = [4**i for i in range(num_loads)]
    sweep = {load: dict(enumerate(row)) for load, row in zip(loads, speeds.tolist(), strict=True)}
    table = tuned_table(sweep, monotone=True)
    picked = [table.depth_at(load) for load in loads]

    def score(depths: tuple[int, ...] | list[int]) -> float:
        return sum(math.log(sweep[load][k]) for load, k in zip(loads, depths, strict=True))

    falling = [
        depths
        for depths in itertools.product(range(num_depths), repeat=num_loads)
        if list(depths) == sorted(depths, reverse=True)
    ]
    assert picked == sorted(picked, reverse=True)
    assert score(picked) == pytest.approx(max(map(score, falling)))


@given(st.dictionaries(st.integers(1, 300), st.integers(0, 8), min_size=1, max_size=6))
def test_every_load_finds_the_depth_that_was_best_there(best: dict[int, int]) -> None:
    sweep = {
        load: {k: 2.0 if k == depth else 1.0 for k in range(9)} for load, depth in best.items()
    }
    for table in (tuned_table(sweep), tuned_table(sweep, boundaries="inherit")):
        assert {load: table.depth_at(load) for load in best} == best


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({}, "is empty"),
        ({0: {1: 1.0}}, "1 or more"),
        ({1: {}}, "same depths"),
        ({1: {-1: 1.0}}, "same depths"),
        ({1: {0: 1.0}, 2: {1: 1.0}}, "same depths"),
        ({1: {0: 0.0}}, "not positive"),
        ({1: {0: float("nan")}}, "not positive"),
    ],
)
def test_bad_sweeps_are_refused(sweep: dict[int, dict[int, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuned_table(sweep)
