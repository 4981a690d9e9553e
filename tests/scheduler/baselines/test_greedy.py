from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.scheduler.baselines.ema_greedy import EmaGreedyDepth
from specdepth.scheduler.baselines.greedy import GreedyDepth
from specdepth.scheduler.cost import CostModel
from tests.scheduler.baselines.known_survival import (
    KnownSurvival,
    best_goodput,
    goodput,
    random_cost,
    random_survival,
)


@settings(max_examples=60)
@given(num_running=st.integers(1, 3), depth=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_no_depths_are_better_where_drafting_is_free(
    num_running: int, depth: int, seed: int, make_state_once: Any
) -> None:
    """Whatever the shape of the pass times: the sum of depths alone is priced."""
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, num_running, depth)
    state = make_state_once(num_running, depth, cost=random_cost(rng))
    depths = GreedyDepth(KnownSurvival(survival)).choose(state)
    assert goodput(state, survival, depths) == pytest.approx(best_goodput(state, survival))


def test_it_gives_tokens_to_the_likelier_sequence(make_state: Any) -> None:
    """2 over 1, 2.9 over 1.3, 3.71 over 1.6, 4.21 over 1.9: the third is the best."""
    survival = [[0.9, 0.81], [0.5, 0.1]]
    state = make_state(2, 2, cost=CostModel.linear(base_s=1.0, token_s=0.3, knee=2))
    assert GreedyDepth(KnownSurvival(survival)).choose(state).tolist() == [2, 0]


def test_a_staircase_is_jumped(make_state: Any) -> None:
    cost = CostModel(name="stairs", tokens=(1, 2, 3, 4), verify_s=(1.0, 1.9, 1.95, 2.0))
    state = make_state(1, 3, cost=cost)
    assert GreedyDepth(KnownSurvival([[0.8, 0.75, 0.01]])).choose(state).tolist() == [2]


def test_draft_passes_are_not_seen(make_state: Any) -> None:
    cost = CostModel.linear(base_s=1.0, token_s=0.01, draft_base_s=5.0)
    state = make_state(1, 3, cost=cost, drafter="draft-model")
    assert GreedyDepth(KnownSurvival([[0.5, 0.25, 0.125]])).choose(state).tolist() == [3]


def test_the_estimator_learns_and_forgets_with_it(make_state: Any, make_outcome: Any) -> None:
    known = KnownSurvival([[0.5]])
    scheduler = GreedyDepth(known)
    scheduler.observe(make_outcome(make_state(1, 1), [1], [1]))
    scheduler.reset()
    assert (known.num_observed, known.num_resets) == (1, 1)


def test_nobody_running_and_no_offers_are_fine(make_state: Any) -> None:
    assert GreedyDepth(KnownSurvival(np.zeros((0, 8)))).choose(make_state(0)).tolist() == []
    assert GreedyDepth(KnownSurvival(np.zeros((2, 8)))).choose(make_state(2)).tolist() == [0, 0]


def test_ema_greedy_drafts_by_each_sequences_own_average(make_state: Any) -> None:
    """A token costs a tenth of the pass: it pays from about a third on, so 0.1 never does."""
    cost = CostModel.linear(base_s=3.0, token_s=0.3, knee=3)
    state = make_state(3, 8, cost=cost, acceptance_ema=np.array([0.9, 0.6, 0.1]))
    depths = EmaGreedyDepth().choose(state).tolist()
    assert depths[2] == 0
    assert depths[0] > depths[1]
    survival = np.array([0.9, 0.6, 0.1])[:, None] ** np.arange(1, 9)
    alone = GreedyDepth(KnownSurvival(survival)).choose(state)
    assert depths == alone.tolist()
