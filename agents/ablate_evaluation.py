"""What every policy of a grid is judged by: held-out requests of a trace, replayed at several loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost
from specdepth.scheduler.state import Ints

from .replay_engines import content_sha256
from .replay_evaluate import evaluate_replay
from .results import ResultRow

METRICS = (
    *("throughput_tok_s", "mean_depth", "acceptance_length", "tpot_p50_ms", "tpot_p99_ms"),
    "preemptions",
)
"""What is kept of a policy at each load. All of it is exact and comes out the same on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out requests, at constant loads and over a day of all of them."""

    trace: str
    cost: Path
    loads: tuple[int, ...]
    num_requests: int | None
    seed: int
    """Of the order of the requests."""
    engine: EngineConfig

    def rows(self, schedulers: Sequence[str]) -> tuple[ResultRow, ...]:
        """Replay the requests under each scheduler, by name or folder of a policy.

        Raises:
            ValueError: an unknown scheduler, one that does not fit the trace, or too few requests.
        """
        trace, cost = load_trace(self.trace), load_cost(self.cost)
        policies = {
            name: make_scheduler(
                name,
                model_pair=trace.info.model_pair,
                drafter=trace.info.drafter,
                max_num_speculative_tokens=self.engine.max_num_speculative_tokens,
            )
            for name in schedulers
        }
        found = evaluate_replay(
            trace,
            cost,
            policies,
            self.loads,
            arrivals=("constant", "varying"),
            rows=self.requests(trace),
            seed=self.seed,
            config=self.engine,
            oracles=False,
        )
        return tuple(
            replace(row, ci_low=None, ci_high=None) for row in found.rows() if row.metric in METRICS
        )

    def requests(self, trace: Trace) -> Ints:
        """Rows of the trace; of fewer than all of them, evenly spaced ones."""
        rows = trace.rows("held-out")
        if self.num_requests is None or self.num_requests >= len(rows):
            return rows
        return rows[np.linspace(0, len(rows) - 1, self.num_requests).round().astype(np.int64)]

    def settings(self, trace: Trace, cost: CostModel) -> dict[str, Any]:
        """What results depend on, as JSON values; files by their content."""
        settings = asdict(self) | {
            "trace": content_sha256(trace),
            "cost": content_sha256(cost),
        }
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain
