"""Tables of results: plain cells for the report, rich tables for the console. Units in headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specdepth.decoder.roofline import SpeculationArithmetic, roofline, speculation_arithmetic
from specdepth.scheduler.cost import CostModel

from .load_runs import load_name
from .plots import numeric_loads
from .results import ResultRow, Results

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table as text; the first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: tuple[tuple[int, int], ...] = ()
    """(row, column) of cells to stress."""

    def as_rich(self) -> Table:
        """For a console."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", header_style="bold")
        for i, name in enumerate(self.header):
            table.add_column(Text(name), justify="left" if i == 0 else "right", no_wrap=i == 0)
        for r, row in enumerate(self.rows):
            cells = [
                Text(text, style="bold green" if (r, c) in self.best else "")
                for c, text in enumerate(row)
            ]
            table.add_row(*cells)
        return table


def pass_grid(cost: CostModel) -> Grid:
    """Pass times by size, with achieved arithmetic and bandwidth where counts are known."""
    rows = roofline(cost)
    known = cost.flops_per_token is not None and cost.weight_bytes is not None
    header = ["packed tokens", "verify (ms)", "ratio to 1 token", "prefill (ms)"]
    if known:
        header += ["GFLOP/s", "GB/s"]
    lines = []
    for row, prefill_s in zip(rows, cost.prefill_s, strict=True):
        line = [str(row.tokens), _ms(row.pass_s), f"{row.ratio:.2f}", _ms(prefill_s)]
        if known:
            line += [_short(row.gflop_s or 0.0), _short(row.gbyte_s or 0.0)]
        lines.append(tuple(line))
    return Grid(title="Pass times", header=tuple(header), rows=tuple(lines))


def draft_grid(cost: CostModel) -> Grid | None:
    """Draft pass times; None where drafting is free."""
    if cost.drafter_is_free:
        return None
    rows = tuple(
        (str(n), _ms(s), f"{s / cost.verify_s[0]:.3f}")
        for n, s in zip(cost.draft_sequences, cost.draft_s, strict=True)
    )
    header = ("sequences", "draft pass (ms)", "ratio to a 1-token target pass")
    return Grid(title="Draft pass times", header=header, rows=rows)


def arithmetic_of(results: Results, cost: CostModel, policy: str) -> list[SpeculationArithmetic]:
    """What `policy` did to arithmetic and traffic at each numeric load where it was measured.

    Empty where the cost model knows no counts, or the results no acceptance.
    """
    if cost.flops_per_token is None or cost.weight_bytes is None:
        return []
    found = []
    for load in numeric_loads(results):
        length = results.find(policy, load, "acceptance_length")
        depth = results.find(policy, load, "mean_depth")
        if load > 0 and length is not None and depth is not None:
            found.append(
                speculation_arithmetic(
                    cost,
                    acceptance_length=min(length.value, 1 + depth.value),
                    mean_depth=depth.value,
                    num_sequences=load,
                )
            )
    return found


def arithmetic_grid(results: Results, cost: CostModel, policies: Sequence[str]) -> Grid | None:
    """FLOPs, bytes and time a committed token over those of plain decoding; None if unknown."""
    header = (
        "policy, load",
        "mean depth (tokens)",
        "acceptance length (tokens)",
        "GFLOP/token",
        "FLOPs, x of off",
        "MB/token",
        "bytes, x of off",
        "time, x of off (predicted)",
        "time, x of off (measured)",
    )
    rows = []
    for policy in policies:
        for work in arithmetic_of(results, cost, policy):
            speedup = speedup_row(results, policy, work.num_sequences)
            rows.append(
                (
                    f"{policy}, {work.num_sequences}",
                    f"{work.mean_depth:.2f}",
                    f"{work.acceptance_length:.2f}",
                    _short(work.flops_per_token / 1e9),
                    f"{work.flops_ratio:.2f}",
                    _short(work.bytes_per_token / 1e6),
                    f"{work.bytes_ratio:.2f}",
                    f"{work.time_ratio:.2f}",
                    "" if speedup is None else f"{1 / speedup.value:.2f}",
                )
            )
    if not rows:
        return None
    title = "Work a committed token, with speculation over without"
    return Grid(title=title, header=header, rows=tuple(rows))


def speedup_row(results: Results, policy: str, load: int | str) -> ResultRow | None:
    """Ratio of throughput to "off": a "speedup" row, or without interval from two throughputs."""
    row = results.find(policy, load, "speedup")
    if row is not None:
        return row
    mine = results.find(policy, load, "throughput_tok_s")
    off = results.find("off", load, "throughput_tok_s")
    if mine is None or off is None or off.value <= 0 or mine.value <= 0:
        return None
    ratio = mine.value / off.value
    return ResultRow(policy=policy, load=load, metric="speedup", value=ratio, unit="x")


def with_speedups(results: Results) -> Results:
    """`results` with a "speedup" row wherever two throughputs give one."""
    pairs = ((p, load) for p in results.policies for load in results.loads)
    added = [
        row
        for policy, load in pairs
        if results.find(policy, load, "speedup") is None
        and (row := speedup_row(results, policy, load)) is not None
    ]
    return replace(results, rows=(*results.rows, *added))


def metric_grid(
    results: Results,
    metric: str,
    title: str,
    unit: str,
    digits: int = 1,
    *,
    intervals: bool = True,
) -> Grid:
    """A metric, a line a policy and a column a load; the best of a load stressed.

    Use `with_speedups` first for the metric "speedup".
    """
    loads = [
        load
        for load in results.loads
        if any(results.find(policy, load, metric) is not None for policy in results.policies)
    ]
    rows: list[tuple[str, ...]] = []
    values: list[list[float | None]] = []
    for policy in results.policies:
        found = [results.find(policy, load, metric) for load in loads]
        if any(row is not None for row in found):
            rows.append((policy, *(_cell(row, digits, intervals) for row in found)))
            values.append([None if row is None else row.value for row in found])
    best = []
    for column in range(len(loads)):
        known = [value for line in values if (value := line[column]) is not None]
        if len(known) > 1:
            top = min(known) if unit == "ms" else max(known)
            best += [(r, column + 1) for r, line in enumerate(values) if line[column] == top]
    header = ("policy", *(f"{load_name(load)} ({unit})" for load in loads))
    return Grid(title=title, header=header, rows=tuple(rows), best=tuple(best))


def _cell(row: ResultRow | None, digits: int, interval: bool) -> str:
    if row is None:
        return ""
    text = f"{row.value:.{digits}f}"
    if not interval or row.ci_low is None or row.ci_high is None:
        return text
    return f"{text} [{row.ci_low:.{digits}f}, {row.ci_high:.{digits}f}]"


def _ms(seconds: float) -> str:
    return _short(1e3 * seconds)


def _short(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
