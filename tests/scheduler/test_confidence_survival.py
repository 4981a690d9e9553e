from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.online_logistic import log_odds

NAN = np.nan


def test_survival_starts_from_the_estimators_first_coefficients(make_state: Any) -> None:
    shown = np.array([[0.9, 0.6, NAN], [0.2, NAN, NAN]])
    survival = ConfidenceSurvival().survival(make_state(2, 3, draft_top1=shown))
    means = np.array([log_odds(shown[0, :2]).mean(), log_odds(shown[1, :1]).mean()])
    rates = expit(0.5 * means - 0.2)
    assert survival == pytest.approx(rates[:, None] ** np.arange(1, 4))


def test_a_sequence_that_showed_nothing_takes_the_mean_of_the_others(make_state: Any) -> None:
    shown = np.array([[0.9, NAN], [NAN, NAN], [0.3, NAN]])
    survival = ConfidenceSurvival().survival(make_state(3, 2, draft_top1=shown))
    mean = (log_odds(np.array(0.9)) + log_odds(np.array(0.3))) / 2
    assert survival[1, 0] == pytest.approx(expit(0.5 * mean - 0.2))


def test_nothing_shown_at_all_is_even_odds_less_the_intercept(make_state: Any) -> None:
    survival = ConfidenceSurvival().survival(make_state(2, 2))
    assert survival[:, 0] == pytest.approx(expit([-0.2, -0.2]))


def test_survival_ends_at_the_limit(make_state: Any) -> None:
    state = make_state(2, 3, max_depths=np.array([1, 0]))
    assert (ConfidenceSurvival().survival(state) > 0).sum() == 1


def test_it_learns_that_old_confidence_is_worth_little(make_state: Any, make_outcome: Any) -> None:
    """Half of all tokens are accepted, whatever was shown before."""
    rng = np.random.default_rng(0)
    estimator = ConfidenceSurvival()
    for _ in range(1500):
        state = make_state(16, 1, draft_top1=rng.uniform(0.05, 0.95, (16, 1)))
        estimator.survival(state)
        accepted = rng.integers(0, 2, 16)
        estimator.observe(make_outcome(state, np.ones(16, np.int64), accepted))
    assert estimator.model is not None
    assert estimator.model.slope == pytest.approx(0.0, abs=0.1)
    sure, unsure = (
        make_state(1, 1, draft_top1=np.array([[0.95]])),
        make_state(1, 1, draft_top1=np.array([[0.05]])),
    )
    for state in (sure, unsure):
        assert estimator.survival(state) == pytest.approx(0.5, abs=0.08)


def test_only_the_round_that_was_asked_for_counts(make_state: Any, make_outcome: Any) -> None:
    estimator = ConfidenceSurvival()
    state = make_state(1, 1, draft_top1=np.array([[0.5]]))
    other = make_state(1, 1, request_ids=np.array([7]))
    for _ in range(100):
        estimator.survival(state)
        estimator.observe(make_outcome(other, [1], [1]))
    assert estimator.model is not None
    assert estimator.model.num_refits == 0
    estimator.reset()
    assert estimator.model is None
    estimator.observe(make_outcome(state, [1], [1]))
