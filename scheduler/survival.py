"""How likely drafted tokens are to survive verification: what every cost-aware rule needs.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

from typing import Protocol

from .state import Floats, RoundOutcome, RoundState


class SurvivalEstimator(Protocol):
    """Estimates P(the first j drafted tokens of a sequence are all accepted)."""

    def survival(self, state: RoundState) -> Floats:
        """Return [R, K]: column j - 1 is the chance that the first j tokens are all accepted.

        In 0..1, not increasing along a row, and 0 beyond `state.max_depths`.
        """
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round; may do nothing."""
        ...

    def reset(self) -> None:
        """Forget what was learned in earlier workloads."""
        ...
