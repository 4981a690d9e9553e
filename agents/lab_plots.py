"""Figures of the depth-policy lab: what a policy decided, and how it went through a day."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .decision_log import QUANTITIES, SURVIVAL_STEP, timeline_name
from .plots import GREY, Drawing, LineStyle, _bars
from .results import Results

SIGNALS = {
    "match": "length of the n-gram match (tokens)",
    "survival": "estimated survival of the first token (%)",
}
"""Vertical axis of a decision map, by the signal in the names of its rows."""


def decision_map(results: Results, policy: str) -> str | None:
    """Heat map of a policy's mean depth by load and by what a sequence showed.

    Cells also say which share of the load's decisions they stand for. None without
    `depth_at_match_N` or `depth_at_survival_P` rows.
    """
    rows = [row for row in results.rows if row.policy == policy]
    found = [
        m for row in rows if (m := re.fullmatch(r"depth_at_(match|survival)_(\d+)", row.metric))
    ]
    if not found:
        return None
    signal, bins = found[0].group(1), sorted({int(one.group(2)) for one in found})
    label = SIGNALS[signal]
    values = {(row.load, row.metric): row.value for row in rows}
    loads = [x for x in results.loads if any((x, f"depth_at_{signal}_{b}") in values for b in bins)]
    depths = np.array(
        [[values.get((x, f"depth_at_{signal}_{b}"), np.nan) for x in loads] for b in bins]
    )
    rounds = np.array(
        [[values.get((x, f"rounds_at_{signal}_{b}"), 0.0) for x in loads] for b in bins]
    )
    shares = rounds / np.maximum(rounds.sum(axis=0), 1.0)
    names = [f"{b}" if signal == "match" else f"{b}-{b + SURVIVAL_STEP}" for b in bins]
    deepest = max(float(np.nanmax(depths)), 1.0)
    with Drawing(1.8 + 0.9 * len(loads), 1.2 + 0.45 * len(bins)) as page:
        axes = page.axes
        axes.grid(False)
        # Light to dark on light pages; cells carry their number, so shades need no legend.
        axes.imshow(depths, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=deepest)
        for (b, column), depth in np.ndenumerate(depths):
            if np.isnan(depth):
                continue
            axes.text(
                column,
                b,
                f"{depth:.2f}\n{100 * shares[b, column]:.0f} %",
                ha="center",
                va="center",
                color="white" if depth > 0.55 * deepest else "#222222",
                fontsize=8,
            )
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.set_yticks(range(len(bins)), names)
        axes.set_xlabel("load")
        axes.set_ylabel(label)
        text = "; ".join(
            f"load {load}: "
            + ", ".join(
                f"{depth:.2f} at {name}"
                for name, depth in zip(names, column, strict=True)
                if not np.isnan(depth)
            )
            for load, column in zip(loads, depths.T, strict=True)
        )
        return page.svg(
            "decisions", f"Heat map: mean depth (tokens) of {policy} by load and {label}. {text}."
        )


def timeline_plot(
    results: Results, load: int | str, styles: dict[str, LineStyle]
) -> tuple[str, list[str]] | None:
    """Batch, KV use and depth over time, one panel each; None without the curves.

    Returns:
        The figure, and the policies in it.
    """
    policies = [
        name
        for name in results.policies
        if name in styles
        and all(timeline_name(load, quantity, name) in results.series for quantity in QUANTITIES)
    ]
    if not policies:
        return None
    with Drawing(6.8, 5.6, num_panels=len(QUANTITIES)) as page:
        means = []
        for axes, (quantity, label) in zip(page.panels, QUANTITIES.items(), strict=True):
            for policy in policies:
                series, style = (
                    results.series[timeline_name(load, quantity, policy)],
                    styles[policy],
                )
                axes.plot(
                    series.x, series.y, color=style.color, ls=style.dashes, lw=1.6, label=policy
                )
                mean = float(np.mean(series.y)) if series.y else 0.0
                means.append(f"{policy}, {label}: {mean:.2f} on average")
            axes.set_ylim(bottom=0)
            axes.set_ylabel(label.replace(" in ", "\nin ").replace(" (", "\n("))
        page.panels[-1].set_xlabel("time (s)")
        page.axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))
        text = f"Line charts over time, load {load}. {'; '.join(means)}."
        return page.svg(f"timeline-{load}", text), policies


def ranking_plot(
    results: Results,
    load: int | str,
    metric: str,
    label: str,
    styles: dict[str, LineStyle],
    policies: Sequence[str],
    reference: float | None = None,
) -> str | None:
    """A metric at one load, a line a policy, best on top; None without rows.

    Args:
        results: with rows of `metric`.
        load: one.
        metric: name of the metric.
        label: of the x axis, with unit.
        styles: of policies that stand out; others are grey.
        policies: to draw.
        reference: level to mark.
    """
    found = [row for name in policies if (row := results.find(name, load, metric)) is not None]
    if not found:
        return None
    rows = sorted(found, key=lambda row: row.value)
    with Drawing(6.0, 0.8 + 0.2 * len(rows)) as page:
        axes = page.axes
        below, above = _bars(rows)
        plain = LineStyle(GREY, ".", "-", 0.8)
        for y, row in enumerate(rows):
            style = styles.get(row.policy, plain)
            axes.errorbar(
                [row.value],
                [y],
                xerr=[[below[y]], [above[y]]],
                color=style.color,
                marker=style.marker,
                ms=6,
                capsize=2,
                elinewidth=1,
            )
        if reference is not None:
            axes.axvline(reference, color=GREY, lw=1, ls="--")
        axes.set_yticks(range(len(rows)), [row.policy for row in rows])
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xlabel(label)
        text = ", ".join(f"{row.policy} {row.value:.3f}" for row in reversed(rows))
        return page.svg(f"ranking-{load}-{metric}", f"Dot plot: {label}, load {load}. {text}.")
