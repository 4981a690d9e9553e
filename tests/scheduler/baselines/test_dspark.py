from __future__ import annotations

from typing import Any

import numpy as np

from specdepth.scheduler.baselines.dspark import DSparkDepth
from specdepth.scheduler.baselines.greedy import GreedyDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import ProposalSignals, check_lawful
from tests.scheduler.baselines.known_survival import KnownSurvival

STAIRS = CostModel(name="stairs", tokens=(1, 2, 3, 4), verify_s=(1.0, 1.9, 1.95, 2.0))


def test_admission_ends_at_the_first_token_that_does_not_pay(make_state: Any) -> None:
    """1.8 over 1.9 is less than 1 over 1, though 2.55 over 1.95 is more."""
    state, known = make_state(1, 3, cost=STAIRS), KnownSurvival([[0.8, 0.75, 0.01]])
    assert DSparkDepth(known).choose(state).tolist() == [0]
    assert GreedyDepth(known).choose(state).tolist() == [2]


def test_on_a_convex_curve_the_stop_loses_nothing(make_state: Any) -> None:
    rng = np.random.default_rng(0)
    cost = CostModel.linear(base_s=1.0, token_s=0.12, knee=4)
    for _ in range(50):
        known = KnownSurvival(np.cumprod(rng.random((3, 4)), axis=1))
        state = make_state(3, 4, cost=cost)
        stopped, searched = DSparkDepth(known).choose(state), GreedyDepth(known).choose(state)
        assert stopped.tolist() == searched.tolist()


def test_everything_is_admitted_while_it_pays(make_state: Any) -> None:
    flat = CostModel.linear(base_s=1.0, token_s=0.0)
    assert DSparkDepth(KnownSurvival([[0.9, 0.1]])).choose(make_state(1, 2, cost=flat)) == [2]


def signals_of(top1: Any) -> ProposalSignals:
    top1 = np.asarray(top1)
    rows = np.arange(len(top1))
    return ProposalSignals(rows, np.full(len(top1), top1.shape[1]), top1, top1, top1)


def test_a_draft_model_drafts_all_and_is_cut_by_its_confidence(make_state: Any) -> None:
    cost = CostModel.linear(base_s=1.0, token_s=0.4, knee=2)
    state = make_state(2, 3, cost=cost, drafter="draft-model")
    scheduler = DSparkDepth()
    assert scheduler.choose(state).tolist() == [3, 3]
    kept = scheduler.trim(state, signals_of([[0.999, 0.999, 0.999], [0.999, 0.001, 0.999]]))
    # sigmoid(0.5 log odds - 0.2) is 0.96 and 0.03, so token 3 of the second row dies with token 2
    assert kept.tolist() == [3, 1]


def test_sequences_that_did_not_draft_are_in_the_price(make_state: Any) -> None:
    """One token at 0.45 makes 1.45 over 1.6 s alone, and 5.45 over 1.5 s with four that sit out."""
    cost = CostModel(name="dip", tokens=(1, 2, 5, 6), verify_s=(1.0, 1.6, 1.4, 1.5))
    for num_running, kept in ((1, 0), (5, 1)):
        state = make_state(num_running, 1, cost=cost, drafter="draft-model")
        scheduler = DSparkDepth()
        scheduler.choose(state)
        assert scheduler.trim(state, signals_of([[0.5]])).tolist() == [kept]


def test_proposals_of_prompt_lookup_are_left_as_chosen(make_state: Any) -> None:
    state, scheduler = make_state(2, 3), DSparkDepth()
    scheduler.choose(state)
    assert scheduler.trim(state, signals_of(np.full((2, 3), np.nan))).tolist() == [3, 3]


def test_unknown_confidence_is_none(make_state: Any) -> None:
    state = make_state(1, 2, cost=STAIRS, drafter="draft-model")
    scheduler = DSparkDepth()
    scheduler.choose(state)
    assert scheduler.trim(state, signals_of([[np.nan, 0.9]])).tolist() == [0]


def test_it_learns_what_confidence_is_worth(make_state: Any, make_outcome: Any) -> None:
    state = make_state(2, 2, drafter="draft-model")
    scheduler = DSparkDepth()
    scheduler.choose(state)
    shown = np.array([[0.9, 0.9], [0.2, np.nan]])
    for _ in range(300):
        scheduler.observe(make_outcome(state, [2, 2], [2, 0], draft_top1=shown))
    assert scheduler.confidence is not None
    assert scheduler.confidence.num_refits == 3
    assert scheduler.confidence.slope > 0.5
    scheduler.reset()
    assert scheduler.confidence is None


def test_it_is_lawful_under_rejection_with_a_draft_model() -> None:
    check_lawful(DSparkDepth(), "rejection", has_draft_model=True)
