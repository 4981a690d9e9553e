"""AdaEDL: stop drafting where an entropy bound on the acceptance probability gets too low.

Sources: Agrawal et al. 2024 (arXiv 2410.18351); the constants and the update of the threshold from
`AdaEDLScheduler` in `vllm/spec_decode/dynamic_scheduler.py` of samsungds-research-paper/DSDE, since the
authors published no code.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE
from .request_memory import RequestMemory

_TARGET_RATE = 0.9
_STEP = 0.01
_RATE_MEMORY = 0.5
_THRESHOLD_MEMORY = 0.9


class AdaEDL:
    """Stop before the first token with 1 - sqrt(gamma x entropy) below the request's threshold.

    After a round that drafted, a request's moving average of accepted / drafted is compared with 0.9:
    below it the threshold rises, so that drafting stops sooner; above it, where all K tokens were
    accepted, it falls. Each request starts anew and keeps its threshold when it is preempted.

    The published update counts a round without drafts as acceptance 0 and has no upper end, so a
    request that stopped drafting would never start again. Here such rounds teach nothing and the
    threshold stays in 0..1. Entropies are those of the law at temperature 1.

    A draft may be empty. Prompt lookup proposes with certainty, a law of entropy 0 and a bound of 1,
    which no threshold stops: all that is on offer is drafted, up to K.

    Args:
        gamma: scale of the entropy, in 1/nat; 0.1 in DSDE, and reported as 0.2 for the paper.
        threshold: of a new request.

    Raises:
        ValueError: a gamma that is not positive or a threshold outside 0..1.
    """

    # Goes by q_j before x_j is drawn, and by accept counts of past rounds.
    lawful_under = EVERY_RULE

    def __init__(self, gamma: float = 0.1, *, threshold: float = 0.5) -> None:
        if not 0 < gamma < np.inf:
            raise ValueError(f"AdaEDL's gamma is a positive number, got {gamma}.")
        if not 0 <= threshold <= 1:
            raise ValueError(f"AdaEDL's threshold is a probability in 0..1, got {threshold}.")
        self.gamma = gamma
        self.threshold = threshold
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        self._memory = RequestMemory((self.threshold, 0.0))  # threshold, average acceptance

    def choose(self, state: RoundState) -> Ints:
        """Return what is on offer, int64 [R]: drafting decides where to stop."""
        self._memory.open(state)
        return np.minimum(state.max_depths, state.max_num_speculative_tokens)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: whether the next token's bound reaches the threshold."""
        # Rounding can leave the entropy of a certain law a hair below 0.
        bound = 1 - np.sqrt(self.gamma * np.maximum(signals.entropy[:, -1], 0.0))
        return np.asarray(bound >= self._memory.at(state.slots[signals.rows])[:, 0])

    def observe(self, outcome: RoundOutcome) -> None:
        """Move the thresholds of the requests that drafted."""
        values = self._memory.at(outcome.slots)
        threshold, average = values[:, 0], values[:, 1]
        drafted, accepted = outcome.num_drafted, outcome.num_accepted
        rate = accepted / np.maximum(drafted, 1)
        average = _RATE_MEMORY * average + (1 - _RATE_MEMORY) * rate
        full = accepted == outcome.draft_top1.shape[1]
        step = np.where(average < _TARGET_RATE, _STEP, 0.0)
        step = np.where((average > _TARGET_RATE) & full, -_STEP, step)
        moved = np.clip(threshold + (1 - _THRESHOLD_MEMORY) * step, 0.0, 1.0)
        updated = np.stack([moved, average], axis=1)
        self._memory.close(outcome, np.where((drafted > 0)[:, None], updated, values))

    def __repr__(self) -> str:
        return f"AdaEDL(gamma={self.gamma:g}, threshold={self.threshold:g})"
