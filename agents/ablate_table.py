"""The tidy table of an ablation: a line for each number of each variant, seed and load."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial

import numpy as np

from specdepth.scheduler.state import Floats

from .ablate import Ablation
from .ablate_run import LEARNED, SEARCHED
from .comparison import OFF, fixed_depths
from .results import ResultRow

THROUGHPUT = "throughput_tok_s"
RATIO = "ratio_to_best_fixed"
"""The score: throughput over that of the fixed depth that was best at this load on these requests."""
SPEEDUP = "speedup"
REFERENCE = "reference"
"""Dimension of rules that need no training."""
TRAINING = "training"
"""Load of what is counted in training."""
COUNTS = ("timesteps", "updates", "rounds", "decisions")


@dataclass(frozen=True, slots=True, kw_only=True)
class TidyRow:
    """A line of the table."""

    variant: str
    dimension: str
    seed: int | None
    """Of the training; None for rules."""
    load: int | str
    metric: str
    value: float
    unit: str
    baseline: str = ""
    """The policy to compare with: the best fixed depth of this load, for "speedup" off."""
    baseline_value: float | None = None
    """Its value of the metric."""


def tidy_rows(ablation: Ablation) -> list[TidyRow]:
    """All numbers: rules first, then variants in the order of the grid, by seed.

    Where a search went before PPO, what it found is a variant of its own, NAME.searched.
    """
    references, rows = ablation.references.rows, list[TidyRow]()
    for name in dict.fromkeys(row.policy for row in references):
        own = [row for row in references if row.policy == name]
        rows += _judged(own, references, name, REFERENCE, None)
    for variant in ablation.grid.all_variants:
        for seed in ablation.grid.seeds:
            done = ablation.done.get((variant.name, seed))
            if done is None:
                continue
            for policy, name in ((LEARNED, variant.name), (SEARCHED, f"{variant.name}.searched")):
                own = [row for row in done.rows if row.policy == policy]
                rows += _judged(own, references, name, variant.dimension, seed)
            rows += [
                TidyRow(
                    variant=variant.name,
                    dimension=variant.dimension,
                    seed=seed,
                    load=TRAINING,
                    metric=name,
                    value=float(done.training[name]),
                    unit="",
                )
                for name in COUNTS
            ]
    return rows


def as_csv(rows: Iterable[TidyRow]) -> str:
    """The table as CSV with a header; what is None stays empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([one.name for one in fields(TidyRow)])
    for row in rows:
        writer.writerow("" if cell is None else cell for cell in astuple(row))
    return text.getvalue()


def score_matrix(rows: Iterable[TidyRow], variant: str, loads: Sequence[int | str]) -> Floats:
    """`RATIO` of a variant, [seeds, loads], seeds in the order of `rows`.

    Raises:
        ValueError: a seed that lacks a load.
    """
    cells: dict[int | None, dict[int | str, float]] = {}
    for row in rows:
        if row.variant == variant and row.metric == RATIO:
            cells.setdefault(row.seed, {})[row.load] = row.value
    for seed, by_load in cells.items():
        if set(by_load) != set(loads):
            raise ValueError(
                f"{variant}, seed {seed} was judged at {list(by_load)}, not {list(loads)}."
            )
    return np.array([[by_load[load] for load in loads] for by_load in cells.values()], np.float64)


def loads_of(rows: Iterable[TidyRow]) -> list[int | str]:
    """Loads that policies were judged at: numbers ascending, then names."""
    loads = dict.fromkeys(row.load for row in rows if row.metric == RATIO)
    numbers = sorted(load for load in loads if isinstance(load, int))
    return [*numbers, *(load for load in loads if isinstance(load, str))]


def best_fixed(references: Iterable[ResultRow]) -> dict[int | str, str]:
    """Name of the fixed depth, off included, with the highest throughput, by load."""
    found: dict[int | str, ResultRow] = {}
    for row in references:
        if row.metric == THROUGHPUT and fixed_depths([row.policy]):
            best = found.setdefault(row.load, row)
            if row.value > best.value:
                found[row.load] = row
    return {load: row.policy for load, row in found.items()}


def _judged(
    own: Iterable[ResultRow],
    references: Sequence[ResultRow],
    variant: str,
    dimension: str,
    seed: int | None,
) -> Iterator[TidyRow]:
    """Lines of one policy: its numbers beside those of the best fixed depth, and ratios."""
    best = best_fixed(references)
    known = {(row.policy, row.load, row.metric): row.value for row in references}
    line = partial(TidyRow, variant=variant, dimension=dimension, seed=seed)
    for row in own:
        yield line(
            load=row.load,
            metric=row.metric,
            value=row.value,
            unit=row.unit,
            baseline=best[row.load],
            baseline_value=known.get((best[row.load], row.load, row.metric)),
        )
        if row.metric == THROUGHPUT:
            for metric, name in ((RATIO, best[row.load]), (SPEEDUP, OFF)):
                yield line(
                    load=row.load,
                    metric=metric,
                    value=row.value / known[name, row.load, THROUGHPUT],
                    unit="x",
                    baseline=name,
                    baseline_value=1.0,
                )
