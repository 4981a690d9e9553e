"""What a trace shows, in a few numbers: how much prompt lookup or a draft model gets, and where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdepth.scheduler.state import Ints

from .trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSummary:
    """Requests of one kind."""

    kind: str
    """"all" for all of them."""
    num_requests: int
    num_held_out: int
    num_tokens: int
    """Output tokens, which are the trace's positions."""
    offer_share: float
    """Share of positions with a proposal."""
    mean_run: float
    """Accepted tokens of the longest draft from a position, mean over all positions."""
    looping_share: float
    """Share of requests that end in verbatim repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSummary:
    """Positions with matches of one length."""

    match_length: int
    share: float
    """Of all positions."""
    acceptance: float
    """Share of them where the first proposed token is right."""
    mean_run: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A trace in numbers."""

    kinds: tuple[KindSummary, ...]
    """All first, then each in order of appearance."""
    matches: tuple[MatchSummary, ...]
    """By match length, 0 left out; empty with a draft model."""
    survival: tuple[float, ...]
    """[K] share of proposals of at least j tokens whose first j are right; 0 without such proposals."""


def summarize(trace: Trace) -> TraceSummary:
    """Count what is in `trace`."""
    found = trace.match_length > 0
    lengths = np.unique(trace.match_length[found])
    survival = []
    for depth in range(1, trace.info.max_num_speculative_tokens + 1):
        deep = trace.proposal_length >= depth
        survival.append(float((trace.accepted[deep] >= depth).mean()) if deep.any() else 0.0)
    every = np.arange(trace.num_requests)
    return TraceSummary(
        kinds=(
            _kind(trace, "all", every),
            *(_kind(trace, kind, trace.rows(kinds=[kind])) for kind in dict.fromkeys(trace.kinds)),
        ),
        matches=tuple(_match(trace, int(length)) for length in lengths),
        survival=tuple(survival),
    )


def _kind(trace: Trace, kind: str, rows: Ints) -> KindSummary:
    part = trace.select(rows)
    return KindSummary(
        kind=kind,
        num_requests=part.num_requests,
        num_held_out=int(part.held_out.sum()),
        num_tokens=part.num_positions,
        offer_share=float((part.proposal_length > 0).mean()),
        mean_run=float(part.accepted.mean()),
        looping_share=float(part.looping.mean()),
    )


def _match(trace: Trace, length: int) -> MatchSummary:
    here = trace.match_length == length
    accepted = trace.accepted[here]
    return MatchSummary(
        match_length=length,
        share=float(here.mean()),
        acceptance=float((accepted > 0).mean()),
        mean_run=float(accepted.mean()),
    )
