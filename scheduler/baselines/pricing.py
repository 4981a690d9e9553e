"""Seconds of candidate rounds, as the scheduler's `CostModel` predicts them.

Prompts that ride in a pass are paid whatever the depths, so their time is left out: a rule that divides
tokens by it drafts too deep in rounds with a prompt (at 16 sequences with prompt lookup it loses 1 to 3 %
of throughput). What depth *adds* to a pass is still priced at the pass's full size.

Legend: R running sequences.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from specdepth.scheduler.state import Floats, RoundState


def round_seconds(state: RoundState, depths: NDArray[Any]) -> Floats:
    """Return the seconds of whole rounds, one for each row of `depths` [..., R].

    Draft passes shrink as sequences leave, and the target pass goes by the sum of depths. Tokens that
    the draft model sat out are left out: catching up is paid once and serves all rounds to come, and
    a rule that charges it to one round stays off for ever once it was off for long.
    """
    seconds = state.cost.round_s(
        depths,
        num_prefill_tokens=max(state.num_prefill_tokens, 0),
        num_context_tokens=max(state.num_context_tokens, 0),
        drafter=state.drafter,
    )
    return seconds - prefill_s(state)


def verify_seconds(state: RoundState, num_drafted_tokens: int) -> Floats:
    """Return the seconds of a round without its draft passes, [num_drafted_tokens + 1].

    Entry B is the price where B drafted tokens are verified in all.
    """
    prefill = max(state.num_prefill_tokens, 0)
    first, context = state.num_running + prefill, max(state.num_context_tokens, 0)
    seconds = state.cost.passes_s(first, num_drafted_tokens + 1, prefill, context)
    seconds += state.cost.overhead_s - prefill_s(state)
    return seconds


def prefill_s(state: RoundState) -> float:
    """Seconds that prompts add to a pass in which nobody drafts; 0 without any."""
    prefill, context = max(state.num_prefill_tokens, 0), max(state.num_context_tokens, 0)
    if not prefill:
        return 0.0
    running = state.num_running
    with_it = state.cost.pass_s(running + prefill, prefill, context)
    return with_it - state.cost.pass_s(running, 0, context)


def full_draft_s(state: RoundState) -> float:
    """Seconds of drafting K tokens for every sequence; 0 without a draft model."""
    if state.drafter != "draft-model":
        return 0.0
    return state.max_num_speculative_tokens * state.cost.draft_pass_s(state.num_running)
