"""P(a drafted token is accepted) from the drafter's confidence, fitted while serving.

Source: vLLM #52228, `vllm/v1/worker/gpu/spec_decode/acceptance_estimator.py`, class
`OnlineAcceptanceEstimator`.

Legend: R sequences, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from .state import Bools, Floats

MAX_LOG_ODDS = 40.0
_LEAST = np.exp(-MAX_LOG_ODDS)
_MOST = 1 - np.finfo(np.float64).epsneg


def log_odds(probability: Floats) -> Floats:
    """Return log(p / (1 - p)), cut to -40..40; NaN stays NaN."""
    inside = np.minimum(np.maximum(probability, _LEAST), _MOST)  # a third of the time of clip
    return np.asarray(np.log(inside) - np.log1p(-inside))


class OnlineLogistic:
    """sigmoid(slope * feature + intercept of the position): one slope, K intercepts.

    Every 100 rounds one Newton step of iteratively reweighted least squares on those rounds alone,
    with a ridge on the information matrix; each parameter moves by n / (n + 50) of its step, n being
    the tokens behind it. A step to a negative slope is not taken. Only tested tokens count: accepted,
    and the first one rejected.

    Args:
        num_positions: K.
    """

    refit_interval = 100
    """Rounds between steps."""
    ridge = 1e-3
    damping = 50.0
    """Tokens with which a parameter moves by half of its step."""
    initial_slope = 0.5
    initial_intercept = -0.2

    def __init__(self, num_positions: int) -> None:
        self.slope = self.initial_slope
        self.intercepts: Floats = np.full(num_positions, self.initial_intercept)
        self.num_refits = 0
        self._forget_rounds()

    def predict(self, features: Floats, first: int = 0) -> Floats:
        """Return acceptance probabilities; NaN stays NaN.

        Args:
            features: [..., J] of J positions.
            first: which position they begin with.
        """
        intercepts = self.intercepts[first : first + features.shape[-1]]
        return np.asarray(0.5 + 0.5 * np.tanh(0.5 * (self.slope * features + intercepts)))

    def observe(self, features: Floats, tested: Bools, accepted: Bools) -> None:
        """Take in one round, all [R, K]; tokens with an unknown feature are left out."""
        known = tested & ~np.isnan(features)
        feature = np.where(known, features, 0.0)
        rate = self.predict(feature)
        weight = np.where(known, rate * (1 - rate), 0.0)
        residual = np.where(known, accepted - rate, 0.0)
        self._slope_information += float((weight * feature * feature).sum())
        self._slope_gradient += float((residual * feature).sum())
        self._cross_information += (weight * feature).sum(axis=0)
        self._information += weight.sum(axis=0)
        self._gradient += residual.sum(axis=0)
        self._counts += known.sum(axis=0)
        self._num_rounds += 1
        if self._num_rounds >= self.refit_interval:
            self.refit()

    def refit(self) -> None:
        """Take the Newton step of the rounds since the last one, and forget them."""
        information = self._information + self.ridge
        cross, gradient, counts = self._cross_information, self._gradient, self._counts
        # The information matrix is an arrowhead: eliminate the intercepts, then solve for the slope.
        # By Cauchy and Schwarz the denominator is at least the ridge.
        slope_information = self._slope_information + self.ridge - (cross**2 / information).sum()
        slope_step = (self._slope_gradient - (cross * gradient / information).sum()) / float(
            slope_information
        )
        slope_step *= float(counts.sum() / (counts.sum() + self.damping))
        if self.slope + slope_step < 0:
            slope_step = 0.0
        self.slope += float(slope_step)
        step = (gradient - cross * slope_step) / information
        self.intercepts = self.intercepts + step * counts / (counts + self.damping)
        self.num_refits += 1
        self._forget_rounds()

    def _forget_rounds(self) -> None:
        size = len(self.intercepts)
        self._num_rounds = 0
        self._slope_information = self._slope_gradient = 0.0
        self._cross_information: Floats = np.zeros(size)
        self._information: Floats = np.zeros(size)
        self._gradient: Floats = np.zeros(size)
        self._counts: Floats = np.zeros(size)
