from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.counted_prior import match_length_survival
from tests.agents.made_trace import RATES, make_trace


def test_rates_are_those_of_the_requests_by_match_length() -> None:
    trace = make_trace(300)
    found = match_length_survival(trace, trace.rows("train"))
    assert found.first[1:] == pytest.approx(RATES[1:], abs=0.03)


def test_a_group_that_never_shows_gets_the_default() -> None:
    trace = make_trace(10)  # without a match nothing is proposed
    assert match_length_survival(trace, trace.rows()).first[0] == 0.5


def test_counts_by_hand() -> None:
    trace = make_trace(
        1,
        4,
        held_out=np.zeros(1, np.bool_),
        match_length=np.array([1, 1, 2, 0]),
        proposal_length=np.array([4, 2, 3, 0]),
        accepted=np.array([3, 0, 2, 0]),
        num_matches=np.ones(4, np.int64),
        num_agreeing=np.ones(4, np.int64),
    )
    found = match_length_survival(trace, np.array([0]))
    # Match 1: one of two right, match 2: one of one; each with 2 right of 4 added.
    assert found.first[1:3] == (3 / 6, 3 / 5)
    # Tested after the first token: 3 (it was accepted 3 deep of 4) and 2; right: 2 and 1.
    assert found.later == (3 + 2) / (5 + 4)


def test_other_requests_do_not_count() -> None:
    trace = make_trace(40)
    rows = trace.rows("train")
    part = trace.select(rows)
    alone = match_length_survival(part, np.arange(len(rows)))
    assert match_length_survival(trace, rows).first == alone.first
