"""SVIP: stop drafting where the draft model's entropy is high.

Source: Zhang et al. 2024, "Draft Model Knows When to Stop" (arXiv 2411.18462): a high entropy of the draft
means a low acceptance probability, and the bound on it falls with the entropy's square root.
"""

from __future__ import annotations

import math

import numpy as np

from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE


class SVIP:
    """Stop before the first token whose law has sqrt(entropy) above a threshold.

    A draft may be empty. Prompt lookup proposes with certainty, a law of entropy 0, which never stops:
    all that is on offer is drafted, up to K.

    Args:
        threshold: largest root of the entropy in nats; tuned for each model pair.

    Raises:
        ValueError: when it is negative or not finite.
    """

    # Goes by q_j before x_j is drawn.
    lawful_under = EVERY_RULE

    def __init__(self, threshold: float = 0.6) -> None:
        if not (threshold >= 0 and math.isfinite(threshold)):
            raise ValueError(f"SVIP's threshold is a root of nats, 0 or more, got {threshold}.")
        self.threshold = threshold

    def choose(self, state: RoundState) -> Ints:
        """Return what is on offer, int64 [R]: drafting decides where to stop."""
        return np.minimum(state.max_depths, state.max_num_speculative_tokens)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: whether the next token's law is sharp enough."""
        # Rounding can leave the entropy of a certain law a hair below 0.
        return np.asarray(np.sqrt(np.maximum(signals.entropy[:, -1], 0.0)) <= self.threshold)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"SVIP({self.threshold:g})"
