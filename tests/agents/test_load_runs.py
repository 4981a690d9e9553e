from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.load_runs import LoadRuns, load_name
from tests.agents.test_comparison import runs, served


def test_a_request_that_is_served_twice_in_a_block_counts_twice():
    found = LoadRuns(("off",))
    found.add([5, 6, 5], 1, {"off": served([10, 20, 10], [1.0, 2.0, 3.0])})
    assert found.sums("off") == {5: (20, 4.0), 6: (20, 2.0)}
    assert found.num_requests == 2
    assert found.throughput("off").value == pytest.approx(40 / 6)


def test_the_share_of_a_gap_is_that_of_throughputs():
    found = LoadRuns(("off", "fixed:2", "oracle"))
    count = [10] * 6
    times = {"off": [4.0] * 6, "fixed:2": [2.0] * 6, "oracle": [1.0] * 6}
    found.add(range(6), 0, {name: served(count, seconds) for name, seconds in times.items()})
    # 2.5, 5 and 10 tokens a second, the same for each request.
    closed = found.gap_closed("fixed:2", "off", "oracle")
    assert closed == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert found.gap_closed("oracle", "off", "oracle").value == 1
    assert found.gap_closed("off", "fixed:2", "oracle").value == pytest.approx(-0.5)


def test_the_interval_of_a_gap_covers_unequal_requests():
    found = LoadRuns(("off", "fixed:2", "oracle"))
    count = [10] * 6
    times = {"off": [4.0] * 6, "fixed:2": [4.0, 2.0] * 3, "oracle": [2.0, 1.0] * 3}
    found.add(range(6), 0, {name: served(count, seconds) for name, seconds in times.items()})
    closed = found.gap_closed("fixed:2", "off", "oracle")
    assert closed.low < closed.value < closed.high


def test_resampling_weighs_requests_as_drawing_them_does():
    found = runs([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    drawn = np.random.default_rng(0).integers(5, size=(10_000, 5))
    rates = 50 / np.array([1.0, 2.0, 3.0, 4.0, 5.0])[drawn].sum(-1)
    low, high = np.quantile(rates, [0.025, 0.975])
    assert found.throughput("off").bounds == pytest.approx((low, high))


def test_an_alias_is_the_same_policy_under_another_name():
    found = runs([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    found.add_alias("best", "fixed:2")
    assert found.policies == ("off", "fixed:2", "best")
    assert found.ratio("best", "fixed:2").value == 1
    assert found.ratio("best", "off") == found.ratio("fixed:2", "off")
    assert found.metrics["best"] is found.metrics["fixed:2"]
    assert found.mean_in_flight("best") == found.mean_in_flight("fixed:2")
    assert found.share_of_different_texts("best") == 0


def test_decision_time_is_the_engines_unless_its_clock_stood_still():
    found = runs([1.0] * 4, [1.0] * 4)
    metrics = found.metrics["fixed:2"]
    metrics.num_rounds, metrics.schedule_s = 10, 0.02
    assert found.policy_ms("fixed:2") == pytest.approx(2)
    found.decision_s["fixed:2"] = 0.05
    assert found.policy_ms("fixed:2") == pytest.approx(5)


def test_loads_have_names():
    assert load_name(4) == "load 4"
    assert load_name("varying") == "varying"


def test_a_gap_that_some_requests_do_not_show_has_no_interval():
    found = LoadRuns(("off", "oracle"))
    times = {"off": [1.0] * 6, "oracle": [0.5, 1.5, 0.5, 1.5, 0.5, 0.5]}
    found.add(range(6), 0, {name: served([10] * 6, seconds) for name, seconds in times.items()})
    closed = found.gap_closed("oracle", "off", "oracle")
    assert closed.value == 1
    assert closed.bounds == (None, None)
