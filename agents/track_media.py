"""What a run shows besides numbers: histograms and a map of depths, and tables of results."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdepth.scheduler.state import Floats

from .results import ResultRow, Results

if TYPE_CHECKING:
    from wandb import Histogram, Image, Table

DepthCounts = Mapping[int | str, Floats]
"""By load: how often each depth 0..K was chosen, float64 [K + 1]."""

ROW_COLUMNS = ("policy", "load", "metric", "value", "unit", "ci_low", "ci_high")
LOAD_METRICS = (
    "throughput_tok_s",
    "speedup",
    "ratio_to_best_fixed",
    "ratio_to_table",
    "oracle_gap_closed",
    "mean_depth",
    "acceptance_length",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "ttft_p99_ms",
    "policy_ms",
)
"""Columns of the table by load, those of them that there are."""


def depth_counts(results: Results, policy: str) -> dict[int | str, Floats]:
    """How often a policy drafted to each depth, from its `depth_K_share` and `sequence_rounds` rows."""
    shares: dict[int | str, dict[int, float]] = {}
    for row in results.rows:
        match = re.fullmatch(r"depth_(\d+)_share", row.metric)
        if match and row.policy == policy:
            shares.setdefault(row.load, {})[int(match.group(1))] = row.value
    size = 1 + max((max(one) for one in shares.values()), default=0)
    counts = {}
    for load in results.loads:
        rounds = results.find(policy, load, "sequence_rounds")
        if load in shares and rounds is not None:
            found = np.array([shares[load].get(depth, 0.0) for depth in range(size)])
            counts[load] = np.round(found * rounds.value)
    return counts


def depth_histograms(counts: DepthCounts) -> dict[str, Histogram]:
    """A histogram with a bin for each depth, of every load ("depths/at_4") and of all ("depths/all")."""
    import wandb

    named = {f"depths/at_{load}": one for load, one in counts.items()}
    named["depths/all"] = np.sum(list(counts.values()), axis=0)
    return {
        name: wandb.Histogram(np_histogram=(one.tolist(), (np.arange(len(one) + 1) - 0.5).tolist()))
        for name, one in named.items()
    }


def depth_image(counts: DepthCounts, policy: str) -> Image:
    """Percent of the choices at each depth, a column a load; depth upwards."""
    import wandb
    from PIL.Image import open as open_image

    from .plots import Drawing

    loads = list(counts)
    shares = np.stack([counts[load] / max(counts[load].sum(), 1.0) for load in loads], axis=1)
    with Drawing(1.6 + 0.6 * len(loads), 1.2 + 0.28 * len(shares)) as page:
        axes, buffer = page.axes, io.BytesIO()
        axes.grid(False)
        axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
        for (depth, column), share in np.ndenumerate(shares):
            color = "white" if share > 0.5 else "#222222"
            text = f"{100 * share:.0f}"
            axes.text(column, depth, text, ha="center", va="center", color=color, fontsize=9)
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.set_yticks(range(len(shares)))
        axes.set_xlabel("load")
        axes.set_ylabel("depth (tokens)")
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight", facecolor="white")
    buffer.seek(0)
    return wandb.Image(open_image(buffer), caption=f"{policy}: percent of choices at each depth")


def row_table(rows: Sequence[ResultRow]) -> Table:
    """Every number, a line each, as in the results file."""
    return _table(
        ROW_COLUMNS,
        [
            (row.policy, str(row.load), row.metric, row.value, row.unit, row.ci_low, row.ci_high)
            for row in rows
        ],
    )


def load_table(results: Results) -> Table:
    """A line for each policy and load, a column for each of `LOAD_METRICS` that there is."""
    known = {(row.policy, row.load, row.metric): row.value for row in results.rows}
    metrics = [name for name in LOAD_METRICS if any(key[2] == name for key in known)]
    return _table(
        ("policy", "load", *metrics),
        [
            (policy, str(load), *(known.get((policy, load, name)) for name in metrics))
            for policy in results.policies
            for load in results.loads
            if any((policy, load, name) in known for name in metrics)
        ],
    )


def _table(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> Table:
    import wandb

    # Loads are numbers and names: W&B wants a column of one kind.
    values = [
        [float(value) if isinstance(value, int) else value for value in line] for line in lines
    ]
    return wandb.Table(columns=list(columns), data=values)
