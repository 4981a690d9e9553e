"""Greedy goodput from each sequence's own history: what acceptance averages alone can do."""

from __future__ import annotations

from specdepth.scheduler.survival_estimators import EmaSurvival

from .greedy import GreedyDepth


class EmaGreedyDepth(GreedyDepth):
    """`GreedyDepth` on geometric survival from each sequence's moving average of acceptance.

    Args:
        half_life: rounds without drafting after which an average is half-way back to the prior.

    Raises:
        ValueError: when `half_life` is not above 0.
    """

    def __init__(self, half_life: float = 16.0) -> None:
        super().__init__(EmaSurvival(half_life))
