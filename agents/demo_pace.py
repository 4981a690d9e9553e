"""How fast replay is here, so that the demo does no more of it than there is time for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler

from .replay_workloads import REQUESTS_PER_LOAD
from .rule_tuning import TrainingReplay

PROBED_REQUESTS = 16
"""Requests of the runs that are timed; fewer are never compared either."""


class ReplayPace:
    """Wall time of serving requests in replay, by a short run at each load.

    Args:
        trace: whose training requests are served.
        cost: prices of the machine.
        loads: concurrent requests.
        scheduler: to time.
        config: of the engine; None has as many slots as the highest load.

    Attributes:
        request_s: seconds a request, by load.
    """

    def __init__(
        self,
        trace: Trace,
        cost: CostModel,
        loads: Sequence[int],
        scheduler: DepthScheduler,
        config: EngineConfig | None = None,
    ) -> None:
        training = TrainingReplay(trace, cost, loads, num_requests=PROBED_REQUESTS, config=config)
        self.request_s: dict[int, float] = {}
        for load in loads:
            before_s = time.perf_counter()
            training.throughput(scheduler, load)
            took_s = time.perf_counter() - before_s
            self.request_s[load] = took_s / _served(PROBED_REQUESTS, load)

    def seconds(self, num_requests: int) -> float:
        """Of serving so many different requests at each of the loads."""
        return sum(_served(num_requests, load) * one for load, one in self.request_s.items())

    def affordable(self, seconds: float, most: int) -> int:
        """Different requests, up to `most`, that can be served at all loads in so many seconds."""
        counts = range(most, PROBED_REQUESTS, -1)
        return next((count for count in counts if self.seconds(count) <= seconds), PROBED_REQUESTS)


def _served(num_requests: int, load: int) -> int:
    """About as many as `shuffled` makes of them."""
    return max(num_requests, REQUESTS_PER_LOAD * load)
