"""Which figures a report has, with their titles and captions; those without numbers are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from . import plots
from .highlights import Highlights
from .lab_plots import decision_map, ranking_plot, timeline_plot
from .load_runs import load_name
from .replay_evaluate import BEST_FIXED
from .results import Results

THROUGHPUT = ("throughput_tok_s", "throughput (tok/s)")
SPEEDUP = ("speedup", "throughput, x of off")
RATIO = ("ratio_to_best_fixed", "throughput, x of the best fixed depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the page."""

    title: str
    svg: str
    """With its alternative text."""
    caption: str


def load_figures(
    rated: Results,
    shown: Highlights,
    styles: dict[str, plots.LineStyle],
    focus: str | None,
) -> list[Figure]:
    """Throughput against load, absolute and as ratios; loads that vary on their own.

    Args:
        rated: results with speedups.
        shown: policies that stand out.
        styles: theirs.
        focus: the policy that the report is about.
    """
    figures = []
    grey = (
        f" Coloured: what the report is about, references, the strongest rules of these runs and "
        f"oracles; grey: {len(shown.rest)} others, in the table below."
        if shown.rest
        else ""
    )
    captions = (
        (
            THROUGHPUT,
            None,
            "Throughput against load",
            "Committed tokens a second; bars are 95 % intervals. Points are set side by side so that "
            "they can be told apart." + grey,
        ),
        (
            SPEEDUP,
            1.0,
            "Ratio to no speculation",
            "The same as a ratio to decoding without speculation (dashed line at 1); below it, "
            "speculation loses.",
        ),
        (
            RATIO,
            1.0,
            "Ratio to the best fixed depth",
            "The best fixed depth of each load, chosen in hindsight, is the dashed line at 1; bands are "
            "95 % intervals over requests. Above it is what no fixed depth can give.",
        ),
    )
    for family, (loads, load_label) in _families(rated).items():
        for (metric, label), reference, title, caption in captions:
            if family and metric == "speedup":
                continue  # constant loads have it
            bands = metric == "ratio_to_best_fixed"
            names = [name for name in shown.names if not (bands and name == BEST_FIXED)]
            has = [name for name in names if _has(rated, name, metric, loads)]
            if not has:
                continue
            svg = plots.metric_plot(
                rated,
                metric,
                label,
                styles,
                policies=has,
                rest=[name for name in shown.rest if _has(rated, name, metric, loads)],
                loads=loads,
                load_label=load_label,
                reference=reference,
                bands=bands,
                focus=focus,
                name=f"{metric}-{family}" if family else metric,
            )
            where = f", {family} arrivals" if family else ""
            figures.append(Figure(title=f"{title}{where}", svg=svg, caption=caption))
    for load in _single_loads(rated):
        (metric, label), reference = THROUGHPUT, None
        if any(rated.find(name, load, RATIO[0]) is not None for name in rated.policies):
            (metric, label), reference = RATIO, 1.0
        ranking = ranking_plot(rated, load, metric, label, styles, rated.policies, reference)
        if ranking is not None:
            caption = "All policies, best first; bars are 95 % intervals over requests."
            title = f"All policies, {load_name(load)}"
            figures.append(Figure(title=title, svg=ranking, caption=caption))
    return figures


def policy_figures(
    results: Results, focus: str | None, shown: Sequence[str], styles: dict[str, plots.LineStyle]
) -> list[Figure]:
    """What `focus` did: its depths, a timeline, acceptance, and where the time went.

    Args:
        results: rows and series.
        focus: the policy that the report is about.
        shown: it, and a fixed depth to see acceptance by.
        styles: by policy.
    """
    figures = []

    def add(title: str, svg: str | None, caption: str) -> None:
        if svg is not None:
            figures.append(Figure(title=title, svg=svg, caption=caption))

    if focus is not None:
        add(
            "Depth against load",
            plots.depth_heatmap(results, focus),
            "Percent of a sequence's rounds at each depth, by load; columns sum to 100.",
        )
        add(
            "Depth against load and what a sequence shows",
            decision_map(results, focus),
            "Mean tokens drafted, and beneath it the share of the load's decisions. Sequences with nothing "
            "on offer are left out: they cannot draft.",
        )
    for load in dict.fromkeys(name.split("|")[1] for name in results.series if _is_timeline(name)):
        found = timeline_plot(results, load, styles)
        if found is not None:
            svg, policies = found
            add(
                f"Batch, KV use and depth over time, {load_name(load)}",
                svg,
                f"{' and '.join(policies)} on the same requests, means over equal stretches of time.",
            )
    add(
        "Acceptance by position",
        plots.acceptance_plot(results, shown, styles),
        "Share of drafted tokens accepted among those that were reached (all before them accepted). An "
        "adaptive policy goes deep where it expects acceptance, so its later positions are a "
        "favourable sample; a fixed depth shows them all.",
    )
    add(
        "Acceptance by depth",
        plots.acceptance_plot(
            results,
            shown,
            styles,
            by="depth",
            x_label="tokens drafted in a round",
            y_label="accepted, of those drafted",
        ),
        "Accepted over drafted tokens in the rounds of a sequence that drafted as many. A fixed depth has "
        "shallow rounds only where little was on offer.",
    )
    off = [name for name in results.policies if name == "off"]
    add(
        "Where the time goes",
        plots.time_plot(results, [*shown[:1], *off]),
        '"schedule" is the depth decision with its features; "other" is bookkeeping.',
    )
    return figures


def curve_figures(results: Results) -> list[Figure]:
    """Series that are no timelines, such as a learning curve."""
    return [
        Figure(
            title=name.replace("_", " ").capitalize(),
            svg=plots.series_plot(name, series),
            caption="",
        )
        for name, series in results.series.items()
        if series.x and not _is_timeline(name)
    ]


def _is_timeline(name: str) -> bool:
    return name.startswith("timeline|")


def _families(results: Results) -> dict[str, tuple[list[plots.LoadPoint], str]]:
    """Loads that form an axis, and its label; by kind of arrivals, "" for constant concurrency.

    Two loads at least, or there is no line to draw.
    """
    found: dict[str, list[plots.LoadPoint]] = {"": []}
    for load in results.loads:
        if isinstance(load, int):
            found[""].append((float(load), load))
        elif match := re.fullmatch(r"(\w+) (\d+)", load):
            found.setdefault(match.group(1), []).append((float(match.group(2)), load))
    labels = {
        family: "load that the arrival rate fills without speculation"
        if family
        else "load (concurrent sequences)"
        for family in found
    }
    return {
        family: (sorted(loads), labels[family]) for family, loads in found.items() if len(loads) > 1
    }


def _single_loads(results: Results) -> list[int | str]:
    """Loads that are on no axis."""
    drawn = {load for loads, _ in _families(results).values() for _, load in loads}
    return [load for load in results.loads if load not in drawn]


def _has(results: Results, policy: str, metric: str, loads: Sequence[plots.LoadPoint]) -> bool:
    return any(results.find(policy, load, metric) is not None for _, load in loads)
