"""Offsets: a network says what drafted tokens are worth, and the greedy rule with its prices chooses.

Legend: R running sequences, K deepest depth, F features.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .features import feature_matrix
from .state import Floats, RoundOutcome, RoundState
from .survival_estimators import within_depths

Float32s = NDArray[np.float32]


def survival_of_logits(logits: Float32s, state: RoundState) -> Floats:
    """Chance that the first j drafted tokens are all accepted, float64 [R, K].

    Args:
        logits: float32 [R, K]; sigmoid of column j - 1 is the chance that token j is accepted if those
            before it were.
        state: whose `max_depths` bound the draft.
    """
    # sigmoid(z) = (1 + tanh(z / 2)) / 2 cannot overflow
    chance = np.tanh(logits * np.float32(0.5))
    chance *= np.float32(0.5)
    chance += np.float32(0.5)
    survival: Floats = np.multiply.accumulate(chance, axis=1, dtype=np.float64)
    return within_depths(survival, state)


class LogitSurvival:
    """A network's outputs as the `SurvivalEstimator` that the greedy rule asks.

    What learning makes of them is no chance any more, but what a token is worth to the whole run: less
    than its chance where the sequence would soon pass that place anyway.

    Args:
        logits: float32 [R, F] from `feature_matrix` to float32 [R, K].
    """

    def __init__(self, logits: Callable[[Float32s], Float32s]) -> None:
        self._logits = logits

    def survival(self, state: RoundState) -> Floats:
        """Return the running product of the positions' chances, float64 [R, K]."""
        return survival_of_logits(self._logits(feature_matrix(state)), state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn: the network is frozen."""

    def reset(self) -> None:
        """Nothing to forget."""
