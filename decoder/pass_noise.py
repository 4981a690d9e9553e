"""How far single passes are off the median of their own shape: what the best cost model would still miss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .cost_error import CostError
from .profiler import PassTimer

NUM_SEQS = (1, 4, 16, 32)
QUERY_TOKENS = 4
CONTEXT = 256
"""Context of each sequence, and tokens of the prompt that joins every second shape."""
MIN_SWEEPS = 5


def measure_noise(
    timer: PassTimer,
    *,
    seconds: float,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostError:
    """Time a few shapes of passes again and again, and predict each by its own median.

    Args:
        timer: idle; as in `profiler.profile`.
        seconds: wall time to spend; `MIN_SWEEPS` passes of each shape are timed at least.
        seed: of the order of passes.
        progress: called with the share of the time that is over, 0..1.
        probe: as in `measure_cost_error`; times are taken to the speed of its median.
        clock: wall time in seconds, for the budget only.
    """
    shapes = [
        (num_seqs, prompt)
        for num_seqs in NUM_SEQS
        for prompt in (0, CONTEXT)
        if num_seqs + bool(prompt) <= timer.max_num_seqs
        and num_seqs * QUERY_TOKENS + prompt <= timer.max_pass_tokens
        and (num_seqs + bool(prompt)) * CONTEXT <= timer.max_kv_tokens
    ]
    rng, start = np.random.default_rng(seed), clock()
    rows: list[tuple[int, float, float]] = []
    sweeps = 0
    while sweeps < MIN_SWEEPS or clock() - start < seconds:
        for index in rng.permutation(len(shapes)).tolist():
            num_seqs, prompt = shapes[index]
            queries = (QUERY_TOKENS,) * num_seqs + (prompt,) * bool(prompt)
            num_rows = num_seqs * QUERY_TOKENS + bool(prompt)
            taken_s = timer.time_pass(queries, (CONTEXT,) * len(queries), num_rows)
            rows.append((index, taken_s, math.nan if probe is None else probe()))
            if progress is not None:
                progress(min((clock() - start) / seconds, 1.0))
        sweeps += 1
    columns = np.array(rows, np.float64).T
    shape = columns[0].astype(np.int64)
    measured = CostError(
        columns[1],
        columns[1],
        np.array([num_seqs for num_seqs, _ in shapes])[shape],
        np.array([prompt for _, prompt in shapes])[shape],
        None if probe is None else columns[2],
    )
    measured = measured.at_speed(float(np.median(columns[2])))
    medians = [np.median(measured.measured_s[shape == index]) for index in range(len(shapes))]
    return replace(measured, predicted_s=np.array(medians)[shape])
