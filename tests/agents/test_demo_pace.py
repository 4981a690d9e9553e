from __future__ import annotations

import pytest

from specdepth.agents.demo_pace import PROBED_REQUESTS, ReplayPace
from specdepth.scheduler.baselines import FixedDepth
from tests.envs.toy_trace import COST, toy_trace


@pytest.fixture
def pace() -> ReplayPace:
    pace = ReplayPace(toy_trace(), COST, (1, 4), FixedDepth(2))
    assert all(seconds > 0 for seconds in pace.request_s.values())
    pace.request_s = {1: 0.1, 4: 0.01}
    return pace


def test_time_goes_by_requests_but_a_load_serves_enough_of_them(pace: ReplayPace) -> None:
    assert pace.seconds(100) == pytest.approx(100 * 0.1 + 100 * 0.01)
    assert pace.seconds(10) == pytest.approx(10 * 0.1 + 8 * 4 * 0.01)


def test_as_many_requests_as_fit_and_never_too_few(pace: ReplayPace) -> None:
    assert pace.affordable(11.0001, most=400) == 100
    assert pace.affordable(1e6, most=400) == 400
    assert pace.affordable(0.0, most=400) == PROBED_REQUESTS
