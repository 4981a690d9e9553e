"""One depth for the whole batch, scored by expected tokens over predicted time.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundState

from .pricing import round_seconds


def uniform_depths(state: RoundState) -> Ints:
    """Return what a common depth of 0, 1, ..., K means for each sequence, int64 [K + 1, R].

    A sequence with fewer tokens on offer drafts those, one without a proposal none: it then counts in
    neither tokens nor time, as in SmartSpec's n-gram form.
    """
    depths = np.arange(state.max_num_speculative_tokens + 1)
    clipped: Ints = np.minimum(depths[:, None], state.max_depths)
    return clipped


def goodput_of(state: RoundState, depths: Ints, survival: Floats) -> Floats:
    """Return expected committed tokens a second for each row of `depths` [D, R], float64 [D].

    Args:
        state: with at least one sequence.
        depths: from `uniform_depths`.
        survival: [K] chance that the first 1, 2, ..., K drafted tokens of a sequence are accepted.
    """
    accepted = np.concatenate(([0.0], np.cumsum(survival)))
    tokens = state.num_running + accepted[depths].sum(axis=1)
    scores: Floats = tokens / round_seconds(state, depths)
    return scores
