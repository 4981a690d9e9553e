"""Bootstrap intervals of means and paired ratios; plain numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95

_Estimate = Callable[[NDArray[np.int64]], NDArray[np.float64]]


class Interval(NamedTuple):
    """An estimate with its percentile bootstrap interval."""

    value: float
    low: float
    """NaN when a single observation says nothing about spread."""
    high: float

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """`low` and `high` as a result row takes them."""
        return (None, None) if math.isnan(self.low) else (self.low, self.high)


def paired_ratio(
    a: ArrayLike,
    b: ArrayLike,
    seed: int = 0,
    *,
    statistic: Literal["total", "median"] = "total",
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Return a / b with its interval, from pairs measured under the same conditions.

    Pairs are resampled together, so noise that both sides share cancels. Below about 8 pairs a
    percentile interval is too narrow; resample the finest independent unit there is (requests or
    interleaved blocks, not whole runs).

    Args:
        a: [n] positive.
        b: [n] positive, in the order of `a`.
        seed: of the resampling.
        statistic: "total" is sum(a) / sum(b), right for equal work; "median" is the median of
            a / b, robust against a noisy machine.
        confidence: of the interval.
        num_resamples: bootstrap samples.

    Raises:
        ValueError: different or empty lengths, or a number that is not finite and positive.
    """
    above, below = _positive("a", a), _positive("b", b)
    if above.shape != below.shape:
        raise ValueError(f"paired_ratio needs pairs, got {len(above)} and {len(below)} numbers.")

    def estimate(index: NDArray[np.int64]) -> NDArray[np.float64]:
        if statistic == "total":
            return np.asarray(above[index].sum(-1) / below[index].sum(-1))
        return np.asarray(np.median(above[index] / below[index], axis=-1))

    return _bootstrap(estimate, len(above), seed, confidence, num_resamples)


def mean_interval(
    values: ArrayLike,
    seed: int = 0,
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Mean of [n] finite numbers with its interval.

    Raises:
        ValueError: no numbers, or one that is not finite.
    """
    array = np.asarray(values, np.float64).ravel()
    if not len(array) or not np.isfinite(array).all():
        raise ValueError("mean_interval needs at least one number, and finite ones.")
    return _bootstrap(
        lambda index: np.asarray(array[index].mean(-1)),
        len(array),
        seed,
        confidence,
        num_resamples,
    )


def geometric_mean(values: ArrayLike) -> float:
    """Mean of ratios that treats a factor up and the same factor down alike."""
    return float(np.exp(np.log(_positive("values", values)).mean()))


def _bootstrap(
    estimate: _Estimate, size: int, seed: int, confidence: float, num_resamples: int
) -> Interval:
    value = float(estimate(np.arange(size)))
    if size < 2:
        return Interval(value, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    samples = estimate(rng.integers(size, size=(num_resamples, size)))
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def _positive(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64).ravel()
    if not len(array) or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must hold at least one number, all finite and above 0.")
    return array
