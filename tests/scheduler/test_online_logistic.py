from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize
from scipy.special import expit, logit

from specdepth.scheduler.online_logistic import OnlineLogistic, log_odds
from specdepth.scheduler.state import Bools, Floats

SLOPE, INTERCEPTS = 0.8, np.array([0.5, -0.3, -1.0])


def drafts(num_rows: int, seed: int = 0) -> tuple[Floats, Bools, Bools]:
    """Features, tested and accepted tokens [R, 3] of a drafter that follows SLOPE and INTERCEPTS."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.5, 2.0, (num_rows, 3))
    each = rng.random((num_rows, 3)) < expit(SLOPE * features + INTERCEPTS)
    accepted = np.cumprod(each, axis=1).astype(np.bool_)
    tested = np.arange(3) <= accepted.sum(axis=1)[:, None]
    return features, tested, accepted


def log_likelihood(
    params: Floats, start: Floats, ridge: float, data: tuple[Floats, Bools, Bools]
) -> float:
    """Of tested tokens, less the ridge on the way from `start`."""
    features, tested, accepted = data
    odds = params[0] * features + params[1:]
    each = np.where(accepted, -np.logaddexp(0, -odds), -np.logaddexp(0, odds))
    return float(each[tested].sum() - 0.5 * ridge * ((params - start) ** 2).sum())


def parameters(model: OnlineLogistic) -> Floats:
    return np.array([model.slope, *model.intercepts])


def test_a_refit_is_the_newton_step_of_the_penalised_likelihood() -> None:
    data, model = drafts(400), OnlineLogistic(3)
    model.damping = 0.0
    start = parameters(model)

    def gradient(params: Floats) -> Floats:
        features, tested, accepted = data
        miss = np.where(tested, accepted - expit(params[0] * features + params[1:]), 0.0)
        penalty = model.ridge * (params - start)
        return np.array([(miss * features).sum(), *miss.sum(axis=0)]) - penalty

    hessian = approx_fprime(start, gradient, 1e-7)
    model.observe(*data)
    model.refit()
    assert parameters(model) == pytest.approx(
        start - np.linalg.solve(hessian, gradient(start)), rel=1e-4
    )


def test_refits_on_the_same_rounds_end_at_the_maximum_of_the_likelihood() -> None:
    data, model = drafts(400), OnlineLogistic(3)
    model.damping = 0.0
    for _ in range(30):
        model.observe(*data)
        model.refit()
    start = np.zeros(4)
    best = minimize(lambda p: -log_likelihood(p, p, 0.0, data), start, tol=1e-12)
    assert parameters(model) == pytest.approx(best.x, abs=1e-4)
    # The ridge holds a refit at where it came from, so there it is a fixed point as well.
    at = parameters(model)
    ridged = minimize(lambda p: -log_likelihood(p, at, model.ridge, data), at, tol=1e-12)
    assert ridged.x == pytest.approx(at, abs=1e-4)


def test_a_ridge_bounds_the_step_where_nothing_tells_slope_and_intercept_apart() -> None:
    model = OnlineLogistic(1)
    model.damping = 0.0
    one = np.ones((50, 1), np.bool_)
    model.observe(np.full((50, 1), 2.0), one, one)
    model.refit()
    assert np.isfinite(parameters(model)).all()
    # A ridge on a rank-one problem puts the step along the data, (2, 1).
    moved = parameters(model) - [0.5, -0.2]
    assert moved[0] == pytest.approx(2 * moved[1], rel=1e-3)


def test_parameters_move_by_their_share_of_tokens() -> None:
    data, full, damped = drafts(10), OnlineLogistic(3), OnlineLogistic(3)
    full.damping = 0.0
    for model in (full, damped):
        model.observe(*data)
        model.refit()
    num_tested = data[1].sum()
    share = num_tested / (num_tested + 50)
    assert damped.slope - 0.5 == pytest.approx(share * (full.slope - 0.5))


def test_a_position_that_nobody_reached_stays() -> None:
    features, tested, accepted = drafts(200)
    tested[:, 2] = False
    model = OnlineLogistic(3)
    model.observe(features, tested, accepted)
    model.refit()
    assert model.intercepts[2] == -0.2
    assert model.intercepts[0] != -0.2


def test_only_tested_tokens_with_a_known_feature_count() -> None:
    features, tested, accepted = drafts(100)
    noisy = np.where(tested, features, 1e3)
    gone = np.where(np.arange(100)[:, None] < 50, features, np.nan)
    models = [OnlineLogistic(3) for _ in range(4)]
    for model, data in zip(
        models,
        [
            (features, tested, accepted),
            (noisy, tested, accepted),
            (features[:50], tested[:50], accepted[:50]),
            (gone, tested, accepted),
        ],
        strict=True,
    ):
        model.observe(*data)
        model.refit()
    assert parameters(models[0]) == pytest.approx(parameters(models[1]))
    assert parameters(models[2]) == pytest.approx(parameters(models[3]))


def test_a_negative_slope_is_not_taken() -> None:
    model = OnlineLogistic(1)
    features = np.linspace(-3, 3, 200)[:, None]
    model.observe(features, np.ones((200, 1), np.bool_), features < 0)
    model.refit()
    assert model.slope == 0.5


def test_a_refit_comes_every_hundred_rounds_and_forgets_them() -> None:
    data, model = drafts(20), OnlineLogistic(3)
    for _ in range(99):
        model.observe(*data)
    assert model.num_refits == 0
    model.observe(*data)
    assert model.num_refits == 1
    fitted = parameters(model)
    model.refit()
    assert (parameters(model) == fitted).all(), "nothing is left of the last rounds"


def test_it_finds_the_law_behind_the_data() -> None:
    model = OnlineLogistic(3)
    for round_index in range(2000):
        model.observe(*drafts(16, seed=round_index))
    assert parameters(model) == pytest.approx(np.array([SLOPE, *INTERCEPTS]), abs=0.15)


def test_log_odds_are_those_of_scipy_within_their_limits() -> None:
    inside = np.array([0.001, 0.3, 0.5, 0.999])
    assert log_odds(inside) == pytest.approx(logit(inside))
    assert log_odds(np.array([0.0])) == pytest.approx(-40)
    assert 30 < log_odds(np.array([1.0]))[0] <= 40
    assert np.isnan(log_odds(np.array([np.nan])))[0]
