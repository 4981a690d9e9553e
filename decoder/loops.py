"""Verbatim repetition at the end of a text, into which small models fall under greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOOP_TOKENS = 32
"""Tokens at the end of a text that must repeat for it to count as looping."""
LOOP_PERIOD = 24
"""Longest repeated passage."""


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last `LOOP_TOKENS` tokens repeat those a fixed distance before them.

    The distance is at most `LOOP_PERIOD`. Such texts flatter prompt lookup, which gets them right for
    nothing. A text that ended by itself got out of its loop: its end token repeats nothing.
    """
    tokens = np.asarray(token_ids)
    longest = min(LOOP_PERIOD, len(tokens) - LOOP_TOKENS)
    return any(
        np.array_equal(tokens[-LOOP_TOKENS:], tokens[-LOOP_TOKENS - period : -period])
        for period in range(1, longest + 1)
    )
