"""`tuned_table`: the batch-size table that a sweep of fixed depths over loads calls for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from .table import OPEN_END, TableDepth


def tuned_table(
    sweep: Mapping[int, Mapping[int, float]],
    *,
    boundaries: Literal["midpoint", "inherit"] = "midpoint",
    monotone: bool = False,
) -> TableDepth:
    """Return the table of the depths with the best throughput at each load.

    This is how the tables of vLLM and SGLang are meant to be made: measure each depth at each
    batch size offline and take the best. Of equally good depths the shallowest wins.

    Args:
        sweep: load (running sequences) to depth to throughput, any unit; the same depths at each.
        boundaries: where a load's depth ends: "midpoint" is halfway to the next load on a log scale,
            "inherit" just before the next load, as vLLM fills gaps.
        monotone: depths that never rise with load: of those tables the one with the best geometric
            mean of throughput over the loads. Takes the noise out of short sweeps.

    Raises:
        ValueError: an empty sweep, loads with different depths, loads below 1, depths below 0, or a
            throughput that is not positive and finite.
    """
    loads = sorted(sweep)
    depths = _checked(sweep, loads)
    scores = [[math.log(sweep[load][depth]) for depth in depths] for load in loads]
    picks = _falling(scores) if monotone else [row.index(max(row)) for row in scores]
    ends = [
        (math.isqrt(load * after) if boundaries == "midpoint" else after - 1)
        for load, after in pairwise(loads)
    ]
    ranges: list[tuple[int, int, int]] = []
    low = 1
    for pick, high in zip(picks, [*ends, OPEN_END], strict=True):
        depth = depths[pick]
        if ranges and ranges[-1][2] == depth:
            ranges[-1] = (ranges[-1][0], high, depth)
        else:
            ranges.append((low, high, depth))
        low = high + 1
    return TableDepth(ranges)


def _falling(scores: list[list[float]]) -> list[int]:
    """Columns, one a row, that never rise and have the largest sum."""
    size = len(scores[0])
    # best[c]: largest sum of the rows so far with column c or more in the last one, and where it is.
    best = [0.0] * size
    choices: list[list[int]] = []
    for row in scores:
        best = [sum_before + score for sum_before, score in zip(best, row, strict=True)]
        choice = list(range(size))
        for column in range(size - 2, -1, -1):
            if best[column + 1] > best[column]:
                best[column], choice[column] = best[column + 1], choice[column + 1]
        choices.append(choice)
    picks, floor = [], 0
    for choice in reversed(choices):
        floor = choice[floor]
        picks.append(floor)
    return picks[::-1]


def _checked(sweep: Mapping[int, Mapping[int, float]], loads: list[int]) -> list[int]:
    if not loads:
        raise ValueError("the sweep is empty; run some fixed depths at some loads first.")
    if loads[0] < 1:
        raise ValueError(f"loads of a sweep are running sequences, 1 or more, got {loads[0]}.")
    depths = sorted(sweep[loads[0]])
    for load in loads:
        if sorted(sweep[load]) != depths or not depths or depths[0] < 0:
            raise ValueError(
                f"the sweep needs the same depths of 0 or more at each load, got {depths} at load "
                f"{loads[0]} and {sorted(sweep[load])} at load {load}."
            )
        for depth, throughput in sweep[load].items():
            if not 0 < throughput < math.inf:
                raise ValueError(
                    f"throughput at load {load}, depth {depth} is not positive: {throughput}."
                )
    return depths
