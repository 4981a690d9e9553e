"""Figures of an ablation: what each variant reached, and how it got there."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdepth.scheduler.state import Floats

from .ablate_grid import BASE
from .ablate_statistics import iqm_interval
from .ablate_summary import VariantSummary
from .ablate_table import REFERENCE
from .plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, SPEED = "time/total_timesteps", "decode/throughput_tok_s"
"""Columns of progress.csv."""
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY)
MARKERS = "o^sDvX"
DASHES = ("-", "--", "-.", ":")

Curve = tuple[Floats, Floats]
"""Time steps and tokens a second, a point an update."""


def iqm_plot(summaries: Sequence[VariantSummary]) -> str:
    """Interquartile means with their intervals, a line a variant, grouped by dimension.

    The thick bar is the stratified interval, the thin one that of whole seeds. The level of the base is
    marked.
    """
    groups = by_dimension(summaries)
    num_lines = sum(len(group) + 1 for group in groups.values())
    with Drawing(6.6, 0.9 + 0.24 * num_lines) as page:
        axes = page.axes
        y, places, names = 0.0, list[float](), list[str]()
        for index, (dimension, group) in enumerate(groups.items()):
            axes.text(
                0.0,
                y,
                f" {dimension}",
                transform=axes.get_yaxis_transform(),
                va="center",
                style="italic",
            )
            for one in group:
                y += 1
                color = RED if one.variant == BASE else COLORS[index % len(COLORS)]
                _point(axes, one, y, color, MARKERS[index % len(MARKERS)])
                places.append(y)
                names.append(one.variant)
            y += 1
        for one in groups.get(BASE, []):
            axes.axvline(one.iqm.value, color=RED, lw=1, ls=":")
        axes.axvline(1.0, color=GREY, lw=1, ls="--")
        axes.set_yticks(places, names)
        axes.set_ylim(y - 0.4, -0.7)
        axes.grid(False, axis="y")
        axes.set_xlabel("throughput, x of the best fixed depth (interquartile mean)")
        text = "; ".join(
            f"{dimension}: " + ", ".join(f"{one.variant} {one.iqm.value:.3f}" for one in group)
            for dimension, group in groups.items()
        )
        return page.svg("iqm", f"Dot plot: interquartile mean over seeds and loads. {text}.")


def learning_plot(
    curves: Mapping[str, Sequence[Curve]], dimensions: Mapping[str, str]
) -> str | None:
    """Throughput in training against time steps, a panel a dimension with the base in each.

    A line is the interquartile mean over seeds at each update that all of them had, its band the 95 %
    interval over seeds.

    Args:
        curves: by variant, one a seed; as `read_curve` returns.
        dimensions: of each variant; one without curves is left out.

    Returns:
        None where there are no curves.
    """
    drawn = {name: lines for name, lines in curves.items() if any(len(x) for x, _ in lines)}
    panels: dict[str, list[str]] = {}
    for name in drawn:
        if name != BASE:
            panels.setdefault(dimensions[name], []).append(name)
    if not panels and BASE in drawn:
        panels = {BASE: []}
    if not panels:
        return None
    ends = []
    with Drawing(6.6, 1.0 + 1.7 * len(panels), num_panels=len(panels)) as page:
        for axes, (dimension, names) in zip(page.panels, panels.items(), strict=True):
            for index, name in enumerate([*([BASE] if BASE in drawn else []), *names]):
                color = RED if name == BASE else COLORS[(index - 1) % len(COLORS)]
                ends.append(f"{name} {_curve(axes, name, drawn[name], color, index):.1f}")
            axes.set_ylabel(f"{dimension}\n(tok/s)")
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))
        page.panels[-1].set_xlabel("time steps")
        text = f"Line charts: throughput in training, at the end {', '.join(dict.fromkeys(ends))}"
        return page.svg("learning", f"{text} tok/s.")


def read_curve(path: Path) -> Curve:
    """Time steps and throughput of each update, out of a `progress.csv`; empty if there is none."""
    if not path.is_file():
        return np.zeros(0), np.zeros(0)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(STEPS) and row.get(SPEED)]
    return (
        np.array([float(row[STEPS]) for row in rows]),
        np.array([float(row[SPEED]) for row in rows]),
    )


def by_dimension(summaries: Sequence[VariantSummary]) -> dict[str, list[VariantSummary]]:
    """The base, then rules, then the dimensions in the order of the grid."""
    found: dict[str, list[VariantSummary]] = {BASE: [], REFERENCE: []}
    for one in summaries:
        found.setdefault(one.dimension, []).append(one)
    return {dimension: group for dimension, group in found.items() if group}


def _point(axes: Axes, one: VariantSummary, y: float, color: str, marker: str) -> None:
    for interval, width in ((one.iqm_whole_runs, 1.0), (one.iqm, 3.0)):
        if not np.isnan(interval.low):
            axes.plot([interval.low, interval.high], [y, y], color=color, lw=width, alpha=0.7)
    axes.plot([one.iqm.value], [y], color=color, marker=marker, ms=6)


def _curve(axes: Axes, name: str, lines: Sequence[Curve], color: str, index: int) -> float:
    """Draw one variant; returns where it ends."""
    length = min(len(x) for x, _ in lines if len(x))
    kept = [(x[:length], y[:length]) for x, y in lines if len(x)]
    x = kept[0][0]
    found = [iqm_interval(np.array([[y[at]] for _, y in kept])) for at in range(length)]
    middle = [one.value for one in found]
    axes.plot(
        x,
        middle,
        color=color,
        ls=DASHES[index % len(DASHES)],
        lw=1.6,
        label=name,
        marker="." if length < 10 else "",
    )
    if len(kept) > 1:
        low, high = [one.low for one in found], [one.high for one in found]
        axes.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
    return middle[-1]
