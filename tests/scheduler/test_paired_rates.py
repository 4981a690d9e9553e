from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specdepth.scheduler.paired_rates import LogRatio, PairedRates, RoundMeans, student_quantile


def fill(
    rates: PairedRates, ratio: float, visits: int, rng: np.random.Generator, noise: float = 0.1
) -> None:
    """Visits of an arm and of one `ratio` times as fast, on a machine whose speed wanders by 2x."""
    for _ in range(visits):
        speed = 2 ** rng.uniform(-0.5, 0.5)
        tokens = rng.gamma(1 / noise**2, noise**2, 2)
        rates.add(
            RoundMeans(10 * float(tokens[0]), 0.1 * speed),
            RoundMeans(10 * ratio * float(tokens[1]), 0.1 * speed),
        )


def test_a_known_ratio_is_within_its_interval_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for visits in (3, 6, 40):
        hits = 0
        for _ in range(400):
            rates = PairedRates(confidence=2.0)
            fill(rates, 1.2, visits, rng)
            found = rates.log_ratio()
            hits += abs(found.value - math.log(1.2)) <= found.margin
        assert 0.92 < hits / 400 < 0.98, visits  # a normal law has 0.954 within 2


def test_the_speed_of_the_machine_cancels():
    steady, drifting = PairedRates(), PairedRates()
    for visit in range(12):
        tokens, speed = 8.0 + visit % 3, 2.0 ** (visit % 2)
        steady.add(RoundMeans(tokens, 0.2), RoundMeans(8.0, 0.1))
        drifting.add(RoundMeans(tokens, 0.2 * speed), RoundMeans(8.0, 0.1 * speed))
    assert drifting.log_ratio().value == pytest.approx(steady.log_ratio().value)
    assert drifting.log_ratio().margin == pytest.approx(steady.log_ratio().margin)


def test_noise_of_one_arm_does_not_pull_the_ratio():
    rates = PairedRates(window=4000)
    fill(rates, 1.0, 4000, np.random.default_rng(1), noise=0.7)
    assert abs(rates.log_ratio().value) < 0.05  # a mean of logarithms is steady at 0, but biased
    assert rates.log_ratio().margin < 0.07


def test_few_visits_say_nothing_or_little():
    rates = PairedRates()
    assert rates.log_ratio() == LogRatio(0.0, math.inf, 0)
    rates.add(RoundMeans(8, 0.1), RoundMeans(16, 0.1))
    assert rates.log_ratio().value == pytest.approx(math.log(2))
    assert rates.log_ratio().margin == math.inf
    assert rates.log_ratio().flipped.value == pytest.approx(-math.log(2))


def test_only_the_window_counts():
    rates = PairedRates(window=4)
    for _ in range(4):
        rates.add(RoundMeans(8, 0.1), RoundMeans(16, 0.1))
    for _ in range(4):
        rates.add(RoundMeans(8, 0.1), RoundMeans(8, 0.1))
    assert len(rates) == 4
    assert rates.log_ratio().value == pytest.approx(0)


def test_a_change_is_noticed_after_four_visits_and_noise_is_not_a_change():
    rng = np.random.default_rng(2)
    rates = PairedRates()
    fill(rates, 0.6, 60, rng)
    assert not rates.forget_before_change(0.01)
    fill(rates, 1.3, 3, rng)
    assert not rates.forget_before_change(0.01)
    fill(rates, 1.3, 1, rng)
    assert rates.forget_before_change(0.01)
    assert len(rates) == 4
    assert rates.log_ratio().value == pytest.approx(math.log(1.3), abs=0.2)
    alarms = 0
    for _ in range(200):
        rates = PairedRates()
        fill(rates, 0.8, 30, rng)
        alarms += rates.forget_before_change(0.01)
    assert alarms < 10


@pytest.mark.parametrize("z", [1.5, 2.5, 3.0])
@pytest.mark.parametrize("dof", [3, 5, 10, 100])
def test_the_quantile_is_students(z, dof):
    exact = stats.t.ppf(stats.norm.cdf(z), dof)
    assert student_quantile(z, dof) == pytest.approx(exact, rel=0.2 if dof < 5 else 0.06)


@pytest.mark.parametrize(("window", "confidence"), [(1, 2.0), (8, 0.0), (8, math.inf)])
def test_settings_are_checked(window, confidence):
    with pytest.raises(ValueError, match="paired rates need"):
        PairedRates(window, confidence)
