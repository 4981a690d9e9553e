from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.agents.calibration import Calibration, calibrate, reliability, reliability_plot

CHANCES = np.array([[0.9, 0.5], [0.6, 0.3], [0.2, 0.1]])
SURVIVED = np.array([[True, True], [True, False], [False, False]])
EVERYWHERE = np.ones((3, 2), np.bool_)


def scored(depth: int | None, **changes: object) -> Calibration:
    arrays = {"chances": CHANCES, "survived": SURVIVED, "offered": EVERYWHERE} | changes
    (one,) = [score for score in calibrate(**arrays) if score.depth == depth]  # type: ignore[arg-type]
    return one


def test_the_brier_score_is_the_mean_squared_error() -> None:
    # 0.1^2 + 0.4^2 + 0.2^2 = 0.21 over 3
    assert scored(1).brier == pytest.approx(0.07)


def test_the_log_loss_is_the_mean_of_minus_log_of_what_happened() -> None:
    assert scored(1).log_loss == pytest.approx(-(np.log(0.9) + np.log(0.6) + np.log(0.8)) / 3)


def test_the_calibration_error_weighs_bins_by_size() -> None:
    chances = np.array([[0.62], [0.64], [0.10]])  # bins 9, 9 and 1 of 15
    survived = np.array([[True], [False], [False]])
    # bin 9: predicted 0.63, observed 0.5, 2 of 3; bin 1: 0.1 against 0, 1 of 3
    score = scored(1, chances=chances, survived=survived, offered=EVERYWHERE[:, :1])
    assert score.calibration_error == pytest.approx((2 * 0.13 + 0.1) / 3)


def test_all_depths_together_come_last() -> None:
    last = calibrate(CHANCES, SURVIVED, EVERYWHERE)[-1]
    assert last.depth is None
    assert last.count == 6
    assert last.base_rate == 0.5


def test_tokens_that_were_not_on_offer_do_not_count() -> None:
    offered = np.array([[True, True], [True, False], [True, False]])
    score = scored(2, offered=offered)
    assert (score.count, score.base_rate, score.brier) == (1, 1.0, 0.25)


def test_a_depth_that_nobody_was_offered_is_left_out() -> None:
    offered = np.array([[True, False]] * 3)
    depths = [score.depth for score in calibrate(CHANCES, SURVIVED, offered)]
    assert depths == [1, None]


def test_chosen_depths_are_scored_alone() -> None:
    assert [s.depth for s in calibrate(CHANCES, SURVIVED, EVERYWHERE, depths=(2,))] == [2, None]


def test_a_certain_mistake_costs_much_but_not_infinitely() -> None:
    score = scored(1, chances=np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    assert 5 < score.log_loss < 20


def test_a_perfect_forecast_scores_zero() -> None:
    score = scored(None, chances=SURVIVED.astype(np.float64))
    assert score.brier == score.calibration_error == 0.0
    assert score.log_loss == pytest.approx(0.0, abs=1e-5)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
def test_bins_keep_every_prediction_and_both_means(pairs: list[tuple[float, bool]]) -> None:
    chances = np.array([chance for chance, _ in pairs])
    outcomes = np.array([came for _, came in pairs], np.float64)
    bins = reliability(chances, outcomes)
    counts = np.array([one.count for one in bins])
    assert counts.sum() == len(pairs)
    assert counts @ [one.predicted for one in bins] == pytest.approx(chances.sum())
    assert counts @ [one.observed for one in bins] == pytest.approx(outcomes.sum())
    assert np.all(np.diff([one.predicted for one in bins]) >= 0)


def test_a_base_rate_forecast_has_the_variance_as_its_brier_score() -> None:
    rng = np.random.default_rng(0)
    survived = rng.random((500, 1)) < 0.3
    rate = survived.mean()
    score = scored(
        1,
        chances=np.full((500, 1), rate),
        survived=survived,
        offered=np.ones((500, 1), np.bool_),
    )
    assert score.brier == pytest.approx(rate * (1 - rate))
    assert score.calibration_error == pytest.approx(0.0, abs=1e-12)


def test_scores_are_plain_values_for_json() -> None:
    assert set(scored(1).as_dict()) == {
        "depth",
        "count",
        "base_rate",
        "brier",
        "log_loss",
        "calibration_error",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"survived": SURVIVED[:2]}, "one shape"),
        ({"chances": CHANCES + 0.2}, "outside 0..1"),
        ({"chances": np.full((3, 2), np.nan)}, "outside 0..1"),
        ({"offered": ~EVERYWHERE}, "nothing to score"),
    ],
)
def test_bad_arrays_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scored(1, **changes)


def test_the_diagram_is_an_svg_that_names_each_line_and_its_error() -> None:
    score = scored(1)
    svg = reliability_plot({"model": score, "table": score}, "Survival of the first token")
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("aria-label") == "Survival of the first token"
    assert 'id="reliability-' in svg
    assert reliability_plot({"model": score, "table": score}, "Survival of the first token") == svg
