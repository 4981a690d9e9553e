from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.goodput import GoodputDepth
from specdepth.scheduler.cost import CostModel


def machine(token_s: float, **changes: Any) -> CostModel:
    return CostModel.linear(base_s=1.0, token_s=token_s, **changes)


def test_the_depth_of_two_sequences_by_hand(make_state: Any) -> None:
    """Tokens 2 x (1, 1.7, 2.19, 2.533) over passes of 2, 4, 6, 8 tokens."""
    cheap, dear, dearer = machine(0.1), machine(0.5), machine(0.8)
    # 1.82, 2.62, 2.92, 2.98; 1.33, 1.36, 1.25, 1.13; 1.11, 1.00, 0.88, 0.77
    for cost, depth in ((cheap, 3), (dear, 1), (dearer, 0)):
        state = make_state(2, 3, cost=cost)
        assert GoodputDepth().choose(state).tolist() == [depth] * 2


def test_the_bias_towards_off_by_hand(make_state: Any) -> None:
    state = make_state(2, 3, cost=machine(0.5))
    assert GoodputDepth(off_bias=1.1).choose(state).tolist() == [0, 0]  # 1.33 x 1.1 > 1.36


def test_draft_passes_are_charged(make_state: Any) -> None:
    """Each draft pass of two costs 0.5: 1.82, 2.12, 2.09, 1.95 tokens a second."""
    cost = machine(0.1, draft_base_s=0.5)
    assert GoodputDepth().choose(make_state(2, 3, cost=cost, drafter="draft-model")).tolist() == [
        1,
        1,
    ]
    assert GoodputDepth().choose(make_state(2, 3, cost=cost)).tolist() == [3, 3]


def test_sequences_without_a_proposal_count_in_neither_tokens_nor_time(make_state: Any) -> None:
    """Tokens 1 + (1, 1.7, 2.19, 2.533) over passes of 2, 3, 4, 5: 1.333, 1.35, 1.28, 1.18."""
    state = make_state(2, 3, cost=machine(0.5), max_depths=np.array([3, 0]))
    assert GoodputDepth().choose(state).tolist() == [1, 0]


def test_the_rate_moves_by_accepted_over_tested_tokens(make_state: Any, make_outcome: Any) -> None:
    scheduler, state = GoodputDepth(), make_state(2, 3)
    scheduler.observe(make_outcome(state, [3, 3], [1, 3]))  # 4 of 5
    assert scheduler.acceptance_rate == pytest.approx(0.7 + 0.15 * 0.1)
    scheduler.observe(make_outcome(state, [3, 0], [0, 0]))  # 0 of 1
    assert scheduler.acceptance_rate == pytest.approx(0.715 * 0.85)


def test_a_round_without_drafts_teaches_nothing(make_state: Any, make_outcome: Any) -> None:
    scheduler = GoodputDepth()
    scheduler.observe(make_outcome(make_state(2, 3), [0, 0], [0, 0]))
    assert scheduler.acceptance_rate == 0.7


def test_everything_accepted_for_ever_is_no_division_by_zero(make_state: Any) -> None:
    scheduler = GoodputDepth()
    scheduler.acceptance_rate = 1.0
    assert scheduler.choose(make_state(2, 3, cost=machine(0.1))).tolist() == [3, 3]


def test_adaspec_revives_a_low_rate(make_state: Any, make_outcome: Any) -> None:
    state = make_state(2, 3, cost=machine(0.1))
    smartspec, adaspec = GoodputDepth(), GoodputDepth.adaspec()
    for scheduler in (smartspec, adaspec):
        for _ in range(6):
            scheduler.observe(make_outcome(state, [3, 3], [0, 0]))
        scheduler.choose(state)
    assert smartspec.acceptance_rate == pytest.approx(0.7 * 0.85**6)
    assert adaspec.acceptance_rate == 0.65
    adaspec.reset()
    assert adaspec.acceptance_rate == 0.7


@pytest.mark.parametrize("options", [{"off_bias": 0.0}, {"revive_below": 0.7}])
def test_bad_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"off_bias|revive_below"):
        GoodputDepth(**options)


def test_nobody_running_needs_no_depths(make_state: Any) -> None:
    assert GoodputDepth().choose(make_state(0)).tolist() == []
