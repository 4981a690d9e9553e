"""Numbers and verdicts from interleaved runs of several policies: see `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.serving import ServeResult
from specdepth.scheduler.baselines import TableDepth
from specdepth.scheduler.baselines.table import OPEN_END

from .intervals import CONFIDENCE, NUM_RESAMPLES, Interval, geometric_mean
from .results import ResultRow, rows_from_metrics

OFF = "off"
MIN_REQUESTS = 4
"""Below, no interval is given: so few requests say nothing about others."""
BUSY_MACHINE = 1.1
"""Ratio between the largest and the smallest wait for a core that readers are told of."""


class LoadRuns:
    """Complete blocks of one load.

    Attributes:
        policies: names.
        num_blocks: complete ones.
        metrics: by policy, over all its blocks.
        makespan_s, cpu_s: by policy, the sum over blocks.
        requests: indices of the requests, in the order of the rows below.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self.policies = tuple(policies)
        self.num_blocks = 0
        self.num_repeats = 0
        self.metrics: dict[str, EngineMetrics] = {}
        self.makespan_s = dict.fromkeys(self.policies, 0.0)
        self.cpu_s = dict.fromkeys(self.policies, 0.0)
        self._in_flight_s = dict.fromkeys(self.policies, 0.0)
        self._texts: dict[str, list[list[int]]] = {name: [] for name in self.policies}
        self._rows: dict[int, int] = {}
        self._sums: dict[str, NDArray[np.float64]] = {
            name: np.zeros((0, 3)) for name in self.policies
        }

    def add(self, block: Sequence[int], repeat: int, served: Mapping[str, ServeResult]) -> None:
        """Take in what each policy made of the requests `block`.

        Args:
            block: indices of requests.
            repeat: how often they were served before.
            served: by policy, with metrics that include all earlier blocks.
        """
        self.num_blocks += 1
        self.num_repeats = max(self.num_repeats, repeat + 1)
        for index in block:
            self._rows.setdefault(index, len(self._rows))
        at = [self._rows[index] for index in block]
        for name, one in served.items():
            missing = len(self._rows) - len(self._sums[name])
            sums = np.concatenate([self._sums[name], np.zeros((missing, 3))])
            tokens = [len(result.token_ids) for result in one.results]
            sums[at] += np.column_stack([tokens, one.request_s, one.request_cpu_s])
            self._sums[name] = sums
            self.makespan_s[name] += one.makespan_s
            self.cpu_s[name] += one.cpu_s
            self._in_flight_s[name] += one.mean_in_flight * one.makespan_s
            self._texts[name] += [result.token_ids for result in one.results]
            self.metrics[name] = one.metrics

    @property
    def num_requests(self) -> int:
        """Different requests."""
        return len(self._rows)

    def mean_in_flight(self, policy: str) -> float:
        """Requests in the engine, averaged over time."""
        return self._in_flight_s[policy] / self.makespan_s[policy]

    def share_of_different_texts(self, policy: str, reference: str = OFF) -> float:
        """Share of answers that differ from those of `reference`: rounding, where decoding is exact."""
        pairs = list(zip(self._texts[policy], self._texts[reference], strict=True))
        return sum(a != b for a, b in pairs) / len(pairs)

    def throughput(self, policy: str, *, cpu: bool = False, seed: int = 0) -> Interval:
        """Tokens a second of makespan, or of CPU time, with an interval over requests."""
        return self._estimate(policy, None, cpu, seed)

    def ratio(self, policy: str, reference: str, *, cpu: bool = False, seed: int = 0) -> Interval:
        """Throughput of `policy` over that of `reference`; requests are resampled in pairs."""
        return self._estimate(policy, reference, cpu, seed)

    def _estimate(self, policy: str, reference: str | None, cpu: bool, seed: int) -> Interval:
        column = 2 if cpu else 1

        def value(index: NDArray[np.int64]) -> NDArray[np.float64]:
            mine = self._sums[policy][index]
            rate = mine[..., 0].sum(-1) / np.maximum(mine[..., column].sum(-1), 1e-12)
            if reference is None:
                return np.asarray(rate)
            theirs = self._sums[reference][index]
            base = theirs[..., 0].sum(-1) / np.maximum(theirs[..., column].sum(-1), 1e-12)
            return np.asarray(rate / base)

        count = self.num_requests
        estimate = float(value(np.arange(count)))
        if count < MIN_REQUESTS:
            return Interval(estimate, math.nan, math.nan)
        rng = np.random.default_rng(seed)
        samples = value(rng.integers(count, size=(NUM_RESAMPLES, count)))
        low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Interval(estimate, float(low), float(high))


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Policies on the same requests at several loads."""

    runs: dict[int, LoadRuns]
    """By load, those with at least one complete block."""
    has_cpu_time: bool = False
    """Whether the CPU time of the thread is the whole work."""
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """What was done, and what a reader should know."""

    @property
    def what_was_done(self) -> str:
        """Requests and repeats by load, in a sentence."""
        parts = []
        for load, run in self.runs.items():
            times = f" x {run.num_repeats}" if run.num_repeats > 1 else ""
            few = ", too few for intervals" if run.num_requests < MIN_REQUESTS else ""
            parts.append(f"{run.num_requests}{times} at load {load}{few}")
        if not parts:
            return "No block of requests was completed."
        return (
            "Requests that each policy served, interleaved: "
            + "; ".join(parts)
            + ". Intervals are over requests and do not cover the noise of the machine."
        )

    def machine_noise(self) -> list[str]:
        """A sentence if others used the machine unevenly; CPU time tells."""
        if not self.has_cpu_time:
            return []
        waits = [
            run.makespan_s[name] / max(run.cpu_s[name], 1e-12)
            for run in self.runs.values()
            for name in run.policies
        ]
        if not waits or max(waits) < BUSY_MACHINE * min(waits):
            return []
        return [
            f"The machine was busy with other things: runs took {min(waits):.2f} to "
            f"{max(waits):.2f} times their CPU time. Trust CPU time here, and repeat on a quiet "
            "machine for wall time."
        ]

    @property
    def loads(self) -> list[int]:
        """Loads with results, ascending."""
        return sorted(self.runs)

    @property
    def policies(self) -> list[str]:
        """Names, in the order given."""
        names = [name for run in self.runs.values() for name in run.policies]
        return list(dict.fromkeys(names))

    @property
    def fixed_depths(self) -> dict[str, int]:
        """Depth of each policy that is one: "off" and "fixed:K"."""
        found = {}
        for name in self.policies:
            if name == OFF:
                found[name] = 0
            elif name.startswith("fixed:"):
                found[name] = int(name.removeprefix("fixed:"))
        return found

    def best_fixed(self, load: int) -> str:
        """The fixed depth, "off" included, that was fastest in these very runs, by CPU time if known.

        Chosen on the runs that it is judged by, so it flatters the fixed depths a little.

        Raises:
            ValueError: no fixed depth was run.
        """
        run = self.runs[load]
        return self._best(lambda name: self._rate(run, name))

    def best_single_fixed(self) -> str:
        """The fixed depth with the highest geometric mean of throughput over loads."""
        return self._best(
            lambda name: geometric_mean([self._rate(run, name) for run in self.runs.values()])
        )

    def tuned_table(self) -> TableDepth:
        """The batch-size table that takes the best fixed depth of each load.

        A depth holds from its load to halfway (on a log scale) to the next.
        """
        loads = self.loads
        depths = [self.fixed_depths[self.best_fixed(load)] for load in loads]
        ends = [max(int(math.sqrt(a * b)), a) for a, b in pairwise(loads)]
        lows, highs = [1, *(end + 1 for end in ends)], [*ends, OPEN_END]
        return TableDepth(list(zip(lows, highs, depths, strict=True)))

    def rows(self, *, best_single: str | None = None, table: str | None = None) -> list[ResultRow]:
        """A flat row for each number, with intervals where requests give one.

        Args:
            best_single: name of the best single fixed depth, chosen elsewhere, for a ratio to it.
            table: name of the tuned table among the policies, for a ratio to it.
        """
        return [
            row
            for load in self.loads
            for policy in self.runs[load].policies
            for row in self._rows(policy, load, best_single, table)
        ]

    def _rows(
        self, policy: str, load: int, best_single: str | None, table: str | None
    ) -> list[ResultRow]:
        run = self.runs[load]
        metrics = run.metrics[policy]
        # What `comparison` knows better: over blocks, and with the idle end of each left in.
        skipped = ("throughput_tok_s", "span_s")
        rows = [
            row for row in rows_from_metrics(policy, load, metrics) if row.metric not in skipped
        ]

        def add(metric: str, value: float | Interval, unit: str) -> None:
            if isinstance(value, Interval):
                low, high = value.bounds
                value = value.value
            else:
                low = high = None
            rows.append(
                ResultRow(
                    policy=policy,
                    load=load,
                    metric=metric,
                    value=float(value),
                    unit=unit,
                    ci_low=low,
                    ci_high=high,
                )
            )

        add("throughput_tok_s", run.throughput(policy), "tok/s")
        add("makespan_s", run.makespan_s[policy], "s")
        add("policy_ms", 1e3 * metrics.schedule_s / max(metrics.num_rounds, 1), "ms")
        add("mean_in_flight", run.mean_in_flight(policy), "requests")
        if self.has_cpu_time:
            add("throughput_cpu_tok_s", run.throughput(policy, cpu=True), "tok/s")
            add("cpu_s", run.cpu_s[policy], "s")
        references = {"speedup": OFF}
        if self.fixed_depths:
            references["ratio_to_best_fixed"] = self.best_fixed(load)
        if best_single is not None:
            references["ratio_to_best_single_fixed"] = best_single
        if table is not None:
            references["ratio_to_table"] = table
        for metric, reference in references.items():
            if reference in run.policies:
                add(metric, run.ratio(policy, reference), "x")
        if OFF in run.policies:
            if self.has_cpu_time:
                add("speedup_cpu", run.ratio(policy, OFF, cpu=True), "x")
            add("different_text_share", run.share_of_different_texts(policy), "share")
        return rows

    def _best(self, score: Callable[[str], float]) -> str:
        names = self.fixed_depths
        if not names:
            raise ValueError("no fixed depth was run, so there is no best one.")
        return max(names, key=score)

    def _rate(self, run: LoadRuns, policy: str) -> float:
        return run.throughput(policy, cpu=self.has_cpu_time).value
