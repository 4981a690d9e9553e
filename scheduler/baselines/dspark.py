"""DSpark's hardware-aware scheduler: admit by survival, stop where throughput stops rising.

Source: [DSpark, arXiv 2607.05147], section on confidence-scheduled verification and appendix A.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundState

from .admission import expected_tokens, rank_tokens
from .confidence_trim import ConfidenceTrim
from .lawful import EVERY_RULE
from .pricing import full_draft_s, verify_seconds


class DSparkDepth(ConfidenceTrim):
    """Greedy admission with an early stop.

    Tokens of all sequences, the likeliest first, are admitted while expected tokens times steps a
    second keeps rising; the first one that does not raise it ends the admission. On a staircase of
    pass times that is too early, which the paper's production system avoids by a budget from older
    confidences (`AdaptiveVerificationDepth`). The draft costs the same whatever is verified.

    A stop within `keep_drafting` would not be this rule: the order goes across depths, and needs
    confidences of deeper tokens of likelier sequences first.

    Args:
        survival: of prompt lookup's proposals; None: by match length.
    """

    # The stop keeps the cut lossless: whether token j of a sequence is verified depends on its own earlier
    # tokens, on q_j, and on likelier tokens of others, never on x_j or what follows.
    lawful_under = EVERY_RULE

    def _admit(self, state: RoundState, rows: Ints, survival: Floats, num_offered: Ints) -> Ints:
        ranked = rank_tokens(survival)
        tokens = expected_tokens(ranked, state.num_running)
        scores = tokens / (full_draft_s(state) + verify_seconds(state, len(tokens) - 1))
        stops = np.flatnonzero(np.diff(scores) <= 0)
        budget = int(stops[0]) if len(stops) else len(scores) - 1
        return ranked.depths(budget, len(rows))
