"""What a comparison says, in sentences that say no more than it shows."""

from __future__ import annotations

from specdepth.decoder.roofline import speculation_arithmetic
from specdepth.scheduler.cost import CostModel

from .comparison import OFF, Comparison
from .console import Console
from .intervals import Interval
from .results import Results
from .tables import arithmetic_grid, metric_grid, with_speedups


def claim(comparison: Comparison, cost: CostModel, policy: str) -> str | None:
    """More arithmetic and less time, as two measured numbers at the lowest load; None if unknown.

    Arithmetic is counted from the depths and accepted tokens of the runs (decoding only, prompts left
    out); time is that of the runs, prompts included.
    """
    if not comparison.loads or cost.flops_per_token is None or cost.weight_bytes is None:
        return None
    load = comparison.loads[0]
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
    time = inverse(run.ratio(policy, OFF, cpu=comparison.has_cpu_time))
    verdict = "less time" if time.value < 1 else "no less time"
    return (
        f"Load {load}, {policy}: {work.flops_ratio:.2f}x the FLOPs a token of plain decoding, "
        f"{work.bytes_ratio:.2f}x its memory traffic, {time.value:.2f}x its time{_bounds(time)}: "
        f"more arithmetic, {verdict}."
    )


def fastest(comparison: Comparison) -> str:
    """The policy other than "off" with the highest throughput at the lowest load."""
    run = comparison.runs[comparison.loads[0]]
    names = [name for name in run.policies if name != OFF] or [OFF]
    cpu = comparison.has_cpu_time
    return max(names, key=lambda name: run.throughput(name, cpu=cpu).value)


def verdicts(comparison: Comparison, policy: str, table: str | None = None) -> list[str]:
    """A sentence for each load: `policy` against off, the best fixed depth there, and the table."""
    sentences = []
    cpu = comparison.has_cpu_time
    for load in comparison.loads:
        run = comparison.runs[load]
        if policy not in run.policies:
            continue
        parts = []
        if OFF in run.policies and policy != OFF:
            parts.append(f"{_against(run.ratio(policy, OFF, cpu=cpu))} no speculation")
        if comparison.fixed_depths:
            best = comparison.best_fixed(load)
            ratio = run.ratio(policy, best, cpu=cpu)
            parts.append(f"{_against(ratio)} {best}, the best fixed depth in these runs")
        if table is not None and table in run.policies and policy != table:
            parts.append(f"{_against(run.ratio(policy, table, cpu=cpu))} the tuned table")
        sentences.append(f"Load {load}: {policy} is " + "; ".join(parts) + ".")
    return sentences


def show_arithmetic(
    console: Console, results: Results, cost: CostModel, policies: list[str]
) -> None:
    """Print work a token with and without speculation, if known."""
    grid = arithmetic_grid(with_speedups(results), cost, policies)
    if grid is not None:
        console.table(grid)


def show_comparison(console: Console, comparison: Comparison, results: Results) -> None:
    """Print throughput and speedups by policy and load."""
    if not comparison.loads:
        return
    rated = with_speedups(results)
    console.table(metric_grid(rated, "throughput_tok_s", "Throughput, wall time", "tok/s"))
    console.table(metric_grid(rated, "speedup", "Throughput, ratio to off, wall time", "x", 2))
    if comparison.has_cpu_time:
        title = "Throughput, ratio to off, CPU time (steadier on a busy machine)"
        console.table(metric_grid(rated, "speedup_cpu", title, "x", 2))


def inverse(ratio: Interval) -> Interval:
    """Time ratio from a throughput ratio."""
    return Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low)


def _against(ratio: Interval) -> str:
    low, high = ratio.bounds
    if low is None or high is None:
        word = "too few requests to say against"
    elif low > 1:
        word = "faster than"
    elif high < 1:
        word = "slower than"
    elif low == high:
        word = "the same as"
    else:
        word = "not clearly different from"
    return f"{ratio.value:.2f}x{_bounds(ratio)}, {word}"


def _bounds(ratio: Interval) -> str:
    low, high = ratio.bounds
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
