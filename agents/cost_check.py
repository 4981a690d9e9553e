"""Predicted against live round times: `check_cost`, and how its result is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdepth.decoder.cost_error import MEDIAN_BAR, P95_BAR, CostError, measure_cost_error
from specdepth.decoder.pass_noise import measure_noise
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.cost import CostModel

from .evaluate import timed_by_work
from .tables import Grid


def check_cost(
    decoder: SpeculativeDecoder,
    cost: CostModel,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    seed: int = 0,
    repeats: int = 1,
    progress: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
) -> CostError:
    """Compare predicted with live rounds on the clock that `measure_cost` reads.

    Args:
        decoder: idle.
        cost: what predicts.
        prompts: token lists that nothing was tuned on.
        seconds: wall time to spend.
        seed: of prompts and depths.
        repeats: times that each round is measured, see `measure_cost_error`.
        progress: called with the share that is done.
        probe: see `measure_cost_error`.
    """
    with timed_by_work(decoder):
        return measure_cost_error(
            decoder.engine,
            cost,
            prompts,
            seconds=seconds,
            seed=seed,
            repeats=repeats,
            probe=probe,
            progress=progress,
        )


def check_noise(
    decoder: SpeculativeDecoder,
    seconds: float,
    seed: int = 0,
    probe: Callable[[], float] | None = None,
    progress: Callable[[float], None] | None = None,
) -> CostError:
    """What a cost model that knew each shape's median would still be off by, on this machine now."""
    with timed_by_work(decoder):
        return measure_noise(
            decoder.runner, seconds=seconds, seed=seed, probe=probe, progress=progress
        )


def error_values(error: CostError, noise: CostError) -> dict[str, float | int | bool]:
    """The figures of a check, for JSON."""
    return {
        "median": round(error.median, 5),
        "p95": round(error.p95, 5),
        "bias": round(error.bias, 5),
        "n": len(error),
        "is_within_bars": error.is_within_bars,
        "noise_median": round(noise.median, 5),
        "noise_p95": round(noise.p95, 5),
    }


def describe_error(error: CostError, noise: CostError) -> str:
    """Two sentences on a check, and on what no model could predict."""
    verdict = "within" if error.is_within_bars else "NOT within"
    return (
        f"Held-out error of predicted round times over {len(error)} live rounds: median "
        f"{100 * error.median:.1f} %, p95 {100 * error.p95:.1f} % (bias {100 * error.bias:+.1f} %); "
        f"{verdict} the bars of {100 * MEDIAN_BAR:g} and {100 * P95_BAR:g} %, which hold for a quiet "
        f"machine. Here, passes of one shape are off their own median by {100 * noise.median:.1f} % "
        f"(median) and {100 * noise.p95:.1f} % (p95)."
    )


def error_grid(error: CostError) -> Grid:
    """Errors by the number of decoding sequences, and of rounds with and without prompts in them."""
    groups = {"all rounds": error, "without prefill": error.where(error.num_prefill_tokens == 0)}
    groups["with prefill"] = error.where(error.num_prefill_tokens > 0)
    low = 1
    while low <= error.num_running.max():
        high = 2 * low - 1
        name = f"{low} sequence" if low == 1 else f"{low}-{high} sequences"
        inside = (error.num_running >= low) & (error.num_running <= high)
        groups[name] = error.where(inside)
        low *= 2
    rows = tuple(
        (
            name,
            str(len(one)),
            f"{1e3 * float(np.median(one.measured_s)):.1f}",
            f"{100 * one.median:.1f}",
            f"{100 * one.p95:.1f}",
            f"{100 * one.bias:+.1f}",
        )
        for name, one in groups.items()
        if len(one)
    )
    header = ("", "rounds", "median ms", "median error (%)", "p95 (%)", "bias (%)")
    return Grid(title="Predicted against live rounds", header=header, rows=rows)
