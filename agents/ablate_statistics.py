"""Statistics over training seeds and loads: interquartile mean, probability of improvement, intervals.

The definitions are those of rliable [Agarwal et al. 2021, arXiv 2108.13264], in numpy: rliable 1.2 draws its
resamples from numpy's global generator, whatever `random_state` says, so its intervals cannot be
repeated, and brings statsmodels and pandas with it. Legend: N runs (seeds), M tasks (loads), B resamples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specdepth.scheduler.state import Floats

from .intervals import CONFIDENCE, Interval

NUM_RESAMPLES = 5000
TRIM = 0.25
"""Share cut off at each end by the interquartile mean."""


def interquartile_mean(scores: ArrayLike) -> Floats:
    """Mean of the middle half of all scores of runs and tasks together.

    As `scipy.stats.trim_mean` does, a quarter of the count, rounded down, is cut off at each end. A
    task on which every run fails can fall into the part that is cut off: look at each load, too.

    Args:
        scores: [..., N, M].

    Returns:
        [...]
    """
    array = np.asarray(scores, np.float64)
    flat = np.sort(array.reshape(*array.shape[:-2], -1), axis=-1)
    cut = int(TRIM * flat.shape[-1])
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(-1))


def probability_of_improvement(scores: ArrayLike, others: ArrayLike) -> Floats:
    """Chance that a run of one is better than a run of the other on the same task, mean over tasks.

    The Mann-Whitney statistic over the number of pairs: each run against each, equal scores count as
    half.

    Args:
        scores: [..., N, M] of the one, higher is better.
        others: [..., N', M] of the other.

    Returns:
        [...]
    """
    x = np.asarray(scores, np.float64)[..., :, None, :]
    y = np.asarray(others, np.float64)[..., None, :, :]
    return np.asarray(((x > y) + 0.5 * (x == y)).mean(axis=(-3, -2, -1)))


def iqm_interval(scores: ArrayLike, seed: int = 0, *, whole_runs: bool = False) -> Interval:
    """Interquartile mean with its percentile interval.

    Args:
        scores: [N, M].
        seed: of the resampling.
        whole_runs: resample runs with all their tasks. Without, the bootstrap is rliable's stratified
            one, which draws runs anew for each task. That is right where every task had training runs
            of its own; one policy judged at several loads is good or bad at all of them together, and
            then the interval of whole runs is the one that covers another set of seeds.

    Raises:
        ValueError: scores that are not [N, M] or not finite.
    """
    array = _matrix(scores)
    rng = np.random.default_rng(seed)
    samples = _resampled(array, rng, whole_runs)
    return _interval(float(interquartile_mean(array)), interquartile_mean(samples), len(array))


def improvement_interval(scores: ArrayLike, others: ArrayLike, seed: int = 0) -> Interval:
    """Probability of improvement with its stratified interval; both sides are resampled.

    Args:
        scores: [N, M] of the one.
        others: [N', M] of the other.
        seed: of the resampling.

    Raises:
        ValueError: scores that are no matrices over the same tasks, or not finite.
    """
    x, y = _matrix(scores), _matrix(others)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"both need scores on the same tasks, got {x.shape[1]} and {y.shape[1]}.")
    rng = np.random.default_rng(seed)
    samples = probability_of_improvement(_resampled(x, rng), _resampled(y, rng))
    value = float(probability_of_improvement(x, y))
    return _interval(value, samples, min(len(x), len(y)))


def _matrix(scores: ArrayLike) -> Floats:
    array = np.asarray(scores, np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"expected finite scores [runs, tasks], got an array of {array.shape}.")
    return array


def _resampled(scores: Floats, rng: np.random.Generator, whole_runs: bool = False) -> Floats:
    """[B, N, M] runs drawn with replacement."""
    num_runs, num_tasks = scores.shape
    size = (NUM_RESAMPLES, num_runs, 1 if whole_runs else num_tasks)
    picks: NDArray[np.int64] = rng.integers(num_runs, size=size)
    return np.asarray(scores[picks, np.arange(num_tasks)])


def _interval(value: float, samples: Floats, num_runs: int) -> Interval:
    if num_runs < 2:
        return Interval(value, np.nan, np.nan)
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))
