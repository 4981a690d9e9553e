"""The two halves of a trace at any load, for advice: one to choose on, the other to judge by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints

from .load_runs import LoadRuns
from .replay_evaluate import evaluate_replay
from .replay_workloads import REQUESTS_PER_LOAD
from .rule_tuning import TrainingReplay

MIN_TOKENS = 3000
"""Output tokens that a run at a low load replays at least: rounds, and so seconds, go by them."""


def halves_of(trace: Trace) -> tuple[Ints, Ints]:
    """Rows to choose on, and others to judge by.

    Raises:
        ValueError: one half is empty.
    """
    halves = trace.rows("train"), trace.rows("held-out")
    if not all(map(len, halves)):
        raise ValueError(
            f"the trace has {len(halves[0])} requests to choose depths on and {len(halves[1])} others "
            "to judge them by (prompts are split by their text); advice needs both, so record more "
            "different prompts."
        )
    return halves


@dataclass(slots=True, kw_only=True)
class AdviceReplays:
    """Replays of either half, with as many requests as a load needs."""

    trace: Trace
    cost: CostModel
    training: Ints
    judged: Ints
    config: EngineConfig
    profile: EngineProfile
    seed: int
    tokens_per_request: float
    """On average, for how many of them a run needs. The same for traces that are compared, since those
    of the same requests differ a little where rounding decided near ties otherwise."""
    _by_load: dict[int, TrainingReplay] = field(default_factory=dict)

    def at(self, load: int) -> TrainingReplay:
        """The training half at a load."""
        if load not in self._by_load:
            self._by_load[load] = TrainingReplay(
                self.trace,
                self.cost,
                [load],
                rows=self.training,
                num_requests=self._num_requests(load),
                config=self.config,
                profile=self.profile,
                seed=self.seed,
            )
        return self._by_load[load]

    def judge(
        self, load: int, policies: Mapping[str, DepthScheduler], *, looping: bool | None = None
    ) -> LoadRuns | None:
        """Runs of the other half at a load; None with too few requests that (do not) loop."""
        rows = self.judged
        if looping is not None:
            rows = rows[self.trace.looping[rows] == looping]
        if len(rows) < load:
            return None
        rows = np.random.default_rng(self.seed).permutation(rows)[: self._num_requests(load)]
        return evaluate_replay(
            self.trace,
            self.cost,
            policies,
            [load],
            rows=rows,
            seed=self.seed,
            config=self.config,
            profile=self.profile,
            oracles=looping is None,
        ).runs[load]

    def _num_requests(self, load: int) -> int:
        # At least as many as are served anyway: other requests cost no more than the same ones again.
        enough = math.ceil(MIN_TOKENS / self.tokens_per_request)
        return max(REQUESTS_PER_LOAD * load, enough)
