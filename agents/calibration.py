"""How good estimates of survival are: Brier score, log loss, calibration error, reliability diagram.

All take chances [M, K] that the first j drafted tokens are accepted, whether they would have been, and
which of those tokens were on offer. Every depth's outcome counts, drafted or not, so the scores do not
depend on what a rule would have asked for.

Legend: M rows, K deepest depth, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Bools, Floats

from .plots import BLUE, GREEN, GREY, ORANGE, RED, Drawing

NUM_BINS = 15
"""Bins of equal width, as in Guo et al. 2017."""
_SMALLEST = 1e-6
"""Chances are kept so far from 0 and 1 in the log loss, or one surprise would be infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Predictions of about the same size."""

    predicted: float
    """Their mean."""
    observed: float
    """Share of them that came true."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Scores of cumulative survival at one depth, or over all."""

    depth: int | None
    """j; None is all depths together."""
    count: int
    """Predictions."""
    base_rate: float
    """Share that survived."""
    brier: float
    """Mean squared error [Brier 1950]; 0 is perfect."""
    log_loss: float
    """Mean cross-entropy in nats."""
    calibration_error: float
    """Expected calibration error: mean distance between chance and frequency over bins, weighed by their
    size [Guo et al. 2017, arXiv 1706.04599, eq. 3]."""
    bins: tuple[ReliabilityBin, ...]
    """Reliability diagram; empty bins are left out."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the bins."""
        return {
            "depth": self.depth,
            "count": self.count,
            "base_rate": self.base_rate,
            "brier": self.brier,
            "log_loss": self.log_loss,
            "calibration_error": self.calibration_error,
        }


def calibrate(
    chances: NDArray[np.floating[Any]],
    survived: Bools,
    offered: Bools,
    depths: Sequence[int] | None = None,
) -> tuple[Calibration, ...]:
    """Score chances at some depths, and over all of them last.

    Args:
        chances: [M, K] in 0..1.
        survived: [M, K] outcomes.
        offered: [M, K] which of them count.
        depths: from 1 to K; all by default. A depth that nobody was offered is left out.

    Raises:
        ValueError: shapes that differ, chances outside 0..1, nothing on offer.
    """
    if not chances.shape == survived.shape == offered.shape or chances.ndim != 2:
        raise ValueError(
            "calibration needs chances, outcomes and offers of one shape [M, K], got "
            f"{chances.shape}, {survived.shape} and {offered.shape}."
        )
    inside = (chances >= 0) & (chances <= 1)
    if not inside[offered].all():
        raise ValueError("a chance of survival is outside 0..1.")
    if not offered.any():
        raise ValueError("there is nothing to score: no token was on offer.")
    depths = range(1, chances.shape[1] + 1) if depths is None else depths
    columns = [(depth, np.s_[:, depth - 1]) for depth in depths if offered[:, depth - 1].any()]
    scores = [
        _score(depth, chances[at][offered[at]], survived[at][offered[at]]) for depth, at in columns
    ]
    return (*scores, _score(None, chances[offered], survived[offered]))


def _score(depth: int | None, chances: NDArray[np.floating[Any]], survived: Bools) -> Calibration:
    chance, came_true = chances.astype(np.float64), survived.astype(np.float64)
    safe = np.clip(chance, _SMALLEST, 1 - _SMALLEST)
    bins = reliability(chance, came_true)
    gaps = sum(one.count * abs(one.predicted - one.observed) for one in bins)
    return Calibration(
        depth=depth,
        count=len(chance),
        base_rate=float(came_true.mean()),
        brier=float(np.square(chance - came_true).mean()),
        log_loss=float(-np.where(survived, np.log(safe), np.log1p(-safe)).mean()),
        calibration_error=gaps / len(chance),
        bins=bins,
    )


def reliability(
    chances: Floats, outcomes: Floats, num_bins: int = NUM_BINS
) -> tuple[ReliabilityBin, ...]:
    """Group predictions into bins of equal width, 1 in the last one.

    Args:
        chances: [M] in 0..1.
        outcomes: [M] 0 or 1.
        num_bins: B.
    """
    number = np.minimum((chances * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(number, minlength=num_bins)
    predicted = np.bincount(number, chances, num_bins)
    observed = np.bincount(number, outcomes, num_bins)
    return tuple(
        ReliabilityBin(
            predicted=float(predicted[b] / counts[b]),
            observed=float(observed[b] / counts[b]),
            count=int(counts[b]),
        )
        for b in np.flatnonzero(counts)
    )


def reliability_plot(scores: Mapping[str, Calibration], title: str) -> str:
    """Reliability diagram as inline SVG: observed against predicted, a line a name.

    Markers grow with the number of predictions behind them.
    """
    with Drawing(5.0, 4.2) as page:
        axes = page.axes
        axes.plot([0, 1], [0, 1], color=GREY, ls="--", lw=1, label="perfect")
        for i, (name, score) in enumerate(scores.items()):
            predicted = [one.predicted for one in score.bins]
            observed = [one.observed for one in score.bins]
            shares = np.array([one.count for one in score.bins]) / score.count
            color = (RED, BLUE, ORANGE, GREEN)[i % 4]
            label = f"{name} (error {score.calibration_error:.3f})"
            axes.plot(
                predicted, observed, color=color, ls=("-", "--", ":", "-.")[i % 4], label=label
            )
            axes.scatter(
                predicted, observed, s=8 + 300 * shares, color=color, marker="os^D"[i % 4], zorder=3
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("predicted survival")
        axes.set_ylabel("observed survival")
        axes.legend(loc="upper left")
        return page.svg("reliability", title)
