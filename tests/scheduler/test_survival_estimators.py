from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.scheduler.survival import SurvivalEstimator
from specdepth.scheduler.survival_estimators import (
    EmaSurvival,
    MatchLengthSurvival,
    PositionSurvival,
)

# What the protocol asks of all


@pytest.mark.parametrize("kind", [EmaSurvival, PositionSurvival, MatchLengthSurvival])
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), rounds=st.integers(0, 5))
def test_survival_falls_along_a_row_and_ends_at_the_limit(
    kind: type[Any], seed: int, rounds: int, make_state_once: Any
) -> None:
    from tests.scheduler.conftest import build_outcome

    rng = np.random.default_rng(seed)
    estimator: SurvivalEstimator = kind()
    for _ in range(rounds + 1):
        state = make_state_once(
            5,
            6,
            max_depths=rng.integers(0, 7, 5),
            match_length=rng.integers(0, 9, 5),
            acceptance_ema=rng.random(5),
            rounds_since_draft=rng.integers(0, 50, 5),
        )
        survival = estimator.survival(state)
        assert survival.shape == (5, 6)
        assert ((survival >= 0) & (survival <= 1)).all()
        assert (np.diff(survival, axis=1) <= 0).all()
        beyond = np.arange(6) >= state.max_depths[:, None]
        assert (survival[beyond] == 0).all()
        assert (survival[~beyond] > 0).all()
        accepted = rng.integers(0, state.max_depths + 1)
        estimator.observe(build_outcome(state, state.max_depths, accepted))


@pytest.mark.parametrize("kind", [EmaSurvival, PositionSurvival, MatchLengthSurvival])
def test_no_sequences_and_no_depth_are_fine(kind: type[Any], make_state: Any) -> None:
    assert kind().survival(make_state(0, 4)).shape == (0, 4)
    assert kind().survival(make_state(3, 0)).shape == (3, 0)


# Moving averages


def test_ema_survival_is_a_power_of_the_average(make_state: Any) -> None:
    state = make_state(2, 3, acceptance_ema=np.array([0.5, 0.9]))
    assert EmaSurvival().survival(state) == pytest.approx(
        np.array([[0.5, 0.25, 0.125], [0.9, 0.81, 0.729]])
    )


def test_ema_goes_back_to_the_prior_while_a_sequence_sits_out(make_state: Any) -> None:
    state = make_state(
        3, 1, acceptance_ema=np.array([0.1, 0.1, 0.9]), rounds_since_draft=np.array([0, 8, 8])
    )
    survival = EmaSurvival(half_life=8).survival(state)
    assert survival[:, 0] == pytest.approx([0.1, 0.3, 0.7])


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_a_half_life_is_positive(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life is a number of rounds above 0"):
        EmaSurvival(half_life)


# Counts


def test_counts_start_at_the_prior(make_state: Any) -> None:
    estimator = MatchLengthSurvival(first=(0.5, 0.2, 0.9), later=0.5, weight=10)
    state = make_state(3, 3, match_length=np.array([1, 2, 7]))
    assert estimator.survival(state) == pytest.approx(
        np.array([[0.2, 0.1, 0.05], [0.9, 0.45, 0.225], [0.9, 0.45, 0.225]])
    )


def test_counts_move_by_tested_tokens_of_their_group_alone(
    make_state: Any, make_outcome: Any
) -> None:
    estimator = MatchLengthSurvival(first=(0.5, 0.5, 0.5), later=0.5, weight=2)
    state = make_state(3, 3, match_length=np.array([1, 1, 2]))
    estimator.survival(state)
    estimator.observe(make_outcome(state, [3, 3, 0], [2, 0, 0]))
    # Group 1: first position 1 of 2, second 1 of 1, third 0 of 1, each after 1 of 2 made up.
    rates = np.array([2 / 4, 2 / 3, 1 / 3])
    survival = estimator.survival(state)
    assert survival[0] == pytest.approx(np.cumprod(rates))
    assert survival[2] == pytest.approx([0.5, 0.25, 0.125])


def test_counts_learn_the_rate_that_made_the_data(make_state: Any, make_outcome: Any) -> None:
    rng = np.random.default_rng(0)
    estimator = PositionSurvival()
    state = make_state(32, 3)
    rates = np.array([0.9, 0.5, 0.7])
    for _ in range(300):
        estimator.survival(state)
        accepted = np.cumprod(rng.random((32, 3)) < rates, axis=1).sum(axis=1)
        estimator.observe(make_outcome(state, np.full(32, 3), accepted))
    assert estimator.survival(state)[0] == pytest.approx(np.cumprod(rates), abs=0.02)


def test_a_round_that_was_not_asked_for_is_not_counted(make_state: Any, make_outcome: Any) -> None:
    estimator, state = PositionSurvival(), make_state(2, 3)
    before = estimator.survival(state)
    other = make_state(2, 3, request_ids=np.array([7, 8]))
    estimator.observe(make_outcome(other, [3, 3], [3, 3]))
    assert (estimator.survival(state) == before).all()
    estimator.observe(make_outcome(state, [3, 3], [3, 3]))
    once = estimator.survival(state)
    estimator.reset()
    estimator.observe(make_outcome(state, [3, 3], [3, 3]))
    assert (once > before).all()
    assert (estimator.survival(state) == before).all()


def test_counts_are_kept_when_a_deeper_engine_comes(make_state: Any, make_outcome: Any) -> None:
    estimator = PositionSurvival(first=0.5, later=0.5, weight=1)
    state = make_state(1, 2)
    estimator.survival(state)
    estimator.observe(make_outcome(state, [2], [2]))
    assert estimator.survival(make_state(1, 3))[0] == pytest.approx([3 / 4, 9 / 16, 9 / 32])
    assert estimator.survival(make_state(1, 1))[0] == pytest.approx([3 / 4])


@pytest.mark.parametrize(("first", "later", "weight"), [(0, 0.5, 1), (0.5, 1, 1), (0.5, 0.5, 0)])
def test_priors_are_probabilities_with_weight(first: float, later: float, weight: float) -> None:
    with pytest.raises(ValueError, match="prior acceptance rates lie between 0 and 1"):
        PositionSurvival(first, later, weight)
