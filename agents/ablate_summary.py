"""What a grid says: each variant over seeds and loads, as rows of results, tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .ablate import Ablation
from .ablate_grid import BASE
from .ablate_statistics import improvement_interval, iqm_interval
from .ablate_table import RATIO, REFERENCE, SPEEDUP, TidyRow, loads_of, score_matrix
from .comparison import fixed_depths
from .intervals import Interval
from .load_runs import load_name
from .results import ResultRow
from .tables import Grid

ALL_LOADS = "all loads"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantSummary:
    """One variant, or one rule, over all seeds and loads. Scores are ratios to the best fixed depth."""

    variant: str
    dimension: str
    num_seeds: int
    iqm: Interval
    """Interquartile mean, with rliable's stratified interval."""
    iqm_whole_runs: Interval
    """The same, with an interval over whole seeds."""
    improvement: Interval | None
    """Chance to be better than the base; None for the base itself."""
    by_load: dict[int | str, Interval]
    """Interquartile mean over seeds."""
    worst_vs_off: float
    """Lowest speedup over off, over seeds and loads."""

    @property
    def worst_load(self) -> int | str:
        """Where the score is lowest."""
        return min(self.by_load, key=lambda load: self.by_load[load].value)


def summarise(rows: Sequence[TidyRow], seed: int = 0) -> list[VariantSummary]:
    """Summaries of the rules, then of the variants that have a run, in the order of `rows`.

    Args:
        rows: of `tidy_rows`.
        seed: of the resampling.
    """
    loads = loads_of(rows)
    base = score_matrix(rows, BASE, loads) if (BASE, BASE) in _names(rows) else None
    found = []
    for variant, dimension in _names(rows):
        scores = score_matrix(rows, variant, loads)
        better = None
        if base is not None and variant != BASE:
            better = improvement_interval(scores, base, seed)
        speedups = [r.value for r in rows if r.variant == variant and r.metric == SPEEDUP]
        found.append(
            VariantSummary(
                variant=variant,
                dimension=dimension,
                num_seeds=len(scores),
                iqm=iqm_interval(scores, seed),
                iqm_whole_runs=iqm_interval(scores, seed, whole_runs=True),
                improvement=better,
                by_load={
                    load: iqm_interval(scores[:, [column]], seed)
                    for column, load in enumerate(loads)
                },
                worst_vs_off=min(speedups),
            )
        )
    return found


def result_rows(summaries: Sequence[VariantSummary]) -> list[ResultRow]:
    """Summaries in the house format: the variant as policy, interquartile means over seeds as values."""
    rows = []

    def add(policy: str, load: int | str, metric: str, value: Interval, unit: str = "x") -> None:
        low, high = value.bounds
        rows.append(
            ResultRow(
                policy=policy,
                load=load,
                metric=metric,
                value=value.value,
                unit=unit,
                ci_low=low,
                ci_high=high,
            )
        )

    for one in summaries:
        for load, interval in one.by_load.items():
            add(one.variant, load, RATIO, interval)
        add(one.variant, ALL_LOADS, "iqm", one.iqm)
        add(one.variant, ALL_LOADS, "iqm_whole_seeds", one.iqm_whole_runs)
        worst = Interval(one.worst_vs_off, np.nan, np.nan)
        add(one.variant, ALL_LOADS, "worst_speedup", worst)
        if one.improvement is not None:
            add(one.variant, ALL_LOADS, "probability_of_improvement", one.improvement, "share")
    return rows


def summary_grid(summaries: Sequence[VariantSummary]) -> Grid:
    """A line a variant, with its dimension."""
    rows = tuple(
        (
            one.variant,
            one.dimension,
            f"{one.num_seeds}",
            shown(one.iqm),
            bounds(one.iqm_whole_runs),
            "" if one.improvement is None else shown(one.improvement, 2),
            f"{one.by_load[one.worst_load].value:.3f} at {load_name(one.worst_load)}",
            f"{one.worst_vs_off:.3f}",
        )
        for one in summaries
    )
    header = (
        *("variant", "dimension", "seeds", "IQM (x best fixed)", "by whole seeds"),
        *("P(better)", "lowest load", "lowest x off"),
    )
    return Grid(title="Variants over seeds and loads", header=header, rows=rows)


def load_grid(summaries: Sequence[VariantSummary]) -> Grid:
    """Interquartile mean over seeds, a line a variant and a column a load; the best stressed."""
    loads = list(summaries[0].by_load) if summaries else []
    rows = tuple((s.variant, *(shown(s.by_load[load]) for load in loads)) for s in summaries)
    best = []
    for column, load in enumerate(loads, 1):
        top = max(s.by_load[load].value for s in summaries)
        best += [(r, column) for r, s in enumerate(summaries) if s.by_load[load].value == top]
    header = ("variant", *(f"{load_name(load)} (x)" for load in loads))
    return Grid(title="Ratio to the best fixed depth", header=header, rows=rows, best=tuple(best))


def notes_of(ablation: Ablation) -> list[str]:
    """What a reader should know: how much was run, and what does not compare."""
    grid, done = ablation.grid, ablation.done
    minutes = [one.training["elapsed_s"] / 60 for one in done.values()]
    notes = [
        f"{len(done)} of {len(grid.all_variants) * len(grid.seeds)} runs, "
        f"{min(minutes):.1f} to {max(minutes):.1f} minutes of training each. Replay is exact for the "
        "held-out requests, so intervals are over training seeds alone, not over requests."
    ]
    notes += [f"Failed: {title}: {sentence}" for title, sentence in ablation.failures.items()]
    short = [cell for cell, one in done.items() if one.training["short"]]
    if short:
        names = ", ".join(dict.fromkeys(variant for variant, _ in short))
        notes.append(
            f"{len(short)} runs of {names} were cut by the wall limit, in their warm start or before their "
            "timesteps: they had less training than the others. Repeat them with more --minutes or fewer "
            "--timesteps."
        )
    counts = {one.training["timesteps"] for one in done.values()}
    if len(counts) > 1:
        notes.append(
            "Not all runs had the same number of timesteps: "
            f"{min(counts):,.0f} to {max(counts):,.0f}; compare within a dimension only where they had."
        )
    if len({one.git_sha for one in (ablation.references, *done.values())}) > 1:
        notes.append("Runs come from different commits of the code.")
    return notes


def shown(interval: Interval, digits: int = 3) -> str:
    """A value with its interval, if it has one."""
    text = f"{interval.value:.{digits}f}"
    return text if np.isnan(interval.low) else f"{text} {bounds(interval, digits)}"


def bounds(interval: Interval, digits: int = 3) -> str:
    """An interval alone; nothing if there is none."""
    if np.isnan(interval.low):
        return ""
    return f"[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def _names(rows: Sequence[TidyRow]) -> list[tuple[str, str]]:
    """Variants with their dimensions; fixed depths, which the scores are ratios to, are left out."""
    names = dict.fromkeys((row.variant, row.dimension) for row in rows)
    return [one for one in names if one[1] != REFERENCE or not fixed_depths(one[:1])]
