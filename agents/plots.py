"""Figures of a report as inline SVG: no script, no network, readable on light and on dark pages.

Text and axes take the page's own colour. Lines use the Okabe-Ito palette, and markers and dashes differ
too, so that no meaning hangs on colour alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specdepth.scheduler.cost import CostModel

from .results import ResultRow, Results, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PINK, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8A8A"
FIXED_BLUES = ("#9ecae1", "#74b3dc", "#4c9bd1", "#3182bd", "#2a6fbf")
_INK = "#010203"
"""Stands for the page's text colour until the SVG is written."""
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.alpha": 0.18,
    "grid.color": _INK,
    "legend.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "specdepth",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


LoadPoint = tuple[float, int | str]
"""Where a load stands on an axis, and its name in the results."""


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How a policy looks in each figure."""

    color: str
    marker: str
    dashes: str
    width: float


def line_styles(policies: Sequence[str], focus: str | None) -> dict[str, LineStyle]:
    """A style for each policy: off grey and dashed, fixed depths in blues, `focus` red and bold.

    Oracles are thin and dotted: nobody can run them.
    """
    fixed = [name for name in policies if name.startswith("fixed")]
    oracles = [name for name in policies if name.startswith("oracle:")]
    others = [name for name in policies if name not in (*fixed, *oracles, "off", focus)]
    styles = {}
    for i, name in enumerate(fixed):
        shade = FIXED_BLUES[round((i + 1) / max(len(fixed), 1) * (len(FIXED_BLUES) - 1))]
        styles[name] = LineStyle(shade, "^Dv<>pd8"[i % 8], "-", 1.4)
    for i, name in enumerate(oracles):
        styles[name] = LineStyle(_INK, "1234"[i % 4], ":", 1.0)
    for i, name in enumerate(others):
        color = (ORANGE, GREEN, PINK, SKY, BLUE)[i % 5]
        styles[name] = LineStyle(color, "XPh*H"[i % 5], ("-.", ":", "--")[i // 5 % 3], 1.6)
    styles["off"] = LineStyle(GREY, "s", "--", 1.6)
    if focus is not None:
        styles[focus] = LineStyle(RED, "o", "-", 2.6)
    return styles


def knee_plot(cost: CostModel) -> str:
    """Pass time against packed tokens, with the knee at twice the time of one token."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with Drawing(6.4, 3.6) as page:
        axes = page.axes
        one_s, knee = cost.verify_s[0], cost.knee_tokens()
        axes.plot(cost.tokens, [1e3 * s for s in cost.verify_s], "o-", color=BLUE, label="verify")
        if cost.prefill_s != cost.verify_s:
            prefill_ms = [1e3 * s for s in cost.prefill_s]
            axes.plot(cost.tokens, prefill_ms, "s--", color=ORANGE, ms=4, label="prefill")
        axes.axhline(2e3 * one_s, color=RED, ls=":", lw=1.4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        if knee <= cost.tokens[-1]:
            axes.plot([knee], [1e3 * cost.pass_s(knee)], "D", color=RED, ms=8, zorder=5)
            note = f"knee: {knee} tokens cost 2x one"
        else:
            note = "2x one token (not reached)"
        axes.annotate(
            note,
            (cost.tokens[-1], 2e3 * one_s),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=RED,
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("packed tokens in a pass")
        axes.set_ylabel("pass time (ms)")
        axes.legend(loc="upper left")
        return page.svg("knee", f"Line chart: pass time (ms) against packed tokens. {note}.")


def metric_plot(
    results: Results,
    metric: str,
    label: str,
    styles: dict[str, LineStyle],
    *,
    policies: Sequence[str],
    rest: Sequence[str] = (),
    loads: Sequence[LoadPoint] | None = None,
    load_label: str = "load (concurrent sequences)",
    reference: float | None = None,
    bands: bool = False,
    focus: str | None = None,
    name: str | None = None,
) -> str:
    """A metric against load, a line a policy, with its intervals.

    Args:
        results: with rows of `metric`.
        metric: name of the metric.
        label: of the y axis, with unit.
        styles: by policy.
        policies: to draw, in order.
        rest: to draw in grey beneath them.
        loads: where to draw; the numeric ones by default.
        load_label: of the x axis.
        reference: level to mark.
        bands: show intervals as bands, not as bars; oracles go without.
        focus: policy whose numbers the alternative text holds.
        name: prefix of ids in the figure, unique on its page; the metric by default.
    """
    if loads is None:
        loads = [(float(load), load) for load in numeric_loads(results)]
    places = {load: x for x, load in loads}

    def found_rows(policy: str) -> list[ResultRow]:
        rows = [results.find(policy, load, metric) for load in places]
        return [row for row in rows if row is not None]

    with Drawing(6.4, 3.8) as page:
        axes = page.axes
        for i, policy in enumerate(rest):
            rows = found_rows(policy)
            axes.plot(
                [places[row.load] for row in rows],
                [row.value for row in rows],
                color=GREY,
                lw=0.8,
                alpha=0.5,
                label=f"{len(rest)} others" if i == 0 else None,
                zorder=2,
            )
        for i, policy in enumerate(policies):
            rows = found_rows(policy)
            if not rows:
                continue
            style = styles[policy]
            # Side by side, or intervals of close policies hide each other.
            step = min(0.09, 0.5 / len(policies))
            shift = 1.0 if bands else 2 ** (step * (i - (len(policies) - 1) / 2))
            x, y = [places[row.load] * shift for row in rows], [row.value for row in rows]
            below, above = _bars(rows)
            if bands and not policy.startswith("oracle:"):
                low = [value - bar for value, bar in zip(y, below, strict=True)]
                high = [value + bar for value, bar in zip(y, above, strict=True)]
                axes.fill_between(x, low, high, color=style.color, alpha=0.12, lw=0)
            axes.errorbar(
                x,
                y,
                yerr=None if bands else [below, above],
                color=style.color,
                marker=style.marker,
                ls=style.dashes,
                lw=style.width,
                ms=5,
                capsize=2,
                elinewidth=1,
                label=policy,
                zorder=3 + style.width,
            )
        if reference is not None:
            axes.axhline(reference, color=GREY, lw=1, ls="--")
        else:
            axes.set_ylim(bottom=0)
        _load_axis(axes, list(places.values()), load_label)
        axes.set_ylabel(label)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))
        rows = [] if focus is None else found_rows(focus)
        values = ", ".join(f"{row.value:.3f} at {places[row.load]:g}" for row in rows)
        text = f"Line chart: {label} against {load_label}"
        return page.svg(name or metric, f"{text}. {focus}: {values}." if rows else f"{text}.")


def depth_heatmap(results: Results, policy: str) -> str | None:
    """Share of a policy's depths by load; None without `depth_k_share` rows."""
    loads = [x for x in results.loads if results.find(policy, x, "depth_0_share") is not None]
    if not loads:
        return None
    depths = range(1 + max(_numbered(results, policy, r"depth_(\d+)_share")))
    found = [[results.find(policy, load, f"depth_{k}_share") for load in loads] for k in depths]
    shares = np.array([[row.value if row else 0.0 for row in line] for line in found])
    with Drawing(1.6 + 0.8 * len(loads), 1.2 + 0.28 * len(depths)) as page:
        axes = page.axes
        axes.grid(False)
        # Light to dark on light pages; cells carry their number, so shades need no legend.
        axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
        for (k, column), share in np.ndenumerate(shares):
            color = "white" if share > 0.5 else "#222222"
            axes.text(
                column, k, f"{100 * share:.0f}", ha="center", va="center", color=color, fontsize=9
            )
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.set_yticks(depths)
        axes.set_xlabel("load")
        axes.set_ylabel("depth (tokens)")
        text = "; ".join(
            f"load {load}: "
            + ", ".join(f"{100 * share:.0f} % at {k}" for k, share in enumerate(column))
            for load, column in zip(loads, shares.T, strict=True)
        )
        return page.svg("depths", f"Heat map: percent of rounds at each depth of {policy}. {text}.")


def acceptance_plot(
    results: Results,
    policies: Sequence[str],
    styles: dict[str, LineStyle],
    *,
    by: str = "position",
    x_label: str = "position of the drafted token",
    y_label: str = "accepted, of those reached",
) -> str | None:
    """Acceptance at the lowest and the highest load; None without such rows.

    Args:
        results: with rows `acceptance_at_{by}_N`.
        policies: to draw.
        styles: by policy.
        by: "position" of a token, or "depth" of its round.
        x_label: of the x axis.
        y_label: of the y axis.
    """
    pattern = rf"acceptance_at_{by}_(\d+)"
    loads = numeric_loads(results)
    ends = sorted({loads[0], loads[-1]}) if loads else []
    lines = []
    for policy in policies:
        for load in ends:
            points = {
                j: row.value
                for j in _numbered(results, policy, pattern)
                if (row := results.find(policy, load, f"acceptance_at_{by}_{j}")) is not None
            }
            if points:
                lines.append((policy, load, points))
    if not lines:
        return None
    with Drawing(5.6, 3.4) as page:
        axes = page.axes
        for policy, load, points in lines:
            style = styles[policy]
            axes.plot(
                list(points),
                list(points.values()),
                color=style.color,
                marker=style.marker,
                ls="-" if load == ends[0] else ":",
                label=f"{policy}, load {load}",
            )
        axes.set_ylim(0, 1.02)
        axes.set_xticks(range(1, 1 + max(max(points) for _, _, points in lines)))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))
        text = "; ".join(
            f"{policy}, load {load}: " + ", ".join(f"{y:.2f} at {x}" for x, y in points.items())
            for policy, load, points in lines
        )
        return page.svg(f"acceptance-{by}", f"Line chart: {y_label}, by {x_label}. {text}.")


def time_plot(results: Results, policies: Sequence[str]) -> str | None:
    """Time split of rounds, a bar a policy and load; None without `*_share` rows."""
    parts = (("draft", SKY), ("verify", BLUE), ("schedule", RED), ("other", GREY))
    bars = []
    for policy in policies:
        for load in numeric_loads(results):
            rows = [results.find(policy, load, f"{part}_share") for part, _ in parts]
            if all(row is not None for row in rows):
                bars.append((f"{policy}, load {load}", [100 * row.value for row in rows if row]))
    if not bars:
        return None
    with Drawing(6.4, 0.9 + 0.3 * len(bars)) as page:
        axes = page.axes
        names = [name for name, _ in bars]
        left = np.zeros(len(bars))
        for i, (part, color) in enumerate(parts):
            widths = np.array([shares[i] for _, shares in bars])
            axes.barh(names, widths, left=left, color=color, label=part, height=0.7)
            left += widths
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of round time (%)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))
        text = "; ".join(
            f"{name}: "
            + ", ".join(f"{part} {x:.0f} %" for (part, _), x in zip(parts, xs, strict=True))
            for name, xs in bars
        )
        return page.svg("time", f"Bar chart: share of round time. {text}.")


def series_plot(name: str, series: Series) -> str:
    """A curve, the mean of a moving window over it when it is long."""
    with Drawing(6.4, 3.2) as page:
        axes, y = page.axes, np.asarray(series.y)
        window = len(y) // 20
        if window > 1:
            axes.plot(series.x, y, color=BLUE, alpha=0.35, lw=1)
            smooth = np.convolve(y, np.ones(window) / window, "valid")
            axes.plot(series.x[window - 1 :], smooth, color=BLUE, lw=2.2)
        else:
            axes.plot(series.x, y, "o-", color=BLUE, ms=4)
        axes.set_xlabel(series.x_label)
        axes.set_ylabel(series.y_label)
        text = f"Line chart: {series.y_label} against {series.x_label}"
        return page.svg(f"series-{name}", f"{text}, from {y[0]:.4g} to {y[-1]:.4g}.")


def numeric_loads(results: Results) -> list[int]:
    """Loads that are numbers, ascending."""
    return [load for load in results.loads if isinstance(load, int)]


class Drawing:
    """Context in which one figure is drawn in the report's style.

    Args:
        width, height: in inches.
        num_panels: axes, one above the other with a common x axis.
    """

    def __init__(self, width: float, height: float, num_panels: int = 1) -> None:
        self._size, self._num_panels = (width, height), num_panels

    def __enter__(self) -> Drawing:
        import matplotlib
        from matplotlib.figure import Figure

        self._style = matplotlib.rc_context(_STYLE)
        self._style.__enter__()
        self._figure: Figure = Figure(figsize=self._size)
        panels = self._figure.subplots(self._num_panels, 1, sharex=True, squeeze=False)
        self.panels: list[Axes] = list(panels[:, 0])
        self.axes = self.panels[0]
        return self

    def __exit__(self, *error: object) -> None:
        self._style.__exit__(None, None, None)

    def svg(self, name: str, title: str) -> str:
        """The figure as an `<svg>` element that scales with its column.

        Args:
            name: prefix of its ids, unique on a page.
            title: alternative text.
        """
        buffer = io.StringIO()
        self._figure.savefig(
            buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "currentColor")
        # Ids must differ between the figures of a page, or one takes the other's clip paths.
        prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        width = re.search(r'width="([\d.]+)pt"', text)
        limit = f"max-width:{float(width.group(1)) * 4 / 3:.0f}px" if width else ""
        head = (
            f'<svg role="img" aria-label="{_escape(title)}" style="width:100%;height:auto;{limit}"'
        )
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        return text.replace("<svg", head, 1)


def _bars(rows: Sequence[ResultRow]) -> list[list[float]]:
    """Distances from values to interval ends; 0 where there is none."""
    low = [0.0 if row.ci_low is None else max(row.value - row.ci_low, 0.0) for row in rows]
    high = [0.0 if row.ci_high is None else max(row.ci_high - row.value, 0.0) for row in rows]
    return [low, high]


def _load_axis(axes: Axes, loads: Sequence[float], label: str) -> None:
    from matplotlib.ticker import NullLocator

    if loads and loads[0] > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.set_xlabel(label)


def _numbered(results: Results, policy: str, pattern: str) -> list[int]:
    """Numbers in the names of a policy's metrics that match `pattern`, ascending."""
    names = {row.metric for row in results.rows if row.policy == policy}
    return sorted(int(match.group(1)) for name in names if (match := re.fullmatch(pattern, name)))


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
