from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from specdepth.agents.replay_workloads import (
    REQUESTS_PER_LOAD,
    check_loads,
    make_workloads,
    shuffled,
    sustained_rate,
)
from specdepth.decoder.arrivals import ClosedLoop, OpenLoop
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.002, overhead_s=0.001)


def workloads(*kinds: Any, loads: tuple[int, ...] = (1, 2, 4), seed: int = 0) -> Any:
    trace = make_trace(30)
    return make_workloads(trace, COST, trace.rows("held-out"), loads, kinds, seed)


def test_each_request_is_served_equally_often_and_a_load_has_enough_of_them():
    rows = np.array([3, 5, 8, 9])
    for load in (1, 2, 3, 4):
        order, repeats = shuffled(rows, load, seed=0)
        assert len(order) >= REQUESTS_PER_LOAD * load
        assert set(Counter(order).values()) == {repeats}
        assert set(order) == {3, 5, 8, 9}
    assert shuffled(rows, 4, seed=0) == shuffled(rows, 4, seed=0)
    assert shuffled(rows, 4, seed=0) != shuffled(rows, 4, seed=1)


def test_a_list_that_is_long_enough_is_served_once():
    order, repeats = shuffled(np.arange(100), 4, seed=0)
    assert repeats == 1
    assert sorted(order) == list(range(100))


def test_constant_loads_are_closed_loops():
    found = workloads("constant")
    assert [one.load for one in found] == [1, 2, 4]
    assert [one.process for one in found] == [ClosedLoop.constant(n) for n in (1, 2, 4)]


def test_a_day_goes_up_and_down_with_an_equal_share_of_the_requests_each():
    (day,) = workloads("varying")
    assert day.load == "varying"
    assert [phase.concurrency for phase in day.process.phases] == [1, 2, 4, 2]
    assert [phase.until for phase in day.process.phases] == [0.25, 0.5, 0.75, 1.0]
    assert day.process.num_requests == len(day.order)


def test_a_ramp_goes_through_every_concurrency():
    (ramp,) = workloads("ramp")
    assert [phase.concurrency for phase in ramp.process.phases] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["poisson", "bursty"])
def test_open_loops_come_at_the_rate_that_the_load_sustains(kind):
    trace = make_trace(900)
    rows = trace.rows("held-out")
    (found,) = make_workloads(trace, COST, rows, [4], [kind], seed=0)
    assert found.load == f"{kind} 4"
    assert isinstance(found.process, OpenLoop)
    rate = len(found.order) / found.process.times_s[-1]
    assert rate == pytest.approx(sustained_rate(trace, COST, rows, 4), rel=0.35)


def test_bursts_are_burstier_than_poisson():
    trace = make_trace(900)
    spread = {}
    for kind in ("poisson", "bursty"):
        (found,) = make_workloads(trace, COST, trace.rows(), [4], [kind], seed=1)
        assert isinstance(found.process, OpenLoop)
        gaps = np.diff(found.process.times_s)
        spread[kind] = gaps.std() / gaps.mean()
    assert spread["poisson"] == pytest.approx(1, rel=0.15)
    assert spread["bursty"] > 1.2


def test_the_sustained_rate_is_one_over_the_time_that_a_request_takes_of_the_machine():
    trace = make_trace(6)
    # 20 prompt tokens as part of a pass of 256, then 40 rounds, shared with one other sequence.
    prefill_s = 20 / 256 * (0.05 + 0.002 * 255)
    expected = 1 / (prefill_s + 40 * (0.05 + 0.002 + 0.001) / 2)
    assert sustained_rate(trace, COST, trace.rows(), 2) == pytest.approx(expected)


def test_kinds_can_be_put_together_and_each_comes_once():
    loads = [one.load for one in workloads("constant", "varying", "poisson", "varying")]
    assert loads == [1, 2, 4, "varying", "poisson 1", "poisson 2", "poisson 4"]


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ((), "different whole numbers"),
        ((0, 1), "at least 1"),
        ((2, 2), "different whole numbers"),
        ((4, 11), "load 11 needs at least 11 different requests, this choice .* has 10"),
    ],
)
def test_loads_that_cannot_be_made_are_refused(loads, message):
    with pytest.raises(ValueError, match=message):
        check_loads(loads, 10)


def test_unknown_arrivals_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no arrivals 'tidal'; there are constant, varying"):
        workloads("tidal")
