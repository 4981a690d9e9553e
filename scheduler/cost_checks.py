"""Checks of the numbers in a `CostModel`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

MAX_PASS_TOKENS = 2**20
"""Search limit of `CostModel.knee_tokens` and `free_tokens`, and the largest size in a grid."""
MAX_SECONDS = 1e4
"""Longest pass."""

_MAX_POINTS = 4096
_MAX_DIP = 0.5
"""Kernel staircases make bigger passes cheaper, but never by half: that is a bad measurement."""


def number(name: str, value: Any, top: float) -> float:
    """Return `value` as a float, or refuse what is no number in 0..`top`."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= top:
        raise ValueError(f"cost model: {name} must be a number in 0..{top:g}, got {value!r}.")
    return float(value)


def grid_of(name: str, values: Any) -> tuple[int, ...]:
    """Return sizes of passes as a tuple, or refuse them."""
    if not 0 < len(values) <= _MAX_POINTS:
        raise ValueError(f"cost model: {name} needs 1 to {_MAX_POINTS} points, got {len(values)}.")
    numbers = [number(name, value, MAX_PASS_TOKENS) for value in values]
    grid = tuple(int(value) for value in numbers)
    ascending = all(a < b for a, b in pairwise(grid))
    if grid[0] != 1 or not ascending or any(a != b for a, b in zip(grid, numbers, strict=True)):
        raise ValueError(f"cost model: {name} must be whole numbers, 1 first and then ascending.")
    return grid


def steps_of(name: str, values: Any) -> tuple[int, ...]:
    """Return sizes of captured passes as a tuple, or refuse them; none is fine."""
    if len(values) == 0:
        return ()
    numbers = [number(name, value, MAX_PASS_TOKENS) for value in values]
    steps = tuple(int(value) for value in numbers)
    ascending = all(a < b for a, b in pairwise((0, *steps)))
    if len(steps) > _MAX_POINTS or not ascending or list(steps) != numbers:
        raise ValueError(
            f"cost model: {name} must be at most {_MAX_POINTS} whole numbers above 0, ascending."
        )
    return steps


def times_of(name: str, values: Any, grid_name: str, grid: tuple[int, ...]) -> tuple[float, ...]:
    """Return seconds for each size of `grid`, or refuse them."""
    if len(values) != len(grid):
        raise ValueError(
            f"cost model: {name} has {len(values)} points and {grid_name} {len(grid)}; "
            "they must match."
        )
    times = tuple(number(name, value, MAX_SECONDS) for value in values)
    if min(times) <= 0:
        raise ValueError(f"cost model: {name} must be above 0 s, got {min(times)}.")
    highest = 0.0
    for size, seconds in zip(grid, times, strict=True):
        if seconds < _MAX_DIP * highest:
            raise ValueError(
                f"cost model: {name} falls to {seconds:g} s at {size}, less than half of a smaller "
                "pass; measure again on a quiet machine."
            )
        highest = max(highest, seconds)
    return times
