"""Transformers' heuristic: deeper by 2 after a fully accepted draft, else shallower by 1.

Source: `num_assistant_tokens_schedule="heuristic_transient"` in transformers 5,
`generation/candidate_generator.py`, `AssistedCandidateGenerator.update_candidate_strategy`.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE

_MAX_PARKED = 4096


class HeuristicDepth:
    """k += 2 when all k drafted tokens were accepted, else k = max(1, k - 1), per sequence.

    Transformers runs one sequence and knows no upper bound. Here each request has its own k, which
    starts with the request, outlives its preemptions, and stays in 1..K.

    Args:
        start: first depth of a request; transformers 5 starts at 20.

    Raises:
        ValueError: when `start` is below 1.
    """

    # Past accept counts are statistics of verified tokens, and no draw is used twice.
    lawful_under = EVERY_RULE

    def __init__(self, start: int = 20) -> None:
        if start < 1:
            raise ValueError(f"the heuristic starts at a depth of at least 1, got {start}.")
        self.start = start
        self.reset()

    def reset(self) -> None:
        """Forget all requests."""
        # Slots bound the memory: a request that left, however it left, is overwritten by the next.
        # One that is preempted comes back in another slot.
        self._owners: Ints = np.empty(0, np.int64)
        self._depths: Ints = np.empty(0, np.int64)
        self._parked: dict[int, int] = {}

    def choose(self, state: RoundState) -> Ints:
        """Return the k of each sequence, int64 [R]."""
        slots, top = state.slots, state.max_num_speculative_tokens
        missing = state.max_num_seqs - len(self._owners)
        if missing > 0:
            self._owners = np.pad(self._owners, (0, missing), constant_values=-1)
            self._depths = np.pad(self._depths, (0, missing))
        fresh = self._owners[slots] != state.request_ids
        depths = np.where(fresh, self.start, self._depths[slots])
        if self._parked and fresh.any():
            for row in np.flatnonzero(fresh):
                depths[row] = self._parked.pop(int(state.request_ids[row]), self.start)
        depths = np.minimum(depths, top)
        self._owners[slots] = state.request_ids
        self._depths[slots] = depths
        return depths

    def observe(self, outcome: RoundOutcome) -> None:
        """Move the k of the sequences that drafted."""
        slots, drafted = outcome.slots, outcome.num_drafted
        depths = self._depths[slots]
        moved = np.where(outcome.num_accepted == drafted, depths + 2, np.maximum(depths - 1, 1))
        self._depths[slots] = np.where(drafted > 0, moved, depths)
        if outcome.preempted.any():
            for row in np.flatnonzero(outcome.preempted):
                self._parked[int(outcome.request_ids[row])] = int(depths[row])
            while len(self._parked) > _MAX_PARKED:  # requests that were aborted while they waited
                del self._parked[next(iter(self._parked))]

    def __repr__(self) -> str:
        return f"HeuristicDepth(start={self.start})"
