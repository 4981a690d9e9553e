"""MLC-LLM's built-in table: 4, 3, 2 or no drafted tokens for under 10, 20, 30 or more sequences.

Source: `cpp/serve/engine_actions/auto_spec_decode.cc` in mlc-ai/mlc-llm.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundState

from .table import OPEN_END, TableDepth


class MlcDepth(TableDepth):
    """The table of an engine that needs no tuning.

    Args:
        max_num_sequence: MLC does not draft where sequences x (depth + 1) exceed this, its limit on a
            batch in tokens; None: no such limit, as here passes may hold more tokens than sequences.

    Raises:
        ValueError: when `max_num_sequence` is below 1.
    """

    def __init__(self, max_num_sequence: int | None = None) -> None:
        if max_num_sequence is not None and max_num_sequence < 1:
            raise ValueError(f"max_num_sequence is 1 or more, got {max_num_sequence}.")
        super().__init__([(1, 9, 4), (10, 19, 3), (20, 29, 2), (30, OPEN_END, 0)])
        self.max_num_sequence = max_num_sequence

    def choose(self, state: RoundState) -> Ints:
        """Return the table's depth for each sequence, int64 [R], or 0 where the batch is too big."""
        depths = super().choose(state)
        num_tokens = state.num_running + int(depths.sum())
        if self.max_num_sequence is not None and num_tokens > self.max_num_sequence:
            return np.zeros_like(depths)
        return depths

    def __repr__(self) -> str:
        return f"MlcDepth(max_num_sequence={self.max_num_sequence})"
