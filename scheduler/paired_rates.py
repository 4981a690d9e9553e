"""Which of two arms is faster, from rounds of both that ran close together: `PairedRates`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .state import Floats


class RoundMeans(NamedTuple):
    """Mean of some rounds of one arm."""

    tokens: float
    """Committed tokens a round."""
    seconds: float
    """Elapsed seconds a round."""

    @property
    def rate(self) -> float:
        """Tokens a second; 0 where nothing took any time."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class LogRatio:
    """An estimate of log(rate of b / rate of a)."""

    value: float
    margin: float
    """Half the width of its confidence interval; inf with fewer than two visits."""
    num_visits: int

    @property
    def flipped(self) -> LogRatio:
        """The same with a and b exchanged."""
        return LogRatio(-self.value, self.margin, self.num_visits)


class PairedRates:
    """Estimates the ratio of two rates from visits: a few rounds of arm a beside a few of arm b.

    The speed of a shared machine moves by a factor of two within minutes, and easy requests are
    followed by hard ones. Both sides of a visit share them, so each visit's times are taken relative
    to that visit's own. The ratio is one of sums over visits, not a mean of ratios: rounds of few
    tokens would pull that one down, the more the noisier an arm is. Its error is that of a ratio
    estimator (Cochran 1977, "Sampling Techniques", section 6.4), from the spread between visits,
    since rounds within a visit are alike.

    Args:
        window: latest visits that count.
        confidence: half the width of the interval in standard errors, for many visits; few widen it as
            Student's law does.

    Raises:
        ValueError: a window of fewer than two visits, or a confidence that is not above 0.
    """

    _NUM_RECENT = 4
    """Visits that have to agree that something changed."""

    def __init__(self, window: int = 128, confidence: float = 3.0) -> None:
        if window < 2 or not 0 < confidence < math.inf:
            raise ValueError(
                "paired rates need a window of at least two visits and a confidence above 0, got "
                f"{window} and {confidence}."
            )
        self.confidence = confidence
        self._visits: deque[tuple[float, float, float, float]] = deque(maxlen=window)
        """Of a and b: tokens a round, share of the visit's seconds a round."""

    def __len__(self) -> int:
        return len(self._visits)

    def add(self, a: RoundMeans, b: RoundMeans) -> None:
        """Take in a visit; both sides must have committed tokens and taken time."""
        seconds = a.seconds + b.seconds
        self._visits.append((a.tokens, a.seconds / seconds, b.tokens, b.seconds / seconds))

    def log_ratio(self) -> LogRatio:
        """Estimate from all visits that are kept."""
        return self._estimate(np.array(self._visits))

    def forget_before_change(self, least: float = 0.0) -> bool:
        """Drop older visits if the latest few contradict them, with the same confidence.

        Args:
            least: change of the log ratio that is worth it.

        Returns:
            Whether visits were dropped.
        """
        num_older = len(self._visits) - self._NUM_RECENT
        if num_older < self._NUM_RECENT:
            return False
        visits = np.array(self._visits)
        before, now = self._estimate(visits[:num_older]), self._estimate(visits[num_older:])
        moved = abs(now.value - before.value)
        if moved <= max(least, math.hypot(now.margin, before.margin)):
            return False
        for _ in range(num_older):
            self._visits.popleft()
        return True

    def _estimate(self, visits: Floats) -> LogRatio:
        count = len(visits)
        if not count:
            return LogRatio(0.0, math.inf, 0)
        sums = visits.sum(axis=0)
        value = math.log(sums[2] * sums[1] / (sums[0] * sums[3]))
        if count < 2:
            return LogRatio(value, math.inf, count)
        # Each visit's pull on the logarithm, to first order.
        pulls = visits / sums @ np.array([-1.0, 1.0, 1.0, -1.0])
        error = math.sqrt(count / (count - 1) * float(pulls @ pulls))
        return LogRatio(value, student_quantile(self.confidence, count - 1) * error, count)


def student_quantile(normal_quantile: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's law at the level of `normal_quantile` of the normal law.

    First two terms of the expansion 26.7.5 of Abramowitz and Stegun 1964.
    """
    z, dof = normal_quantile, degrees_of_freedom
    first = (z**3 + z) / (4 * dof)
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * dof**2)
