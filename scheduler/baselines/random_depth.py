"""Random depths: no policy, but every path of the decoder gets walked. For tests."""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE


class RandomDepth:
    """Each depth uniform in 0..K, independent between sequences and rounds.

    Args:
        seed: of the generator; the same seed and the same rounds give the same depths.
    """

    lawful_under = EVERY_RULE

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """Start the sequence of draws again."""
        self._rng = np.random.default_rng(self.seed)

    def choose(self, state: RoundState) -> Ints:
        """Return random depths, int64 [R]."""
        return self._rng.integers(0, state.max_num_speculative_tokens + 1, state.num_running)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"RandomDepth(seed={self.seed})"
