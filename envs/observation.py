"""A round as an observation: one row a slot of the engine, empty slots zero.

Legend: S slots, F features of `scheduler.features`, R running sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.features import FEATURES, HIGH, LOW, NUM_FEATURES, feature_matrix
from specdepth.scheduler.state import RoundState

Observation = NDArray[np.float32]

ACTIVE = 0
"""Column that says whether the slot has a sequence that decodes."""
NUM_COLUMNS = 1 + NUM_FEATURES
COLUMN_NAMES: tuple[str, ...] = ("active", *(feature.name for feature in FEATURES))
COLUMN_UNITS: tuple[str, ...] = ("flag", *(feature.unit for feature in FEATURES))
ROW_LOW: Observation = np.concatenate([np.zeros(1, np.float32), LOW])
ROW_HIGH: Observation = np.concatenate([np.ones(1, np.float32), HIGH])
for _array in (ROW_LOW, ROW_HIGH):
    _array.flags.writeable = False


def slot_observation(state: RoundState | None, num_slots: int) -> Observation:
    """Return a new float32 [S, 1 + F] matrix for `state`; all zero without one."""
    observation = np.zeros((num_slots, NUM_COLUMNS), np.float32)
    if state is not None:
        observation[state.slots, ACTIVE] = 1.0
        observation[state.slots, 1:] = feature_matrix(state)
    return observation
