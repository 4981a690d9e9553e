"""Numbers and verdicts from interleaved runs of several policies: see `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.serving import ServeResult

from .intervals import CONFIDENCE, NUM_RESAMPLES, Interval
from .results import ResultRow, rows_from_metrics

OFF = "off"
MIN_REQUESTS = 4
"""Below, no interval is given: so few requests say nothing about others."""
ClockKind = Literal["wall", "cpu", "virtual"]


def machine_noise(misses: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the logarithm of a run's time that is not the policy's doing.

    Args:
        misses: for each load, log(measured over predicted time) of its runs. How far the cost model
            is off at a load as a whole does not count. What it gets wrong about single policies does,
            so the estimate errs on the large side.

    Returns:
        0 where there are too few runs to tell.
    """
    spare = sum(len(runs) - 1 for runs in misses if runs)
    squares = sum(float(((np.array(runs) - np.mean(runs)) ** 2).sum()) for runs in misses if runs)
    return math.sqrt(squares / spare) if spare else 0.0


class LoadRuns:
    """Complete blocks of one load.

    Attributes:
        policies: names.
        num_blocks: complete ones.
        metrics: by policy, over all its blocks.
        num_repeats: times that requests were served.
        noise: standard deviation of the logarithm of a run's time, from the machine alone; widens the
            intervals. A run is one block under one policy.
        makespan_s, wall_s: by policy, the sum over blocks, on the engine's clock and by the wall.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self.policies = tuple(policies)
        self.num_blocks = 0
        self.num_repeats = 0
        self.noise = 0.0
        self.metrics: dict[str, EngineMetrics] = {}
        self.makespan_s = dict.fromkeys(self.policies, 0.0)
        self.wall_s = dict.fromkeys(self.policies, 0.0)
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
            sums[at] += np.column_stack([tokens, one.request_s, one.request_wall_s])
            self._sums[name] = sums
            self.makespan_s[name] += one.makespan_s
            self.wall_s[name] += one.wall_s
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

    def throughput(self, policy: str, *, wall: bool = False, seed: int = 0) -> Interval:
        """Tokens a second of the engine's clock, or of wall time, with an interval over requests."""
        return self._estimate(policy, None, wall, seed)

    def ratio(self, policy: str, reference: str, *, wall: bool = False, seed: int = 0) -> Interval:
        """Throughput of `policy` over that of `reference`; requests are resampled in pairs."""
        return self._estimate(policy, reference, wall, seed)

    def _estimate(self, policy: str, reference: str | None, wall: bool, seed: int) -> Interval:
        column = 2 if wall else 1

        if policy == reference:
            return Interval(1.0, 1.0, 1.0)

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
        num_runs = self.num_blocks / (1 if reference is None else 2)
        samples *= np.exp(self.noise / math.sqrt(num_runs) * rng.standard_normal(NUM_RESAMPLES))
        low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Interval(estimate, float(low), float(high))


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Policies on the same requests at several loads."""

    runs: dict[int, LoadRuns]
    """By load, those with at least one complete block."""
    clock: ClockKind = "wall"
    """What the engine's clock told: wall time, CPU time of the thread that does all the work, or what
    a cost model says."""
    same_text: bool = True
    """Whether the text is the same under every policy but for rounding: greedy or coupled decoding."""
    has_noise: bool = False
    """Whether `LoadRuns.noise` was estimated."""
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    """What was done, and what a reader should know."""

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
        """The fixed depth, "off" included, that was fastest in these very runs.

        Chosen on the runs that it is judged by, so it flatters the fixed depths a little.

        Raises:
            ValueError: no fixed depth was run.
        """
        run, names = self.runs[load], self.fixed_depths
        if not names:
            raise ValueError("no fixed depth was run, so there is no best one.")
        return max(names, key=lambda name: run.throughput(name).value)

    def describe(self) -> list[str]:
        """What was measured, and how far to trust it, in sentences."""
        parts = []
        for load, run in self.runs.items():
            times = f" x {run.num_repeats}" if run.num_repeats > 1 else ""
            few = " (too few for intervals)" if run.num_requests < MIN_REQUESTS else ""
            parts.append(f"{run.num_requests}{times} at load {load}{few}")
        if not parts:
            return ["No block of requests was completed."]
        noise = max(run.noise for run in self.runs.values())
        covered = (
            f"over requests and the noise of the machine (about {noise:.0%} of a run's time)"
            if self.has_noise
            else "over requests and do not cover the noise of the machine"
        )
        notes = [
            f"Each policy served the same requests, interleaved: {', '.join(parts)}. Intervals are "
            f"{covered}."
        ]
        if self.clock == "cpu":
            waits = [
                run.wall_s[name] / max(run.makespan_s[name], 1e-12)
                for run in self.runs.values()
                for name in run.policies
            ]
            notes.append(
                "Times are CPU time of the one thread that does the work, which is wall time on a "
                f"quiet machine; on this one, runs took {min(waits):.2f} to {max(waits):.2f} times "
                "as long by the wall."
            )
        if self.clock == "virtual":
            notes.append("Times are what the cost model says, not measured.")
        shares = [
            run.share_of_different_texts(name)
            for run in self.runs.values()
            for name in run.policies
            if OFF in run.policies
        ]
        if not self.same_text:
            notes.append(
                "Under rejection sampling every policy draws a text of its own, so their work is "
                'equal on average only; verification "coupled" makes it the same.'
            )
        elif any(shares):
            notes.append(
                f"Up to {max(shares):.0%} of a policy's answers differ from those without "
                "speculation: passes of other sizes round near ties otherwise (in float32 they "
                "hardly do)."
            )
        return notes

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
        # What is known better here: tokens over the makespan, the end of each block included.
        skipped = ("throughput_tok_s", "span_s")
        rows = [
            row for row in rows_from_metrics(policy, load, metrics) if row.metric not in skipped
        ]

        def add(metric: str, estimate: Interval | float, unit: str) -> None:
            low = high = None
            if isinstance(estimate, Interval):
                low, high = estimate.bounds
                estimate = estimate.value
            rows.append(
                ResultRow(
                    policy=policy,
                    load=load,
                    metric=metric,
                    value=float(estimate),
                    unit=unit,
                    ci_low=low,
                    ci_high=high,
                )
            )

        add("throughput_tok_s", run.throughput(policy), "tok/s")
        add("throughput_wall_tok_s", run.throughput(policy, wall=True), "tok/s")
        add("makespan_s", run.makespan_s[policy], "s")
        add("wall_s", run.wall_s[policy], "s")
        add("policy_ms", 1e3 * metrics.schedule_s / max(metrics.num_rounds, 1), "ms")
        add("mean_in_flight", run.mean_in_flight(policy), "requests")
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
            add("speedup_wall", run.ratio(policy, OFF, wall=True), "x")
            add("different_text_share", run.share_of_different_texts(policy), "share")
        return rows
