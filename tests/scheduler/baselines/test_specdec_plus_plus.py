from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Floats, RoundOutcome, RoundState


class Known:
    """Estimates that the test sets."""

    def __init__(self, survival: Any) -> None:
        self.table: Floats = np.asarray(survival, np.float64)
        self.outcomes: list[RoundOutcome] = []
        self.resets = 0

    def survival(self, state: RoundState) -> Floats:
        return self.table

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def reset(self) -> None:
        self.resets += 1


def test_the_token_that_crosses_the_threshold_is_the_last(make_state: Any) -> None:
    # P(rejection) after each token, threshold 0.5: 0.1 0.4 0.6 .. -> 3; 0.6 -> 1; 0.5 0.5 0.5 0.5 -> all.
    rule = SpecDecPlusPlus(
        0.5, Known([[0.9, 0.6, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.5, 0.5]])
    )
    assert rule.choose(make_state(3, 4)).tolist() == [3, 1, 4]


def test_no_more_is_drafted_than_is_on_offer(make_state: Any) -> None:
    survival = [[0.9, 0.9, 0.0, 0.0], [0.0] * 4, [0.9, 0.1, 0.0, 0.0]]
    state = make_state(3, 4, max_depths=np.array([2, 0, 2]))
    assert SpecDecPlusPlus(0.5, Known(survival)).choose(state).tolist() == [2, 0, 2]


def test_a_larger_threshold_drafts_deeper(make_state: Any) -> None:
    rng = np.random.default_rng(0)
    survival = np.cumprod(rng.random((32, 8)), axis=1)
    depths = [
        SpecDecPlusPlus(threshold, Known(survival)).choose(make_state(32))
        for threshold in (0.0, 0.3, 0.5, 0.7, 1.0)
    ]
    assert (np.diff(depths, axis=0) >= 0).all()
    assert depths[0].tolist() == [1] * 32
    assert depths[-1].tolist() == [8] * 32


def test_without_an_estimator_the_drafts_top1_decides(make_state: Any) -> None:
    # Products of the drawn tokens: 0.72 and 0.45; the next token's own 0.1 and 0.9 don't count.
    top1 = np.array([[0.9, 0.8, 0.1], [0.9, 0.5, 0.9]])
    rule, state = SpecDecPlusPlus(0.5), make_state(2, drafter="draft-model")
    assert rule.choose(state).tolist() == [8, 8]
    signals = DraftSignals(np.arange(2), 2, top1, top1, top1)
    assert rule.keep_drafting(state, signals).tolist() == [True, False]
    first = DraftSignals(np.arange(2), 0, top1[:, :1], top1[:, :1], top1[:, :1])
    assert rule.keep_drafting(state, first).tolist() == [True, True], "one token at least"


def test_with_an_estimator_drafting_is_not_stopped_again(make_state: Any) -> None:
    top1 = np.full((2, 3), 0.01)
    rule = SpecDecPlusPlus(0.5, Known(np.ones((2, 8))))
    signals = DraftSignals(np.arange(2), 2, top1, top1, top1)
    assert rule.keep_drafting(make_state(2), signals).tolist() == [True, True]


def test_prompt_lookup_without_an_estimator_drafts_what_is_on_offer(make_state: Any) -> None:
    state = make_state(3, max_depths=np.array([0, 5, 8]))
    assert SpecDecPlusPlus().choose(state).tolist() == [0, 5, 8]


def test_the_estimator_hears_of_outcomes_and_resets(make_state: Any, make_outcome: Any) -> None:
    known = Known(np.ones((1, 8)))
    rule, state = SpecDecPlusPlus(0.5, known), make_state(1)
    outcome = make_outcome(state, [8], [8])
    rule.observe(outcome)
    rule.reset()
    assert known.outcomes == [outcome]
    assert known.resets == 1


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_thresholds_are_probabilities(threshold: float) -> None:
    with pytest.raises(ValueError, match="probability of rejection"):
        SpecDecPlusPlus(threshold)
