"""A measured curve: seconds over a size, looked up by linear interpolation."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Curve:
    """Piecewise linear look-up; staircases in the points are kept, never smoothed.

    Size 0 (nothing runs) costs 0 s. Sizes below the first point cost as much as the first point.
    Beyond the last point the curve goes on with the slope of its last piece; where that piece is
    flat or falls (the end of a staircase), with the mean slope of the whole curve, and never down.
    """

    __slots__ = ("_sizes", "_slopes", "_x", "_y", "seconds")

    def __init__(self, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        self._x = np.asarray(sizes, np.float64)
        self._y = np.asarray(seconds, np.float64)
        self._sizes = sizes
        self.seconds = seconds
        slopes = (np.diff(self._y) / np.diff(self._x)).tolist() if len(sizes) > 1 else []
        last = slopes[-1] if slopes else 0.0
        if last <= 0 and slopes:
            last = max((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]), 0.0)
        self._slopes: list[float] = [0.0, *slopes, last]

    def at(self, size: float) -> float:
        """Seconds at one `size`; about a microsecond."""
        if size <= 0:
            return 0.0
        index = bisect_right(self._sizes, size)
        anchor = index - 1 if index else 0
        return self.seconds[anchor] + self._slopes[index] * (size - self._sizes[anchor])

    def at_each(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds at each of `sizes`, any shape."""
        beyond = np.maximum(sizes - self._x[-1], 0.0) * self._slopes[-1]
        seconds = np.interp(sizes, self._x, self._y) + beyond
        return np.where(np.asarray(sizes) > 0, seconds, 0.0)

    def first_at_least(self, seconds: float, limit: int) -> int:
        """Smallest whole size that costs at least `seconds`; `limit` if none below it does."""
        if self.at(1) >= seconds:
            return 1
        for low, high in zip((1, *self._sizes), (*self._sizes, limit), strict=True):
            if high <= low or self.at(high) < seconds:
                continue
            while high - low > 1:  # one linear piece: at(low) < seconds <= at(high)
                middle = (low + high) // 2
                low, high = (middle, high) if self.at(middle) < seconds else (low, middle)
            return high
        return limit
