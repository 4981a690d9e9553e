"""`report.html`: one file with the evidence of a run, readable without network or script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from specdepth.scheduler.cost import CostModel

from . import plots
from .highlights import choose_highlights
from .load_tables import load_grid, policy_grid
from .report_figures import curve_figures, load_figures, policy_figures
from .results import Results, write_atomically
from .tables import (
    Grid,
    arithmetic_grid,
    arithmetic_of,
    draft_grid,
    pass_grid,
    speedup_row,
    with_speedups,
)

FILE_NAME = "report.html"


def write_report(
    folder: str | os.PathLike[str],
    results: Results,
    cost: CostModel | None = None,
    *,
    title: str = "How deep to draft",
    focus: str | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write `report.html` into `folder`, whole or not at all.

    Sections whose numbers are not in `results` are left out.

    Args:
        folder: created if needed.
        results: rows by policy and load, as `rows_from_metrics` names them, and "speedup" with
            intervals; a "learning_curve" series is drawn if present.
        cost: pass times, for the first section; None leaves it out.
        title: of the page.
        focus: the policy that the report is about; None takes the first whose name starts with
            "learned", else the last one that is neither "off" nor "fixed...".
        notes: sentences that a reader should know, shown at the top.

    Returns:
        The file.

    Raises:
        ValueError: `focus` is not in `results`, or the folder cannot be written to.
    """
    path = Path(folder) / FILE_NAME
    write_atomically(path, render(results, cost, title=title, focus=focus, notes=notes))
    return path


def render(
    results: Results,
    cost: CostModel | None = None,
    *,
    title: str = "How deep to draft",
    focus: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page of `write_report` as text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    focus = _focus(results, focus)
    shown = choose_highlights(results, focus)
    styles = plots.line_styles(shown.names, focus)
    watched = [name for name in (focus, _deepest_fixed(results)) if name is not None]
    styles |= plots.line_styles([name for name in watched if name not in styles], None)
    rated, device = with_speedups(results), results.device
    context: dict[str, Any] = {
        "title": title,
        "focus": focus,
        "notes": list(notes),
        "results": results,
        "created": results.created.replace("T", " ").replace("+00:00", " UTC"),
        "machine": next((device[k] for k in ("gpu", "cpu", "device") if k in device), None),
        "headlines": headlines(results, cost, focus),
        "cost": cost,
        "knee": plots.knee_plot(cost) if cost else None,
        "passes": pass_grid(cost) if cost else None,
        "drafts": draft_grid(cost) if cost else None,
        "arithmetic": arithmetic_grid(results, cost, watched) if cost else None,
        "load_figures": load_figures(rated, shown, styles, focus),
        "grids": _filled(
            policy_grid(rated, "throughput_tok_s", "Throughput", "tok/s"),
            policy_grid(rated, "speedup", "Throughput, ratio to off", "x", 2),
            policy_grid(
                rated, "ratio_to_best_fixed", "Throughput, ratio to the best fixed depth", "x", 3
            ),
        ),
        "load_grids": _filled(*(load_grid(rated, load, shown.names) for load in results.loads)),
        "others": len(shown.rest),
        "policy_figures": policy_figures(results, focus, watched, styles),
        "curves": curve_figures(results),
        # Our own drawings; the text in them is escaped.
        "drawing": Markup,
    }
    template = resources.files("specdepth.agents").joinpath("templates/report.html.j2")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(context)


def headlines(
    results: Results, cost: CostModel | None, focus: str | None
) -> list[tuple[str, str, str]]:
    """The few numbers to read first: (number, what it is, detail)."""
    lines: list[tuple[str, str, str]] = []
    if cost is not None:
        knee = cost.knee_tokens()
        beyond = knee > cost.tokens[-1]
        number = f"> {cost.tokens[-1]}" if beyond else f"{knee}"
        some = max(n for n in cost.tokens if n <= 8)
        detail = f"a pass of {some} costs {cost.pass_s(some) / cost.pass_s(1):.2f}x one token's"
        lines.append((number, "packed tokens double the time of a pass", detail))
    work = arithmetic_of(results, cost, focus)[:1] if cost is not None and focus else []
    for one in work:
        where = f"{focus}, load {one.num_sequences}"
        lines.append(
            (
                f"{one.flops_ratio:.2f}x",
                "the arithmetic of plain decoding, a committed token",
                where,
            )
        )
        lines.append((f"{one.bytes_ratio:.2f}x", "its memory traffic, a committed token", where))
        speedup = speedup_row(results, focus, one.num_sequences) if focus else None
        if speedup is not None:
            number = f"{1 / speedup.value:.2f}x"
            kind = "modelled" if results.config.get("mode") == "replay" else "measured"
            lines.append((number, f"its time, {kind}, a committed token", where))
    loads = plots.numeric_loads(results)
    for load in dict.fromkeys((*loads[:1], *loads[-1:])):
        row = speedup_row(results, focus, load) if focus else None
        if row is not None:
            detail = f"{focus}, load {load}"
            if row.ci_low is not None and row.ci_high is not None:
                detail += f", 95 % interval {row.ci_low:.2f} to {row.ci_high:.2f}"
            lines.append((f"{row.value:.2f}x", "the throughput without speculation", detail))
    return lines


def _focus(results: Results, focus: str | None) -> str | None:
    if focus is not None:
        if focus not in results.policies:
            raise ValueError(
                f"no results of policy {focus!r} to report; there are {', '.join(results.policies)}."
            )
        return focus
    adaptive = [p for p in results.policies if p != "off" and not p.startswith("fixed")]
    learned = [p for p in adaptive if p.startswith("learned")]
    return next(iter(learned or adaptive[-1:]), None) or _deepest_fixed(results)


def _deepest_fixed(results: Results) -> str | None:
    """The fixed depth that drafts most: it sees every position uncensored."""

    def depth(policy: str) -> float:
        rows = (results.find(policy, load, "mean_depth") for load in results.loads)
        return max((row.value for row in rows if row is not None), default=0.0)

    fixed = [p for p in results.policies if p.startswith("fixed")]
    return max(fixed, key=depth, default=None)


def _present(results: Results, policy: str) -> list[str]:
    return [policy] if policy in results.policies else []


def _filled(*grids: Grid) -> list[Grid]:
    return [grid for grid in grids if grid.rows]
