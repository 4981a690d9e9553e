"""Against hand-computed values, and against what rliable 1.2.0 gave for the same scores."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.ablate_statistics import (
    improvement_interval,
    interquartile_mean,
    iqm_interval,
    probability_of_improvement,
)

X = np.array(
    [
        [1.02, 1.10, 0.95],
        [1.05, 1.08, 0.97],
        [1.00, 1.12, 1.01],
        [1.07, 1.05, 0.99],
        [1.03, 1.11, 0.90],
    ]
)
Y = np.array([[1.01, 1.10, 0.96], [1.04, 1.06, 0.98], [0.98, 1.09, 0.94], [1.02, 1.08, 0.97]])
RLIABLE_IQM, RLIABLE_IQM_INTERVAL = 1.0333333333333334, (1.01777778, 1.04888889)
RLIABLE_BETTER, RLIABLE_BETTER_INTERVAL = 0.65, (0.425, 0.85833333)
"""`get_interval_estimates` with `aggregate_iqm` (20,000 resamples) and `probability_of_improvement`
(3,000), after `numpy.random.seed(0)`."""


def test_the_middle_half_is_averaged() -> None:
    assert interquartile_mean([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 100.0]]) == 3.5


def test_a_quarter_is_rounded_down() -> None:
    # 5 scores: one is cut off at each end; 3 scores: none.
    assert interquartile_mean([[9.0, 1.0, 2.0, 3.0, -9.0]]) == 2.0
    assert interquartile_mean([[9.0, 1.0, 2.0]]) == 4.0


def test_leading_axes_are_kept() -> None:
    many = np.stack([X, X + 1.0])
    assert interquartile_mean(many) == pytest.approx([RLIABLE_IQM, RLIABLE_IQM + 1.0])


def test_improvement_counts_pairs_and_ties_as_half() -> None:
    # Task 1: 2 > 1, 2 = 2, 3 > 1, 3 > 2; task 2: nothing is better.
    assert (
        probability_of_improvement([[2.0, 0.0], [3.0, 0.0]], [[1.0, 1.0], [2.0, 1.0]])
        == (3.5 / 4 + 0.0) / 2
    )
    assert probability_of_improvement(X, X) == 0.5


def test_improvement_either_way_adds_up_to_one() -> None:
    there, back = probability_of_improvement(X, Y), probability_of_improvement(Y, X)
    assert there + back == pytest.approx(1.0)


def test_values_are_those_of_rliable() -> None:
    assert iqm_interval(X).value == pytest.approx(RLIABLE_IQM, abs=1e-12)
    assert improvement_interval(X, Y).value == pytest.approx(RLIABLE_BETTER, abs=1e-12)


def test_intervals_are_those_of_rliable_but_for_the_draws() -> None:
    assert iqm_interval(X)[1:] == pytest.approx(RLIABLE_IQM_INTERVAL, abs=0.002)
    assert improvement_interval(X, Y)[1:] == pytest.approx(RLIABLE_BETTER_INTERVAL, abs=0.02)


def test_intervals_can_be_repeated_and_go_by_the_seed() -> None:
    assert iqm_interval(X, 1) == iqm_interval(X, 1)
    noisy = np.random.default_rng(0).normal(size=(5, 7))
    assert iqm_interval(noisy, 1) != iqm_interval(noisy, 2)


def test_whole_runs_show_that_good_seeds_are_good_everywhere() -> None:
    skill = np.linspace(0.0, 1.0, 6)[:, None].repeat(7, axis=1)
    apart, together = iqm_interval(skill), iqm_interval(skill, whole_runs=True)
    assert apart.value == together.value
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_runs_are_drawn_within_their_own_task() -> None:
    # Tasks far apart, no spread within: every resample is the same.
    scores = np.array([[1.0, 5.0, 9.0]] * 4)
    assert iqm_interval(scores) == pytest.approx((5.0, 5.0, 5.0))


def test_one_run_has_no_interval() -> None:
    assert np.isnan(iqm_interval(X[:1]).low)
    assert np.isnan(improvement_interval(X[:1], Y).high)


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[]], [[np.nan]], [[np.inf]]])
def test_what_is_no_matrix_of_numbers_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="expected finite scores"):
        iqm_interval(bad)  # type: ignore[arg-type]


def test_different_tasks_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="same tasks, got 3 and 2"):
        improvement_interval(X, Y[:, :2])
