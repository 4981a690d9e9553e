from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.adaptive_verification import AdaptiveVerificationDepth
from specdepth.scheduler.baselines.greedy import GreedyDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import ProposalSignals
from tests.scheduler.baselines.known_survival import KnownSurvival

COST = CostModel.linear(base_s=1.0, token_s=0.25)


def likely(num_tokens: int) -> list[float]:
    """Survival of 4 tokens, of which `num_tokens` are worth verifying for one sequence."""
    return [0.95 if j < num_tokens else 0.01 for j in range(4)]


def test_a_budget_from_this_round_is_the_greedy_rule(make_state: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        known = KnownSurvival(np.cumprod(rng.random((3, 4)) ** 0.5, axis=1))
        state = make_state(3, 4, cost=COST)
        chosen = AdaptiveVerificationDepth(known, stale_budget=False).choose(state)
        assert chosen.tolist() == GreedyDepth(known).choose(state).tolist()


def test_the_budget_is_that_of_the_last_rounds_confidences(make_state: Any) -> None:
    known = KnownSurvival([likely(1)])
    scheduler, state = AdaptiveVerificationDepth(known), make_state(1, 4, cost=COST)
    assert scheduler.choose(state).tolist() == [4], "a newcomer's confidences are 1"
    known.table = np.array([likely(3)])
    assert scheduler.choose(state).tolist() == [1]
    assert scheduler.choose(state).tolist() == [3]


def test_the_budget_goes_to_the_tokens_that_are_likeliest_now(make_state: Any) -> None:
    known = KnownSurvival([likely(3), likely(0)])
    scheduler, state = AdaptiveVerificationDepth(known), make_state(2, 4, cost=COST)
    scheduler.choose(state)
    known.table = np.array([likely(0), likely(4)])
    assert scheduler.choose(state).tolist() == [0, 3]


def test_a_new_request_in_the_slot_starts_afresh(make_state: Any) -> None:
    known = KnownSurvival([likely(1)])
    scheduler, state = AdaptiveVerificationDepth(known), make_state(1, 4, cost=COST)
    scheduler.choose(state)
    assert scheduler.choose(state).tolist() == [1]
    other = make_state(1, 4, cost=COST, request_ids=np.array([999]))
    assert scheduler.choose(other).tolist() == [4]


def test_confidences_follow_a_sequence_whatever_its_row(make_state: Any) -> None:
    known = KnownSurvival([likely(2), likely(0)])
    scheduler = AdaptiveVerificationDepth(known)
    both = make_state(2, 4, cost=COST)
    scheduler.choose(both)
    alone = make_state(1, 4, cost=COST, slots=np.array([1]), request_ids=np.array([101]))
    known.table = np.array([likely(4)])
    assert scheduler.choose(alone).tolist() == [0]


def test_a_round_without_an_offer_keeps_the_older_confidences(make_state: Any) -> None:
    known = KnownSurvival([likely(2)])
    scheduler, state = AdaptiveVerificationDepth(known), make_state(1, 4, cost=COST)
    scheduler.choose(state)
    known.table = np.zeros((1, 4))
    nothing = make_state(1, 4, cost=COST, max_depths=np.array([0]))
    assert scheduler.choose(nothing).tolist() == [0]
    known.table = np.array([likely(4)])
    assert scheduler.choose(state).tolist() == [2]


def signals_of(top1: Any) -> ProposalSignals:
    top1 = np.asarray(top1)
    return ProposalSignals(
        np.arange(len(top1)), np.full(len(top1), top1.shape[1]), top1, top1, top1
    )


def test_whole_drafts_are_verified_until_the_estimator_is_fitted(
    make_state: Any, make_outcome: Any
) -> None:
    state = make_state(2, 2, cost=COST, drafter="draft-model")
    scheduler = AdaptiveVerificationDepth(warmup_refits=1)
    shown = np.array([[0.9, 0.9], [0.1, np.nan]])
    for _ in range(100):
        assert scheduler.choose(state).tolist() == [2, 2]
        assert scheduler.trim(state, signals_of([[0.9, 0.9], [0.1, 0.9]])).tolist() == [2, 2]
        scheduler.observe(make_outcome(state, [2, 2], [2, 0], draft_top1=shown))
    scheduler.choose(state)
    assert scheduler.trim(state, signals_of([[0.9, 0.9], [0.1, 0.9]])).tolist() == [2, 0]


def test_draft_time_is_part_of_the_price(make_state: Any) -> None:
    """A token at 0.45 pays only where the round is long already."""
    cheap = CostModel.linear(base_s=1.0, token_s=0.6)
    long = CostModel.linear(base_s=1.0, token_s=0.6, draft_base_s=3.0)
    for cost, kept in ((cheap, 0), (long, 1)):
        state = make_state(1, 1, cost=cost, drafter="draft-model")
        scheduler = AdaptiveVerificationDepth(warmup_refits=0, stale_budget=False)
        scheduler.choose(state)
        # sigmoid(0 - 0.2) = 0.45: 1 / 1.0 against 1.45 / 1.6, and 1 / 4 against 1.45 / 4.6
        assert scheduler.trim(state, signals_of([[0.5]])).tolist() == [kept]


def test_reset_forgets_confidences(make_state: Any) -> None:
    known = KnownSurvival([likely(1)])
    scheduler, state = AdaptiveVerificationDepth(known), make_state(1, 4, cost=COST)
    scheduler.choose(state)
    scheduler.reset()
    assert scheduler.choose(state).tolist() == [4]
    assert known.num_resets == 1


def test_a_negative_warmup_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_refits is 0 or more, got -1"):
        AdaptiveVerificationDepth(warmup_refits=-1)
