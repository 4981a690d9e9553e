"""A prior for `MatchLengthSurvival` from the requests of a trace, instead of the shipped model's."""

from __future__ import annotations

import numpy as np

from specdepth.decoder.trace import Trace
from specdepth.scheduler.state import Ints
from specdepth.scheduler.survival_estimators import MatchLengthSurvival

NUM_GROUPS = 5
"""Match lengths 0 to 3, and 4 and more."""
PRIOR_WEIGHT = 32.0
"""Tested tokens that the trace's rates count for once serving begins."""
_DEFAULT_RATE = 0.5
_DEFAULT_WEIGHT = 4.0
"""Rate, and tested tokens behind it, of groups that the trace hardly shows."""


def match_length_survival(trace: Trace, rows: Ints) -> MatchLengthSurvival:
    """Return an estimator that starts from what these requests show.

    All positions count, whether a schedule would have drafted there or not.

    Args:
        trace: of prompt lookup.
        rows: requests to count.
    """
    part = trace.select(rows)
    offered = part.proposal_length > 0
    group = np.minimum(part.match_length, NUM_GROUPS - 1)[offered]
    accepted, length = part.accepted[offered], part.proposal_length[offered]
    first = [
        _rate(int((accepted[group == one] > 0).sum()), int((group == one).sum()))
        for one in range(NUM_GROUPS)
    ]
    # Token j + 1 is tested where the first j were accepted and it was proposed.
    tested = np.minimum(accepted, length - 1).sum()
    later = _rate(int(np.maximum(accepted - 1, 0).sum()), int(tested))
    return MatchLengthSurvival(first, later, PRIOR_WEIGHT)


def _rate(num_accepted: int, num_tested: int) -> float:
    """Share, drawn to the default where little was tested, so that it is never 0 or 1."""
    return (num_accepted + _DEFAULT_RATE * _DEFAULT_WEIGHT) / (num_tested + _DEFAULT_WEIGHT)
