"""Which drafted tokens of a round got a verdict, and which.

Verification stops at the first rejected token, so what lies behind it is unknown, not rejected. A
text that ends inside its accepted tokens has no rejected one either.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .state import Bools, RoundOutcome


class Grades(NamedTuple):
    """Verdicts of a round."""

    tested: Bools
    """[R, K] accepted, or the first one rejected."""
    accepted: Bools
    """[R, K] a prefix of each row."""
    rejected: Bools
    """[R] whether a token was rejected, the one after those accepted."""


def grade(outcome: RoundOutcome, max_num_speculative_tokens: int) -> Grades:
    """Return the verdicts on the drafted tokens of `outcome`.

    Args:
        outcome: of a round.
        max_num_speculative_tokens: K.
    """
    columns = np.arange(max_num_speculative_tokens)
    num_accepted = outcome.num_accepted
    # After a rejection the target's own token is committed; if none was, the text ended before it.
    rejected = (num_accepted < outcome.num_drafted) & (outcome.num_committed > num_accepted)
    return Grades(
        tested=columns < (num_accepted + rejected)[:, None],
        accepted=columns < num_accepted[:, None],
        rejected=rejected,
    )
