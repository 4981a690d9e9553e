from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.pricing import full_draft_s, round_seconds, verify_seconds
from specdepth.scheduler.cost import CostModel

COST = CostModel.linear(
    base_s=1.0, token_s=0.1, draft_base_s=0.2, draft_token_s=0.01, overhead_s=0.05, context_s=0.001
)


def test_a_round_is_priced_by_hand(make_state: Any) -> None:
    state = make_state(
        2,
        4,
        cost=COST,
        drafter="draft-model",
        num_context_tokens=100,
    )
    depths = np.array([[0, 0], [2, 0], [2, 1]])
    target = np.array([1.1, 1.3, 1.4]) + 0.1 + 0.05
    drafting = [0.0, 2 * 0.21, 0.22 + 0.21]
    assert round_seconds(state, depths) == pytest.approx(target + drafting)


def test_catching_up_is_no_matter_of_one_round(make_state: Any) -> None:
    seconds = [
        round_seconds(
            make_state(1, 4, cost=COST, drafter="draft-model", draft_lag=np.array([lag])),
            np.array([[0], [2]]),
        )
        for lag in (0, 500)
    ]
    assert (seconds[0] == seconds[1]).all()


def test_prompt_lookup_pays_for_the_target_alone(make_state: Any) -> None:
    state = make_state(2, 4, cost=COST, num_context_tokens=0)
    seconds = round_seconds(state, np.array([[4, 0], [2, 2]]))
    assert seconds == pytest.approx([1.55, 1.55])


def test_verify_seconds_are_those_of_rounds_without_drafting(make_state: Any) -> None:
    state = make_state(3, 4, cost=COST, num_prefill_tokens=20)
    depths = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [3, 0, 0]])
    assert verify_seconds(state, 3) == pytest.approx(round_seconds(state, depths))


def test_prompts_in_the_pass_are_not_the_price_of_depth(make_state: Any) -> None:
    plain = verify_seconds(make_state(3, 4, cost=COST, num_context_tokens=60), 6)
    mixed = verify_seconds(
        make_state(3, 4, cost=COST, num_prefill_tokens=20, num_context_tokens=60), 6
    )
    assert mixed == pytest.approx(plain)  # beyond the knee of a linear machine


def test_below_the_knee_prompts_make_the_first_drafts_dear(make_state: Any) -> None:
    cost = CostModel.linear(base_s=1.0, token_s=0.1, knee=8)
    free = verify_seconds(make_state(2, 4, cost=cost), 4)
    filled = verify_seconds(make_state(2, 4, cost=cost, num_prefill_tokens=10), 4)
    assert free == pytest.approx([1.0] * 5)
    assert filled == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])


def test_unknown_counts_of_another_engine_are_taken_as_none(make_state: Any) -> None:
    unknown = make_state(2, 4, cost=COST, num_prefill_tokens=-1, num_context_tokens=-1)
    known = make_state(2, 4, cost=COST, num_prefill_tokens=0, num_context_tokens=0)
    assert (verify_seconds(unknown, 4) == verify_seconds(known, 4)).all()


def test_full_drafts_cost_k_passes_with_a_draft_model(make_state: Any) -> None:
    assert full_draft_s(make_state(2, 4, cost=COST, drafter="draft-model")) == pytest.approx(0.88)
    assert full_draft_s(make_state(2, 4, cost=COST)) == 0
