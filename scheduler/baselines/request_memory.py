"""A few numbers for each request that outlive its preemptions: `RequestMemory`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

_MAX_PARKED = 4096


class RequestMemory:
    """Keeps C numbers a request by its slot while it runs, and by its number while it is preempted.

    Slots bound the memory: a request that left, however it left, is overwritten by the next. One that
    is preempted comes back in another slot.

    Args:
        initial: [C] numbers of a new request.
    """

    def __init__(self, initial: Sequence[float]) -> None:
        self._initial: Floats = np.asarray(initial, np.float64)
        self._owners: Ints = np.empty(0, np.int64)
        self._values: Floats = np.empty((0, len(self._initial)))
        self._parked: dict[int, Floats] = {}

    def open(self, state: RoundState) -> None:
        """Give the running sequences their numbers; call it in each `choose`."""
        missing = state.max_num_seqs - len(self._owners)
        if missing > 0:
            self._owners = np.pad(self._owners, (0, missing), constant_values=-1)
            self._values = np.pad(self._values, ((0, missing), (0, 0)))
        fresh = np.flatnonzero(self._owners[state.slots] != state.request_ids)
        for row in fresh:
            slot, number = state.slots[row], int(state.request_ids[row])
            self._owners[slot] = number
            self._values[slot] = self._parked.pop(number, self._initial)

    def at(self, slots: Ints) -> Floats:
        """Return the numbers of `slots`, a copy [..., C]."""
        return self._values[slots]

    def close(self, outcome: RoundOutcome, values: Floats) -> None:
        """Keep `values` [R, C] for the sequences of a round, parking those that were preempted."""
        self._values[outcome.slots] = values
        for row in np.flatnonzero(outcome.preempted):
            self._parked[int(outcome.request_ids[row])] = values[row].copy()
        while len(self._parked) > _MAX_PARKED:  # requests that were aborted while they waited
            del self._parked[next(iter(self._parked))]
