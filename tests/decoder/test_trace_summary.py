"""What a trace shows, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.decoder.trace_summary import KindSummary, MatchSummary, summarize
from tests.decoder.traces import toy_trace


def test_kinds_matches_and_survival_are_counted() -> None:
    trace = toy_trace(
        (4, 2),
        top=3,
        kinds=("code", "chat"),
        looping=np.array([True, False]),
        match_length=np.array([0, 2, 2, 1, 1, 0]),
        proposal_length=np.array([0, 3, 2, 3, 1, 0]),
        accepted=np.array([0, 3, 1, 0, 1, 0]),
    )
    found = summarize(trace)
    assert found.kinds == (
        KindSummary(
            kind="all",
            num_requests=2,
            num_held_out=1,
            num_tokens=6,
            offer_share=4 / 6,
            mean_run=5 / 6,
            looping_share=0.5,
        ),
        KindSummary(
            kind="code",
            num_requests=1,
            num_held_out=0,
            num_tokens=4,
            offer_share=0.75,
            mean_run=1.0,
            looping_share=1.0,
        ),
        KindSummary(
            kind="chat",
            num_requests=1,
            num_held_out=1,
            num_tokens=2,
            offer_share=0.5,
            mean_run=0.5,
            looping_share=0.0,
        ),
    )
    assert found.matches == (
        MatchSummary(match_length=1, share=2 / 6, acceptance=0.5, mean_run=0.5),
        MatchSummary(match_length=2, share=2 / 6, acceptance=1.0, mean_run=2.0),
    )
    # Of 4, 3 and 2 proposals that are so long, these many are right so far.
    assert found.survival == pytest.approx((3 / 4, 1 / 3, 1 / 2))


def test_a_depth_that_nothing_reaches_survives_never() -> None:
    trace = toy_trace((2,), top=2, proposal_length=np.array([1, 1]), accepted=np.array([1, 1]))
    assert summarize(trace).survival == (1.0, 0.0)


def test_a_draft_model_has_no_matches() -> None:
    trace = toy_trace((3,), drafter="draft-model", match_length=np.zeros(3, np.int64))
    assert summarize(trace).matches == ()
