"""How one policy decided in a replay: depth by what a sequence showed, and a timeline of rounds.

A comparison keeps sums only. Replay gives the same rounds again, so the policies that a report is
about are simply run once more with somebody watching.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.metrics import EngineMetrics, RoundRow
from specdepth.decoder.replay import ReplayDecoder, prices_for
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import Workload
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import DrafterKind, Floats, Ints, RoundOutcome, RoundState

from .comparison import Comparison
from .replay_workloads import ArrivalKind, ReplayWorkload, make_workloads
from .results import ResultRow, Series

SURVIVAL_STEP = 20
"""Percent of estimated survival in a line of the map."""
MAX_MATCH = 31
"""Longer matches count as this long."""
TIME_BINS = 120
"""Points of a timeline."""
QUANTITIES = {
    "batch": "sequences in the batch",
    "kv": "KV cache in use (tokens)",
    "depth": "mean depth (tokens)",
}
"""Curves of a timeline, with the label of their axis."""

Signal = Literal["match", "survival"]
"""What a sequence shows before it drafts: the length of its n-gram match, or, with a draft model, the
chance that its first token is accepted, in percent."""


class DecisionLog:
    """A scheduler that passes everything on, and counts how deep sequences drafted by what they showed.

    Sequences that showed nothing on offer, and preempted ones, had no choice and are left out.

    Args:
        scheduler: decides.
        drafter: says which signal there is.
    """

    def __init__(self, scheduler: DepthScheduler, drafter: DrafterKind) -> None:
        self._scheduler = scheduler
        self._estimator = ConfidenceSurvival() if drafter == "draft-model" else None
        self.signal: Signal = "match" if self._estimator is None else "survival"
        self._bins: Ints = np.zeros(0, np.int64)
        self._offered = np.zeros(0, np.bool_)
        self._rounds: Ints = np.zeros(MAX_MATCH + 1, np.int64)
        self._tokens: Floats = np.zeros(MAX_MATCH + 1)

    def __getattr__(self, name: str) -> Any:
        # The optional parts of a scheduler are there if its own are: lawful_under, trim, reset.
        if name == "_scheduler":  # not set yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def choose(self, state: RoundState) -> Ints:
        """The scheduler's depths."""
        if self._estimator is None:
            self._bins = np.minimum(state.match_length, MAX_MATCH)
        else:
            percent = 100 * self._estimator.survival(state)[:, 0]
            self._bins = np.minimum(percent // SURVIVAL_STEP, 100 // SURVIVAL_STEP - 1).astype(
                np.int64
            )
        self._offered = state.max_depths > 0
        return self._scheduler.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Count what was drafted."""
        chose = self._offered & ~outcome.preempted
        bins = self._bins[chose]
        self._rounds += np.bincount(bins, minlength=MAX_MATCH + 1)
        self._tokens += np.bincount(bins, outcome.num_drafted[chose], MAX_MATCH + 1)
        if self._estimator is not None:
            self._estimator.observe(outcome)
        self._scheduler.observe(outcome)

    def rows(self, policy: str, load: int | str) -> list[ResultRow]:
        """Mean depth and rounds of a sequence, for each value of the signal that occurred.

        Returns:
            `depth_at_match_N` and `rounds_at_match_N`, or `..._at_survival_P` with the lower end in
            percent.
        """
        step = 1 if self.signal == "match" else SURVIVAL_STEP
        rows = []
        for b in np.flatnonzero(self._rounds).tolist():
            where, count = f"at_{self.signal}_{b * step}", float(self._rounds[b])
            values = ((f"depth_{where}", self._tokens[b] / count), (f"rounds_{where}", count))
            rows += [
                ResultRow(
                    policy=policy,
                    load=load,
                    metric=metric,
                    value=float(value),
                    unit="tokens" if metric.startswith("depth") else "",
                )
                for metric, value in values
            ]
        return rows


@dataclass(slots=True)
class Recorded:
    """What watching gave, for a results file."""

    rows: list[ResultRow] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    """Timelines, by `timeline_name`."""


def record_decisions(
    trace: Trace,
    cost: CostModel,
    policies: Mapping[str, DepthScheduler],
    loads: Sequence[int],
    *,
    arrivals: Sequence[ArrivalKind],
    rows: Ints,
    seed: int,
    config: EngineConfig,
    profile: EngineProfile,
) -> Recorded:
    """Replay the rounds of `evaluate_replay`, given the same arguments, once more and watch.

    The first policy is watched at every load. All of them get a timeline of the first load that
    varies, or of a day of all loads where none does. Decisions take no time on the clock.

    Raises:
        ValueError: as `evaluate_replay`.
    """
    cost = prices_for(trace, cost)
    workloads = make_workloads(trace, cost, rows, loads, arrivals, seed)
    decoder = ReplayDecoder(trace, cost, config, profile)
    found = Recorded()
    first = next(iter(policies))
    for workload in workloads:
        log = DecisionLog(policies[first], trace.info.drafter)
        _serve(decoder, workload, log)
        found.rows += log.rows(first, workload.load)
    varying = [workload for workload in workloads if isinstance(workload.load, str)]
    day = varying or make_workloads(trace, cost, rows, loads, ["varying"], seed)
    pool = decoder.engine.pool
    pool_tokens = pool.num_blocks * pool.block_size
    for name, policy in policies.items():
        rounds = _serve(decoder, day[0], policy).metrics.rounds
        curves = timeline(rounds, pool_tokens)
        for quantity, series in curves.items():
            found.series[timeline_name(day[0].load, quantity, name)] = series
    return found


def timeline_name(load: int | str, quantity: str, policy: str) -> str:
    """Name of a curve among the series of a results file."""
    return f"timeline|{load}|{quantity}|{policy}"


def timeline(
    rounds: Sequence[RoundRow], pool_tokens: int, num_bins: int = TIME_BINS
) -> dict[str, Series]:
    """Means over equal stretches of time, by the names of `QUANTITIES`.

    Batch and KV use are means over time, idle waits included as 0; depth is drafted tokens over rounds
    of a sequence, and stretches without any are left out of it.

    Args:
        rounds: in order; none gives no curves.
        pool_tokens: tokens that the whole KV pool holds.
        num_bins: stretches.
    """
    if not rounds:
        return {}
    starts = np.array([row.start_s for row in rounds])
    parts = [(row.draft_s, row.verify_s, row.schedule_s, row.other_s) for row in rounds]
    ends = starts + np.array(parts).sum(axis=1)
    starts, ends = starts - starts[0], ends - starts[0]
    edges = np.linspace(0.0, ends[-1], num_bins + 1)
    running = np.array([row.num_running for row in rounds], np.float64)
    kv_tokens = pool_tokens * np.array([row.kv_used_fraction for row in rounds])
    drafted = np.array([row.num_drafted for row in rounds], np.float64)
    middles = (edges[:-1] + edges[1:]) / 2
    width = ends[-1] / num_bins

    def over_time(values: Floats) -> Floats:
        """Mean in each stretch; the integral of a step function is linear inside each round."""
        integral = np.concatenate([[0.0], np.cumsum(values * (ends - starts))])
        knots = np.stack([starts, ends], axis=1).ravel()
        levels = np.stack([integral[:-1], integral[1:]], axis=1).ravel()
        return np.asarray(np.diff(np.interp(edges, knots, levels)) / width, np.float64)

    bins = np.minimum(((starts + ends) / 2 / width).astype(np.int64), num_bins - 1)
    sequence_rounds = np.bincount(bins, running, num_bins)
    some = sequence_rounds > 0
    depth = np.bincount(bins, drafted, num_bins)[some] / sequence_rounds[some]
    curves = {
        "batch": (middles, over_time(running)),
        "kv": (middles, over_time(kv_tokens)),
        "depth": (middles[some], depth),
    }
    return {
        name: Series(
            x=tuple(x.tolist()), y=tuple(y.tolist()), x_label="time (s)", y_label=QUANTITIES[name]
        )
        for name, (x, y) in curves.items()
    }


def acceptance_rows(comparison: Comparison, policies: Sequence[str]) -> list[ResultRow]:
    """`acceptance_at_depth_K`: accepted over drafted tokens in rounds of each depth that occurred."""
    return [
        ResultRow(
            policy=policy,
            load=load,
            metric=f"acceptance_at_depth_{depth}",
            value=float(share),
            unit="share",
        )
        for load, run in comparison.runs.items()
        for policy in dict.fromkeys(policies)
        if policy in run.policies
        for depth, share in enumerate(run.metrics[policy].acceptance_by_depth, 1)
        if not np.isnan(share)
    ]


def _serve(
    decoder: ReplayDecoder, workload: ReplayWorkload, scheduler: DepthScheduler
) -> ServeResult:
    reset = getattr(scheduler, "reset", None)
    if reset is not None:
        reset()
    decoder.engine.round_index = 0
    work = Workload(requests=decoder.requests(np.array(workload.order)), process=workload.process)
    metrics = EngineMetrics(decoder.config.max_num_speculative_tokens, keep_rounds=True)
    return serve(decoder.engine, work, scheduler, metrics=metrics)
