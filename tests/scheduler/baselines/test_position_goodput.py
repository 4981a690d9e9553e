from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.position_goodput import (
    PositionGoodputDepth,
    WindowGoodputDepth,
    extrapolate,
    survival_counts,
)
from specdepth.scheduler.cost import CostModel

CHEAP = CostModel.linear(base_s=1.0, token_s=0.1)


def run(scheduler: Any, state: Any, make_outcome: Any, accepted: Any, rounds: int) -> None:
    for _ in range(rounds):
        depths = scheduler.choose(state)
        scheduler.observe(make_outcome(state, depths, np.minimum(accepted, depths)))


# Rates


def test_survivors_are_counted_among_drafts_that_were_so_deep(
    make_state: Any, make_outcome: Any
) -> None:
    outcome = make_outcome(make_state(3, 4), [3, 2, 0], [1, 2, 0])
    assert survival_counts(outcome, 4).tolist() == [[2, 1, 0, 0], [2, 2, 1, 0]]


def test_drafts_cut_by_the_end_count_as_far_as_they_are_known(
    make_state: Any, make_outcome: Any
) -> None:
    outcome = make_outcome(make_state(1, 3), [3], [1], num_committed=np.array([1]))
    assert survival_counts(outcome, 3).tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("rates", "filled"),
    [
        ([0.8, np.nan, np.nan], [0.8, 0.8, 0.8]),
        ([0.8, 0.4, np.nan, np.nan], [0.8, 0.4, 0.2, 0.1]),
        ([0.0, 0.0, np.nan], [0.0, 0.0, 0.0]),
        ([0.5, 0.6], [0.5, 0.5]),
        ([np.nan, np.nan], [0.7, 0.49]),
        ([], []),
    ],
)
def test_unknown_rates_go_on_geometrically(rates: list[float], filled: list[float]) -> None:
    assert extrapolate(np.array(rates), 0.7) == pytest.approx(np.array(filled))


# vLLM's manager


def test_rates_by_position_see_what_one_rate_cannot(make_state: Any, make_outcome: Any) -> None:
    """First tokens always hold, second ones never: 1.82, 3.08, 2.67, 2.35 tokens a second."""
    scheduler = PositionGoodputDepth(warmup=3)
    state = make_state(2, 3, cost=CHEAP)
    run(scheduler, state, make_outcome, accepted=1, rounds=2)
    assert scheduler.choose(state).tolist() == [3, 3], "still the prior"
    run(scheduler, state, make_outcome, accepted=1, rounds=1)
    assert scheduler.choose(state).tolist() == [1, 1]


def test_positions_never_drafted_are_tried_when_the_shallow_ones_hold(
    make_state: Any, make_outcome: Any
) -> None:
    scheduler = PositionGoodputDepth(warmup=0)
    narrow = make_state(2, 4, cost=CHEAP, max_depths=np.array([2, 2]))
    run(scheduler, narrow, make_outcome, accepted=2, rounds=3)
    assert scheduler.choose(make_state(2, 4, cost=CHEAP)).tolist() == [4, 4]


def test_counts_are_forgotten_on_reset(make_state: Any, make_outcome: Any) -> None:
    scheduler, state = PositionGoodputDepth(warmup=1), make_state(2, 3, cost=CHEAP)
    run(scheduler, state, make_outcome, accepted=0, rounds=3)
    assert scheduler.choose(state).tolist() == [0, 0]
    scheduler.reset()
    assert scheduler.choose(state).tolist() == [3, 3]


# SGLang's policy


def test_it_starts_in_the_middle_and_waits_for_full_windows(
    make_state: Any, make_outcome: Any
) -> None:
    scheduler, state = WindowGoodputDepth(), make_state(2, 5, cost=CHEAP)
    run(scheduler, state, make_outcome, accepted=0, rounds=19)
    assert scheduler.choose(state).tolist() == [3, 3]
    run(scheduler, state, make_outcome, accepted=0, rounds=1)
    assert scheduler.choose(state).tolist() == [1, 1]


def test_it_goes_deeper_on_what_it_extrapolates(make_state: Any, make_outcome: Any) -> None:
    scheduler, state = WindowGoodputDepth(window=4, interval=2), make_state(2, 5, cost=CHEAP)
    run(scheduler, state, make_outcome, accepted=9, rounds=4)
    assert scheduler.choose(state).tolist() == [5, 5]


def test_it_stays_within_the_hysteresis(make_state: Any, make_outcome: Any) -> None:
    """Two always hold: 6 tokens over 1.5 s at depth 2 are 13 % better than over 1.7 s at depth 3."""
    state = make_state(2, 5, cost=CHEAP)
    eager = WindowGoodputDepth(window=4, interval=2, hysteresis=0.1)
    slow = WindowGoodputDepth(window=4, interval=2, hysteresis=0.2)
    for scheduler in (eager, slow):
        run(scheduler, state, make_outcome, accepted=2, rounds=4)
    assert eager.choose(state).tolist() == [2, 2]
    assert slow.choose(state).tolist() == [3, 3]


def test_a_shallower_depth_empties_the_deeper_windows(make_state: Any, make_outcome: Any) -> None:
    scheduler, state = WindowGoodputDepth(window=4, interval=2), make_state(2, 3, cost=CHEAP)
    run(scheduler, state, make_outcome, accepted=0, rounds=4)
    assert scheduler.choose(state).tolist() == [1, 1]
    # Deeper rates start afresh from the first one, which is good now.
    run(scheduler, state, make_outcome, accepted=9, rounds=4)
    assert scheduler.choose(state).tolist() == [3, 3]


def test_rounds_without_drafts_do_not_count(make_state: Any, make_outcome: Any) -> None:
    scheduler = WindowGoodputDepth(window=1, interval=1)
    state = make_state(2, 3, max_depths=np.array([0, 0]))
    run(scheduler, state, make_outcome, accepted=0, rounds=5)
    assert scheduler.choose(make_state(2, 3)).tolist() == [2, 2]


def test_no_depth_and_nobody_running_are_fine(make_state: Any) -> None:
    for scheduler in (PositionGoodputDepth(), WindowGoodputDepth()):
        assert scheduler.choose(make_state(2, 0)).tolist() == [0, 0]
        assert scheduler.choose(make_state(0)).tolist() == []


@pytest.mark.parametrize("options", [{"window": 0}, {"interval": 0}, {"hysteresis": -0.1}])
def test_bad_window_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="window and interval are 1 round or more"):
        WindowGoodputDepth(**options)


def test_a_negative_warmup_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup is a number of rounds"):
        PositionGoodputDepth(-1)
