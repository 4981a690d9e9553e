"""No speculation: what every speedup is measured against."""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE


class Off:
    """Depth 0 for every sequence in every round."""

    lawful_under = EVERY_RULE

    def choose(self, state: RoundState) -> Ints:
        """Return zeros, int64 [R]."""
        return np.zeros(state.num_running, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return "Off()"
