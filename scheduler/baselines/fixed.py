"""One depth for all: vLLM's `num_speculative_tokens`, transformers' "constant" schedule."""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE


class FixedDepth:
    """The same depth for every sequence in every round.

    Args:
        num_speculative_tokens: the depth, 0 or more.

    Raises:
        ValueError: when it is negative or no whole number.
    """

    lawful_under = EVERY_RULE

    def __init__(self, num_speculative_tokens: int) -> None:
        if isinstance(num_speculative_tokens, bool) or num_speculative_tokens != int(
            num_speculative_tokens
        ):
            raise ValueError(f"a fixed depth is a whole number, got {num_speculative_tokens!r}.")
        if num_speculative_tokens < 0:
            raise ValueError(f"a fixed depth is 0 or more, got {num_speculative_tokens}.")
        self.num_speculative_tokens = int(num_speculative_tokens)

    def choose(self, state: RoundState) -> Ints:
        """Return the depth for each sequence, int64 [R]."""
        return np.full(state.num_running, self.num_speculative_tokens, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"FixedDepth({self.num_speculative_tokens})"
