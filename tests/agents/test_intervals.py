from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.agents.intervals import geometric_mean, mean_interval, paired_ratio

positive = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


def test_ratio_of_totals_weighs_by_size() -> None:
    assert paired_ratio([2.0, 8.0], [1.0, 1.0]).value == 5.0
    assert paired_ratio([1.0, 9.0], [1.0, 3.0]).value == 2.5


def test_median_ratio_shrugs_off_an_outlier() -> None:
    a, b = [2.0, 2.0, 2.0, 2.0, 1000.0], [1.0] * 5
    assert paired_ratio(a, b, statistic="median").value == 2.0
    assert paired_ratio(a, b).value > 200


def test_noise_that_pairs_share_cancels() -> None:
    rng = np.random.default_rng(1)
    noise = rng.uniform(1, 5, size=40)
    interval = paired_ratio(1.1 * noise, noise)
    assert interval.value == pytest.approx(1.1)
    assert interval.high - interval.low < 1e-9


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(200):
        b = rng.uniform(1, 2, size=40)
        a = 1.2 * b * rng.lognormal(0, 0.1, size=40) / math.exp(0.1**2 / 2)
        interval = paired_ratio(a, b, seed, num_resamples=400)
        hits += interval.low <= 1.2 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_mean_interval_agrees_with_the_normal_one_on_many_numbers() -> None:
    values = np.random.default_rng(3).normal(10, 2, size=400)
    interval = mean_interval(values)
    half = 1.96 * values.std(ddof=1) / 20
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05)


def test_a_single_pair_has_no_interval() -> None:
    interval = paired_ratio([3.0], [2.0])
    assert interval.value == 1.5
    assert interval.bounds == (None, None)


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = [1.0, 2.0, 4.0], [1.0, 1.5, 2.0]
    assert paired_ratio(a, b, 7) == paired_ratio(a, b, 7)
    assert paired_ratio(a, b, 7).bounds == paired_ratio(a, b, 7)[1:]


@given(positive, st.integers(0, 5))
def test_value_lies_within_its_interval(b: list[float], seed: int) -> None:
    a = [1.5 * x + 0.1 * i for i, x in enumerate(b)]
    interval = paired_ratio(a, b, seed, num_resamples=500)
    if len(b) > 1:
        ratios = np.array(a) / np.array(b)
        assert ratios.min() - 1e-9 <= interval.low <= interval.high <= ratios.max() + 1e-9


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0], [1.0, 2.0], "needs pairs, got 1 and 2"),
        ([], [], "at least one number"),
        ([1.0], [0.0], "b must hold"),
        ([float("nan")], [1.0], "a must hold"),
        ([-1.0], [1.0], "a must hold"),
    ],
)
def test_bad_pairs_are_refused(a: list[float], b: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_ratio(a, b)


@pytest.mark.parametrize("values", [[], [float("inf")]])
def test_bad_means_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="mean_interval needs"):
        mean_interval(values)


def test_geometric_mean_treats_up_and_down_alike() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
