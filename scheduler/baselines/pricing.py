"""Seconds of candidate rounds, as the scheduler's `CostModel` predicts them.

Legend: R running sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Floats, RoundState


def round_seconds(state: RoundState, depths: NDArray[Any]) -> Floats:
    """Return the seconds of whole rounds, one for each row of `depths` [..., R].

    Draft passes shrink as sequences leave, and the target pass goes by the sum of depths. Tokens that
    the draft model sat out are left out: catching up is paid once and serves all rounds to come, and
    a rule that charges it to one round stays off for ever once it was off for long.
    """
    return state.cost.round_s(
        depths,
        num_prefill_tokens=max(state.num_prefill_tokens, 0),
        num_context_tokens=max(state.num_context_tokens, 0),
        drafter=state.drafter,
    )


def verify_seconds(state: RoundState, num_drafted_tokens: int) -> Floats:
    """Return the seconds of a round without its draft passes, [num_drafted_tokens + 1].

    Entry B is the price where B drafted tokens are verified in all.
    """
    prefill = max(state.num_prefill_tokens, 0)
    first = state.num_running + prefill
    sizes = np.arange(first, first + num_drafted_tokens + 1)
    seconds = state.cost.pass_s(sizes, prefill, max(state.num_context_tokens, 0))
    return seconds + state.cost.overhead_s


def full_draft_s(state: RoundState) -> float:
    """Seconds of drafting K tokens for every sequence; 0 without a draft model."""
    if state.drafter != "draft-model":
        return 0.0
    return state.max_num_speculative_tokens * state.cost.draft_pass_s(state.num_running)
