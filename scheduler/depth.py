"""The seam: what decides how deep each sequence drafts. In serving, "scheduler" usually means who
runs next; a `DepthScheduler` only decides *how deep to draft*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from .state import Bools, Floats, Ints, RoundOutcome, RoundState

VerificationRule = Literal["greedy", "rejection", "coupled"]


@runtime_checkable
class DepthScheduler(Protocol):
    """Chooses depths. Any class with these two methods works.

    Optional attributes and methods, looked up by name; the engine does it once, in `set_scheduler`:

    * `lawful_under`: a set out of "greedy", "coupled", "prompt-lookup" and "rejection": the rules under
      which the scheduler keeps the output's law. "prompt-lookup" is rejection of proposals that are
      certain (a point mass); "rejection" is with a draft model, the only delicate one: whether a
      drafted token is verified must not depend on that token or on later ones [DSpark 2607.05147,
      appendix A]. Left out, it means all but "rejection".
    * `keep_drafting(state, signals: DraftSignals) -> bools or depths`: called after each draft pass, see
      `StopsDrafting`.
    * `trim(state, signals: ProposalSignals) -> depths`: may cut depths after drafting. It sees more than
      "rejection" with a draft model allows it to use: whether token j of a sequence stays may go by
      that sequence's signals up to j, and not by later ones.
    * `reset()`: forget what was learned in earlier workloads.
    """

    def choose(self, state: RoundState) -> Ints:
        """Return one depth a running sequence, int64 [R], each in 0..K."""
        ...

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from the round that the last `choose` led to; may do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class DraftSignals:
    """What a draft model has shown so far in a round, for `keep_drafting`."""

    rows: Ints
    """[D] indices into the `RoundState` arrays of the sequences still drafting."""
    num_drafted: int
    """Tokens that each of them has drawn already."""
    top1: Floats
    """[D, num_drafted + 1]; the last column belongs to the token that would be drawn next: its law is
    computed, it is not drawn."""
    entropy: Floats
    margin: Floats


@dataclass(frozen=True, slots=True)
class ProposalSignals:
    """A finished proposal, for `trim`."""

    rows: Ints
    """[D] indices into the `RoundState` arrays."""
    num_proposed: Ints
    """[D] tokens drafted; `trim` returns depths [D] of at most this."""
    top1: Floats
    """[D, K], NaN where nothing was drafted and with prompt lookup."""
    entropy: Floats
    margin: Floats


class StopsDrafting(Protocol):
    """A scheduler that also decides after each draft pass who goes on.

    Either answer is lawful under every rule as far as it goes by the signals it is shown: those of the
    next token are of its law, from before it is drawn, and it is asked before each token.
    """

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools | Ints:
        """Return who goes on, bool [D], or how deep each may go in all, whole numbers [D].

        A depth of at most `num_drafted`, or False: the next token is neither drawn nor verified. One
        more: it is drawn, which needs no pass beyond the one that showed its law, and is the last.
        Deeper, or True: the sequence rides in the next pass, and is asked again after it; a depth
        answered then may be another one. No answer takes a sequence beyond the depth that `choose`
        gave it and that there is room for.
        """
        ...


def lawful_rules(scheduler: object) -> frozenset[str]:
    """Rules under which `scheduler` declares itself lossless; see `DepthScheduler`."""
    rules = getattr(scheduler, "lawful_under", None)
    if rules is None:
        return frozenset({"greedy", "coupled", "prompt-lookup"})
    return frozenset(rules)


def check_lawful(scheduler: object, rule: VerificationRule, has_draft_model: bool) -> None:
    """Refuse a scheduler that could bend the output's law.

    Raises:
        ValueError: under a rule that the scheduler does not declare.
    """
    name = type(scheduler).__name__
    needed = "prompt-lookup" if rule == "rejection" and not has_draft_model else rule
    if needed in lawful_rules(scheduler):
        return
    if needed != "rejection":
        raise ValueError(
            f"{name} declares itself lossless under {sorted(lawful_rules(scheduler))}, not under "
            f'"{needed}", which these requests need.'
        )
    raise ValueError(
        f"{name} does not declare that it is lossless under rejection sampling with a draft model; "
        "if its depths never depend on drafted tokens or on this round's later draft "
        'probabilities, set `lawful_under = {"greedy", "coupled", "prompt-lookup", "rejection"}` on '
        'the class, or use verification="coupled" or temperature 0.'
    )


def check_depths(depths: Any, state: RoundState, scheduler: object) -> Ints:
    """Return `depths` as int64 [R], or refuse them.

    Raises:
        ValueError: wrong shape, not whole numbers (NaN included), or outside 0..K.
    """
    name, top = type(scheduler).__name__, state.max_num_speculative_tokens
    try:
        array = np.asarray(depths)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}.choose returned a {type(depths).__name__} that is no array of numbers, expected "
            f"{state.num_running} depths in 0..{top}."
        ) from None
    if array.shape != (state.num_running,):
        raise ValueError(
            f"{name}.choose returned depths of shape {array.shape}, expected "
            f"({state.num_running},): one depth for each running sequence."
        )
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"{name}.choose returned {array.dtype}, expected whole numbers in 0..{top}."
        )
    outside = ~((array >= 0) & (array <= top))  # NaN is outside too
    if np.count_nonzero(outside):  # a third of the time of any()
        raise ValueError(
            f"{name}.choose returned a depth of {array[outside][0]}, expected whole numbers in "
            f"0..{top} (max_num_speculative_tokens)."
        )
    whole = array.astype(np.int64, copy=False)
    if array.dtype.kind == "f" and not np.array_equal(whole, array):
        raise ValueError(
            f"{name}.choose returned a depth of {array[whole != array][0]}, expected whole numbers in "
            f"0..{top}."
        )
    return whole
