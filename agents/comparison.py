"""Numbers and verdicts from interleaved runs of several policies: see `evaluate`, `evaluate_replay`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .intervals import Interval
from .load_runs import MIN_REQUESTS as MIN_REQUESTS
from .load_runs import OFF as OFF
from .load_runs import LoadRuns as LoadRuns
from .load_runs import load_name
from .results import ResultRow, rows_from_metrics

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


def paired_noise(misses: Sequence[Sequence[float]]) -> float:
    """The same from blocks in which all policies run: what they share in a block does not count, since it
    cancels in their ratios, nor does what the cost model gets wrong about a policy as a whole.

    Args:
        misses: log(measured over predicted time of a run, or of a token in it), a row for each block, a
            column for each policy.

    Returns:
        0 where there are too few runs to tell.
    """
    table = np.array(misses)
    if min(table.shape) < 2:
        return 0.0
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    return math.sqrt(float((rest**2).sum()) / ((table.shape[0] - 1) * (table.shape[1] - 1)))


def fixed_depths(names: Iterable[str]) -> dict[str, int]:
    """Depth of each of `names` that is a fixed one: "off" and "fixed:K"."""
    found = {}
    for name in names:
        if name == OFF:
            found[name] = 0
        elif name.startswith("fixed:"):
            found[name] = int(name.removeprefix("fixed:"))
    return found


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Policies on the same requests at several loads."""

    runs: dict[int | str, LoadRuns]
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
    def loads(self) -> list[int | str]:
        """Loads with results: numbers ascending, then those that vary."""
        names = (load for load in self.runs if isinstance(load, str))
        return [*self.constant_loads, *names]

    @property
    def constant_loads(self) -> list[int]:
        """Loads that are numbers, ascending."""
        return sorted(load for load in self.runs if isinstance(load, int))

    @property
    def policies(self) -> list[str]:
        """Names, in the order given."""
        names = [name for run in self.runs.values() for name in run.policies]
        return list(dict.fromkeys(names))

    @property
    def fixed_depths(self) -> dict[str, int]:
        """Depth of each policy that is one: "off" and "fixed:K"."""
        return fixed_depths(self.policies)

    def best_fixed(self, load: int | str) -> str:
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
            parts.append(f"{run.num_requests}{times} at {load_name(load)}{few}")
        if not parts:
            return ["No block of requests was completed."]
        noise = max(run.noise for run in self.runs.values())
        covered = (
            "over requests; for these very ones the modelled times are exact"
            if self.clock == "virtual"
            else f"over requests and the noise of the machine (about {noise:.0%} of a run's time)"
            if self.has_noise
            else "over requests and do not cover the noise of the machine"
        )
        order = "in the same order" if self.clock == "virtual" else "interleaved"
        notes = [
            f"Each policy served the same requests, {order}: {', '.join(parts)}. Intervals are "
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

    def rows(
        self,
        *,
        best_single: str | None = None,
        table: str | None = None,
        oracle: str | None = None,
        tpot_limit_ms: float | None = None,
    ) -> list[ResultRow]:
        """A flat row for each number, with intervals where requests give one.

        Args:
            best_single: name of the best single fixed depth, chosen elsewhere, for a ratio to it.
            table: name of the tuned table among the policies, for a ratio to it.
            oracle: name of the oracle among the policies, for the share of the gap from the best
                fixed depth to it.
            tpot_limit_ms: time per output token that a request must keep to count in the goodput.
        """
        ratios = {"ratio_to_best_single_fixed": best_single, "ratio_to_table": table}
        return [
            row
            for load in self.loads
            for policy in self.runs[load].policies
            for row in self._rows(policy, load, ratios, oracle, tpot_limit_ms)
        ]

    def _rows(
        self,
        policy: str,
        load: int | str,
        ratios: Mapping[str, str | None],
        oracle: str | None,
        tpot_limit_ms: float | None,
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
        add("policy_ms", run.policy_ms(policy), "ms")
        add("mean_in_flight", run.mean_in_flight(policy), "requests")
        if tpot_limit_ms is not None:
            add("goodput_tok_s", metrics.goodput_tok_s(tpot_limit_ms / 1e3), "tok/s")
        best = self.best_fixed(load) if self.fixed_depths else None
        references = {"speedup": OFF, "ratio_to_best_fixed": best, **ratios}
        for metric, reference in references.items():
            if reference in run.policies:
                add(metric, run.ratio(policy, reference), "x")
        if best is not None and oracle in run.policies and run.ratio(oracle, best).value > 1:
            add("oracle_gap_closed", run.gap_closed(policy, best, oracle), "share")
        if OFF in run.policies:
            add("speedup_wall", run.ratio(policy, OFF, wall=True), "x")
            add("different_text_share", run.share_of_different_texts(policy), "share")
        return rows
