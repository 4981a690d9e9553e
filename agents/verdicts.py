"""What a comparison says, in sentences that say no more than it shows."""

from __future__ import annotations

from specdepth.decoder.roofline import speculation_arithmetic
from specdepth.scheduler.cost import CostModel

from .comparison import OFF, Comparison
from .console import Console
from .intervals import Interval
from .load_runs import load_name
from .results import Results
from .tables import arithmetic_grid, metric_grid, with_speedups

TINY = 0.005
"""What two digits do not show."""
MAX_COLUMNS_WITH_INTERVALS = 3
"""A console is not wide enough for more; the report and results.json have all intervals."""


def claim(comparison: Comparison, cost: CostModel, policy: str) -> str | None:
    """More arithmetic and less time, as two measured numbers at the lowest load; None if unknown.

    Arithmetic is counted from the depths and accepted tokens of the runs (decoding only, prompts left
    out); time is that of the runs, prompts included.
    """
    loads = comparison.constant_loads
    if not loads or cost.flops_per_token is None or cost.weight_bytes is None:
        return None
    load = loads[0]
    run = comparison.runs[load]
    if policy not in run.policies or OFF not in run.policies:
        return None
    metrics = run.metrics[policy]
    work = speculation_arithmetic(
        cost,
        acceptance_length=min(metrics.acceptance_length, 1 + metrics.mean_depth),
        mean_depth=metrics.mean_depth,
        num_sequences=load,
    )
    time = inverse(run.ratio(policy, OFF))
    more = "more arithmetic" if work.flops_ratio > 1 + TINY else "no more arithmetic"
    return (
        f"Load {load}, {policy}: {work.flops_ratio:.2f}x the FLOPs a token of plain decoding, "
        f"{work.bytes_ratio:.2f}x its memory traffic, {time.value:.2f}x its time{_bounds(time)}: "
        f"{more}, {_time_word(time)}."
    )


def _time_word(time: Interval) -> str:
    low, high = time.bounds
    if low is None or high is None:
        return f"{'less' if time.value < 1 else 'no less'} time (too few requests for an interval)"
    if low <= 1 <= high:
        return "no clear difference in time"
    return "less time" if high < 1 else "more time"


def fastest(comparison: Comparison) -> str:
    """The policy other than "off" with the highest throughput at the lowest load."""
    run = comparison.runs[comparison.loads[0]]
    names = [name for name in run.policies if name != OFF] or [OFF]
    return max(names, key=lambda name: run.throughput(name).value)


def verdicts(comparison: Comparison, policy: str, table: str | None = None) -> list[str]:
    """A sentence for each load: `policy` against off, the best fixed depth there, and the table."""
    sentences = []
    for load in comparison.loads:
        run = comparison.runs[load]
        rivals: dict[str, str] = {}
        if comparison.fixed_depths:
            rivals[comparison.best_fixed(load)] = ", the best fixed depth here in hindsight,"
        if OFF in run.policies:
            rivals = {OFF: rivals.pop(OFF, "")} | rivals
        if table is not None and table in run.policies:
            rivals[table] = ""
        rivals.pop(policy, None)
        if policy in run.policies and rivals:
            parts = [
                _against(run.ratio(policy, rival), f"{rival}{remark}")
                for rival, remark in rivals.items()
            ]
            where = load_name(load).capitalize()
            sentences.append(f"{where}, {policy}: " + "; ".join(parts) + ".")
    return sentences


def show_arithmetic(
    console: Console, results: Results, cost: CostModel, policies: list[str]
) -> None:
    """Print work a token with and without speculation, if known."""
    grid = arithmetic_grid(with_speedups(results), cost, policies)
    if grid is not None:
        console.table(grid)


def show_comparison(console: Console, comparison: Comparison, results: Results) -> None:
    """Print throughput, speedups, and what oracles say, by policy and load."""
    if not comparison.loads:
        return
    rated = with_speedups(results)
    kind = {"cpu": "CPU time", "wall": "wall time", "virtual": "modelled time"}[comparison.clock]
    intervals = len(comparison.loads) <= MAX_COLUMNS_WITH_INTERVALS

    def show(metric: str, title: str, unit: str, digits: int) -> None:
        grid = metric_grid(rated, metric, title, unit, digits, intervals=intervals)
        if grid.rows:
            console.table(grid)

    show("throughput_tok_s", f"Throughput, {kind}", "tok/s", 1)
    show("speedup", f"Throughput, ratio to off, {kind}", "x", 2)
    if comparison.clock == "cpu":
        title = "Throughput, ratio to off, wall time (as noisy as the machine)"
        show("speedup_wall", title, "x", 2)
    if any(row.metric == "oracle_gap_closed" for row in results.rows):
        show("ratio_to_best_fixed", "Throughput, ratio to the best fixed depth", "x", 3)
        title = "Share of the way from the best fixed depth to the oracle"
        show("oracle_gap_closed", title, "share", 2)
        show("mean_depth", "Depth", "tokens", 2)
        show("policy_ms", "Time to decide a round", "ms", 3)
    show("goodput_tok_s", "Goodput: requests within the limit of time per token", "tok/s", 1)


def inverse(ratio: Interval) -> Interval:
    """Time ratio from a throughput ratio."""
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def _against(ratio: Interval, rival: str) -> str:
    low, high = ratio.bounds
    if low is None or high is None:
        word = "too few requests for an interval"
    elif low > 1:
        word = "faster"
    elif high < 1:
        word = "slower"
    else:
        word = "the same" if low == high else "no clear difference"
    return f"{ratio.value:.2f}x {rival}{_bounds(ratio)} ({word})"


def _bounds(ratio: Interval) -> str:
    low, high = ratio.bounds
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
