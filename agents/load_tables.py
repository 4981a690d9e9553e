"""Tables of a report in which the best is stressed that a deployment can reach: oracles do not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .highlights import is_oracle
from .load_runs import load_name
from .results import Results
from .tables import Grid, metric_grid

_COLUMNS = (
    ("throughput_tok_s", "throughput (tok/s)", 1, max),
    ("speedup", "ratio to off (x)", 2, max),
    ("ratio_to_best_fixed", "ratio to best fixed (x)", 3, max),
    ("ratio_to_table", "ratio to tuned table (x)", 3, max),
    ("oracle_gap_closed", "oracle gap closed (share)", 2, max),
    ("goodput_tok_s", "goodput (tok/s)", 1, max),
    ("tpot_p50_ms", "TPOT p50 (ms)", 1, min),
    ("tpot_p95_ms", "TPOT p95 (ms)", 1, min),
    ("tpot_p99_ms", "TPOT p99 (ms)", 1, min),
    ("ttft_p50_ms", "TTFT p50 (ms)", 0, min),
    ("ttft_p95_ms", "TTFT p95 (ms)", 0, min),
    ("ttft_p99_ms", "TTFT p99 (ms)", 0, min),
    ("mean_depth", "depth (tokens)", 2, None),
    ("acceptance_length", "acceptance length (tokens)", 2, None),
    ("policy_ms", "time to decide a round (ms)", 3, None),
)
"""Metric, header, digits, and which value is the best."""


def load_grid(results: Results, load: int | str, policies: Sequence[str]) -> Grid:
    """A line a policy, a column a metric; the best of a column that no oracle reached stressed.

    Columns without numbers are left out, and policies without any.
    """
    found = {
        policy: [results.find(policy, load, metric) for metric, *_ in _COLUMNS]
        for policy in policies
    }
    found = {policy: rows for policy, rows in found.items() if any(rows)}
    used = [i for i in range(len(_COLUMNS)) if any(rows[i] for rows in found.values())]
    lines, best = [], []
    for policy, rows in found.items():
        cells = [
            "" if (row := rows[i]) is None else f"{row.value:.{_COLUMNS[i][2]}f}" for i in used
        ]
        lines.append((policy, *cells))
    for column, i in enumerate(used, 1):
        choose = _COLUMNS[i][3]
        known = {
            policy: row.value
            for policy, rows in found.items()
            if (row := rows[i]) is not None and not is_oracle(policy)
        }
        if choose is not None and len(known) > 1:
            top = choose(known.values())
            best += [(r, column) for r, policy in enumerate(found) if known.get(policy) == top]
    header = ("policy", *(_COLUMNS[i][1] for i in used))
    title = load_name(load).capitalize()
    return Grid(title=title, header=header, rows=tuple(lines), best=tuple(best))


def policy_grid(results: Results, metric: str, title: str, unit: str, digits: int = 1) -> Grid:
    """`metric_grid` of all policies, the best of a load among those that are no oracles stressed."""
    grid = metric_grid(results, metric, title, unit, digits)
    rivals = replace(results, rows=tuple(row for row in results.rows if not is_oracle(row.policy)))
    judged = metric_grid(rivals, metric, title, unit, digits)
    if judged.header != grid.header:  # a load that only oracles served
        return replace(grid, best=())
    place = {row[0]: r for r, row in enumerate(grid.rows)}
    return replace(grid, best=tuple((place[judged.rows[r][0]], c) for r, c in judged.best))
