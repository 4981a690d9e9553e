"""Tokens of all sequences in one order, the likeliest first: what every greedy rule walks along.

Legend: R rows (sequences), K deepest depth, N tokens that may survive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdepth.scheduler.state import Floats, Ints


class RankedTokens(NamedTuple):
    """Drafted tokens by falling survival. All [N]; tokens that cannot survive are left out.

    Survival does not rise along a row and ties go to the shallower token, so the first B tokens are
    a prefix of each row whatever B is.
    """

    rows: Ints
    columns: Ints
    """Position in the draft, from 0."""
    survival: Floats

    def depths(self, budget: int, num_rows: int) -> Ints:
        """Return the depth of each row, int64 [R], when the first `budget` tokens are admitted."""
        return np.bincount(self.rows[:budget], minlength=num_rows)


def rank_tokens(survival: Floats, above: float = 0.0) -> RankedTokens:
    """Sort the tokens of `survival` [R, K]; those that are not `above` a survival are left out."""
    by_column = survival.T.ravel()
    kept = (by_column > above).nonzero()[0]
    order = kept[(-by_column[kept]).argsort(kind="stable")]
    columns, rows = np.divmod(order, max(len(survival), 1))
    return RankedTokens(rows, columns, by_column[order])


def expected_tokens(ranked: RankedTokens, num_running: int) -> Floats:
    """Return the tokens that a round is expected to commit with the first B admitted, [N + 1].

    Each running sequence commits one token besides those accepted.
    """
    expected = np.empty(len(ranked.survival) + 1)
    expected[0] = num_running
    np.add.accumulate(ranked.survival, out=expected[1:])
    expected[1:] += num_running
    return expected
