"""A measured curve: seconds over a size, looked up by linear interpolation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Curve:
    """Piecewise linear look-up; staircases in the points are kept, never smoothed.

    Size 0 (nothing runs) costs 0 s. Sizes below the first point cost as much as the first point.
    Beyond the last point the curve goes on with the slope of its last piece; where that piece is
    flat or falls (the end of a staircase), with the mean slope of the whole curve, and never down.

    Args:
        sizes: of the points, ascending.
        seconds: at each of them.
        steps: ascending; a size up to the last of these costs as much as the next one of them.
    """

    __slots__ = ("_sizes", "_slopes", "_steps", "_table", "_top", "_x", "_y", "seconds")

    def __init__(
        self, sizes: tuple[int, ...], seconds: tuple[float, ...], steps: tuple[int, ...] = ()
    ) -> None:
        self._steps = steps
        self._top = steps[-1] if steps else 0
        self._x = np.asarray(sizes, np.float64)
        self._y = np.asarray(seconds, np.float64)
        self._sizes = sizes
        self.seconds = seconds
        slopes = (np.diff(self._y) / np.diff(self._x)).tolist() if len(sizes) > 1 else []
        last = slopes[-1] if slopes else 0.0
        if last <= 0 and slopes:
            last = max((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]), 0.0)
        self._slopes: list[float] = [0.0, *slopes, last]
        self._table: NDArray[np.float64] = np.zeros(0)

    def at(self, size: float) -> float:
        """Seconds at one `size`; about a microsecond."""
        if size <= 0:
            return 0.0
        if size <= self._top:
            size = self._steps[bisect_left(self._steps, size)]
        index = bisect_right(self._sizes, size)
        anchor = index - 1 if index else 0
        return self.seconds[anchor] + self._slopes[index] * (size - self._sizes[anchor])

    def at_each(self, sizes: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds at each of `sizes`, any shape."""
        run = sizes
        if self._steps:
            steps = np.asarray(self._steps)
            next_step = steps[np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)]
            run = np.where(sizes <= self._top, next_step, sizes)
        beyond = np.maximum(run - self._x[-1], 0.0) * self._slopes[-1]
        seconds = np.interp(run, self._x, self._y) + beyond
        return np.where(sizes > 0, seconds, 0.0)

    def in_row(self, first: int, count: int) -> NDArray[np.float64]:
        """Seconds at `count` whole sizes in a row, from `first` on; what `at_each` says of them.

        A piece of a table that is kept, about a microsecond; not to be written to.
        """
        if first + count > len(self._table):
            self._table = self.at_each(np.arange(max(first + count, 2 * len(self._table))))
            self._table.flags.writeable = False
        return self._table[first : first + count]

    def first_at_least(self, seconds: float, limit: int) -> int:
        """Smallest whole size that costs at least `seconds`; `limit` if none below it does."""
        if self.at(1) >= seconds:
            return 1
        for below, step in zip((0, *self._steps), self._steps, strict=False):
            if self.at(step) >= seconds:
                return below + 1
        sizes = tuple(size for size in self._sizes if size > self._top)
        for low, high in zip((self._top or 1, *sizes), (*sizes, limit), strict=True):
            if high <= low or self.at(high) < seconds:
                continue
            while high - low > 1:  # one linear piece: at(low) < seconds <= at(high)
                middle = (low + high) // 2
                low, high = (middle, high) if self.at(middle) < seconds else (low, middle)
            return high
        return limit
