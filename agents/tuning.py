"""What runs at fixed depths imply: the best table of depths by batch size, and the best single depth.

Text, and with it acceptance, does not depend on the batch. So runs at any load say how much each depth
gets accepted, the cost model says what it costs at each batch size, and the two give a table that is
less noisy than timing each cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from specdepth.scheduler.baselines import TableDepth
from specdepth.scheduler.baselines.table import OPEN_END
from specdepth.scheduler.cost import CostModel

from .comparison import Comparison
from .intervals import geometric_mean


class FixedRun(NamedTuple):
    """What a fixed depth did, over all loads."""

    depth: int
    acceptance_length: float
    """Tokens committed a sequence and round."""
    mean_depth: float
    """Tokens verified a sequence and round; below `depth` where proposals were shorter."""
    draft_passes: float
    """Draft passes a round."""


def fixed_runs(comparison: Comparison) -> list[FixedRun]:
    """The fixed depths of a comparison, "off" included, in order of depth.

    Raises:
        ValueError: there are none.
    """
    found = []
    for name, depth in comparison.fixed_depths.items():
        every = [run.metrics[name] for run in comparison.runs.values()]
        rounds = sum(metrics.num_sequence_rounds for metrics in every)
        found.append(
            FixedRun(
                depth,
                1 + sum(metrics.num_accepted_tokens for metrics in every) / max(rounds, 1),
                sum(metrics.num_drafted_tokens for metrics in every) / max(rounds, 1),
                sum(metrics.num_draft_passes for metrics in every)
                / max(sum(metrics.num_rounds for metrics in every), 1),
            )
        )
    if not found:
        raise ValueError("no fixed depth was run, so they imply no table.")
    return sorted(found)


def implied_table(comparison: Comparison, cost: CostModel, max_num_seqs: int) -> TableDepth:
    """The table of the best predicted throughput, among the depths run, at batch sizes 1, 2, 4, ...

    Each depth holds from halfway to the size below (on a log scale) to halfway to the size above:
    finer ones would follow the noise of the pass times.
    """
    runs = fixed_runs(comparison)
    ranges: list[tuple[int, int, int]] = []
    size, low = 1, 1
    while low <= max_num_seqs:
        best = max(runs, key=lambda run: predicted_tok_s(run, cost, min(size, max_num_seqs))).depth
        high = math.isqrt(2 * size * size)
        if ranges and ranges[-1][2] == best:
            ranges[-1] = (ranges[-1][0], high, best)
        else:
            ranges.append((low, high, best))
        size, low = 2 * size, high + 1
    first, _, depth = ranges[-1]
    return TableDepth([*ranges[:-1], (first, OPEN_END, depth)])


def best_single(comparison: Comparison, cost: CostModel, loads: Sequence[int]) -> str:
    """Name of the fixed depth with the best predicted geometric mean of throughput over `loads`."""

    def score(run: FixedRun) -> float:
        return geometric_mean([predicted_tok_s(run, cost, load) for load in loads])

    depth = max(fixed_runs(comparison), key=score).depth
    return f"fixed:{depth}" if depth else "off"


def predicted_tok_s(run: FixedRun, cost: CostModel, num_seqs: int) -> float:
    """Tokens a second of rounds with so many decoding sequences, by the cost model."""
    seconds = cost.pass_s(num_seqs * (1 + run.mean_depth)) + cost.overhead_s
    seconds += run.draft_passes * cost.draft_pass_s(num_seqs)
    return num_seqs * run.acceptance_length / seconds


def table_name(table: TableDepth) -> str:
    """A table as commands take it: "table:1-2=4,3-8=2,9-=0"."""
    entries = [
        f"{low}-{'' if high == OPEN_END else high}={depth}" for low, high, depth in table.ranges
    ]
    return "table:" + ",".join(entries)
