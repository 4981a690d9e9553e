"""What `specdepth demo` knows at a time, and how much time is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.cost import CostModel

from .console import Console

if TYPE_CHECKING:
    from .demo import Options
    from .demo_ground import Ground
    from .demo_live import LiveComparison
    from .demo_replay import ReplayedComparison
    from .train import TrainResult

LEARNED = "learned"
"""Name of the trained policy."""
LEAST_S = 1.0
"""That any part gets."""
END_SHARE = 0.02
"""Kept for replaying what was decoded live, and for the report."""


@dataclass(slots=True)
class DemoState:
    """What is known so far."""

    options: Options
    console: Console
    folder: Path
    decoder: SpeculativeDecoder
    start_s: float
    cost: CostModel | None = None
    ground: Ground | None = None
    trained: TrainResult | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Updates, and reward a decision in tokens."""
    replayed: ReplayedComparison | None = None
    live: LiveComparison | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def budget_s(self) -> float:
        """Seconds for everything."""
        return 60 * self.options.minutes

    @property
    def left_s(self) -> float:
        """Seconds until the report has to be written."""
        return self.start_s + self.budget_s * (1 - END_SHARE) - time.monotonic()

    def minutes(self, share: float, kept: float = 0.0) -> float:
        """A share of the whole in minutes; less where otherwise the share `kept` would not be left."""
        left_s = self.left_s - kept * self.budget_s
        return max(min(share * self.budget_s, left_s), LEAST_S) / 60
