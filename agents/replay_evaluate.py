"""Comparison of policies in replay: a recorded trace, a virtual clock, and oracles.

Every policy serves the same requests in the same order, so differences are exact for them; only time
is modelled. `comparison.py` makes numbers of it, as of a live comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.oracles import HindsightDepths, HindsightUniformDepth
from specdepth.decoder.replay import ReplayDecoder, prices_for
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import Workload
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .comparison import Comparison, LoadRuns
from .replay_workloads import ArrivalKind, make_workloads

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0..1, and what is going on."""

ORACLE = "oracle:hindsight"
"""Best depths of each round within the true runs."""
ONE_DEPTH_ORACLE = "oracle:one-depth"
"""Best single depth of each round for the whole batch."""
BEST_FIXED = "oracle:best-fixed"
"""The fixed depth that was best at this load."""


def evaluate_replay(
    trace: Trace,
    cost: CostModel,
    policies: Mapping[str, DepthScheduler],
    loads: Sequence[int],
    *,
    arrivals: Sequence[ArrivalKind] = ("constant",),
    rows: Ints | None = None,
    seed: int = 0,
    orders: int = 1,
    config: EngineConfig | None = None,
    profile: EngineProfile | None = None,
    oracles: bool = True,
    charge_decisions: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Serve the same requests under each policy and load, on the virtual clock.

    Policies forget between loads what they learned (`reset`).

    Args:
        trace: recorded outcomes.
        cost: prices of the machine.
        policies: by name; "off" and "fixed:K" are what others are compared with.
        loads: concurrent requests; see `ArrivalKind` for what each kind of arrivals makes of them.
        arrivals: kinds of arrivals.
        rows: of the trace; the held-out requests by default.
        seed: of order and arrival times.
        orders: serve all of it so often, each time in another order, and count it together: who runs
            beside whom is luck, and more orders even it out.
        config: of the engine; None has as many slots as the highest load, or 32.
        profile: how the engine differs from ours; ours by default.
        oracles: add `ORACLE`, `ONE_DEPTH_ORACLE` and, if there are fixed depths, `BEST_FIXED`.
        charge_decisions: let the virtual clock run on for the wall time of decisions.
        progress: called after each run.

    Raises:
        ValueError: no policy, one with the name of an oracle, bad loads, arrivals or orders, a K that
            was not recorded, or a policy that does not fit the trace.
    """
    if not policies:
        raise ValueError("evaluation needs at least one policy.")
    if orders < 1:
        raise ValueError(f"orders must be at least 1, got {orders}.")
    rows = trace.rows("held-out") if rows is None else rows
    if not len(rows):
        raise ValueError("this choice of the trace holds no request; choose another split or kind.")
    cost = prices_for(trace, cost)
    workloads = [
        workload
        for order in range(orders)
        for workload in make_workloads(trace, cost, rows, loads, arrivals, seed + order)
    ]
    decoder = ReplayDecoder(trace, cost, _config(trace, config, loads), profile)
    chosen = dict(policies)
    if oracles:
        reserved = sorted({ORACLE, ONE_DEPTH_ORACLE, BEST_FIXED} & set(chosen))
        if reserved:
            raise ValueError(f"{reserved[0]} is the name of an oracle; choose another name.")
        chosen[ORACLE] = HindsightDepths(decoder.engine)
        chosen[ONE_DEPTH_ORACLE] = HindsightUniformDepth(decoder.engine)
    runs: dict[int | str, LoadRuns] = {}
    largest_pass = 0
    for number, workload in enumerate(workloads):
        run = runs.setdefault(workload.load, LoadRuns(tuple(chosen)))
        requests = decoder.requests(np.array(workload.order))
        work = Workload(requests=requests, process=workload.process)
        served: dict[str, ServeResult] = {}
        for name, policy in chosen.items():
            timed = _Timed(policy, decoder, charge=charge_decisions)
            served[name], largest = _serve(decoder, work, timed, run.metrics.get(name))
            run.decision_s[name] = run.decision_s.get(name, 0.0) + timed.seconds
            largest_pass = max(largest_pass, largest)
            if progress is not None:
                done = number + len(served) / len(chosen)
                progress(done / len(workloads), f"load {workload.load}, {name}")
        run.add(workload.order, run.num_repeats + workload.num_repeats - 1, served)
    found = Comparison(runs=runs, clock="virtual")
    if oracles and found.fixed_depths:
        for load, run in runs.items():
            run.add_alias(BEST_FIXED, found.best_fixed(load))
    found.notes = found.describe()
    if (extrapolated := cost.extrapolation(largest_pass)) is not None:
        found.notes.append(extrapolated)
    return found


def _config(trace: Trace, config: EngineConfig | None, loads: Sequence[int]) -> EngineConfig:
    if config is None:
        top = trace.info.max_num_speculative_tokens
        config = EngineConfig(max_num_speculative_tokens=top)
        return replace(config, max_num_seqs=max(config.max_num_seqs, *loads))
    if max(loads) > config.max_num_seqs:
        raise ValueError(
            f"load {max(loads)} is outside 1..{config.max_num_seqs} (max_num_seqs); raise that or "
            "lower the load."
        )
    return config


def _serve(
    decoder: ReplayDecoder,
    workload: Workload,
    scheduler: DepthScheduler,
    metrics: EngineMetrics | None,
) -> tuple[ServeResult, int]:
    """Return what it gave, counting on in `metrics`, and the tokens of its largest pass."""
    largest = 0

    def note(outcome: RoundOutcome) -> None:
        nonlocal largest
        largest = max(largest, outcome.num_pass_tokens)

    decoder.engine.round_index = 0  # schedulers may see it, and all of them start alike
    served = serve(decoder.engine, workload, scheduler, on_round=note, metrics=metrics)
    return served, largest


class _Timed:
    """A scheduler at the start of a workload, with the wall time of its decisions."""

    def __init__(self, scheduler: DepthScheduler, decoder: ReplayDecoder, *, charge: bool) -> None:
        reset = getattr(scheduler, "reset", None)
        if reset is not None:
            reset()
        self._clock = decoder.engine.clock if charge else None
        self.seconds = 0.0
        self.choose: Callable[[RoundState], Ints] = self._timed(scheduler.choose)
        self.observe: Callable[[RoundOutcome], None] = self._timed(scheduler.observe)
        if hasattr(scheduler, "lawful_under"):
            self.lawful_under = scheduler.lawful_under
        for name in ("keep_drafting", "trim"):
            if (method := getattr(scheduler, name, None)) is not None:
                setattr(self, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            before_s = time.perf_counter()
            result = method(*arguments)
            took_s = time.perf_counter() - before_s
            self.seconds += took_s
            if self._clock is not None:
                self._clock.wait_until(self._clock.now() + took_s)
            return result

        return run
