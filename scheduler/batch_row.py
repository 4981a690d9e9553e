"""What the sequences of a batch have in common, as one row of features.

Legend: R running sequences, F features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .features import FEATURE_NAMES

MAX_DEPTH = FEATURE_NAMES.index("max_depth")


def batch_row(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean of the features over the batch, float32 [F]; of the deepest possible depth the largest.

    A depth that one sequence can use is of use to the batch; for the others it is clipped.

    Args:
        rows: float32 [R, F] from `feature_matrix`, R at least 1.
    """
    row = rows.mean(axis=0)
    row[MAX_DEPTH] = rows[:, MAX_DEPTH].max()
    return np.asarray(row, np.float32)
