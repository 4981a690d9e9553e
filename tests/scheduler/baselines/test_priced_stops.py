from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.priced_stops import PricedStops, survival_so_far
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals, lawful_rules
from specdepth.scheduler.online_logistic import OnlineLogistic
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

COST = CostModel.linear(base_s=1.0, token_s=0.1, draft_base_s=0.2)
"""Passes of 1, 1.1, 1.2 s, draft passes of 0.2 s for any number of sequences."""


class Inner:
    """Sets the caps that it was told, and keeps what it hears."""

    lawful_under = frozenset({"greedy", "coupled"})

    def __init__(self, caps: list[int]) -> None:
        self.caps, self.num_resets = np.array(caps), 0
        self.outcomes: list[RoundOutcome] = []

    def choose(self, state: RoundState) -> Ints:
        return self.caps

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)

    def reset(self) -> None:
        self.num_resets += 1


def top1_of(rate: Any) -> Floats:
    """Largest draft probabilities that mean these acceptance rates before anything was learned: the
    sigmoid of 0.5 log-odds - 0.2.
    """
    odds = 2 * (np.log(rate) - np.log1p(-np.asarray(rate)) + 0.2)
    return np.asarray(1 / (1 + np.exp(-odds)))


def ask(rule: PricedStops, state: RoundState, rows: list[int], *rates: list[float]) -> list[bool]:
    """Ask about `rows`; `rates` are of the tokens drawn so far and of the next one."""
    top1 = top1_of(np.array(rates).T)
    signals = DraftSignals(np.array(rows), len(rates) - 1, top1, top1, top1)
    answer: list[bool] = rule.keep_drafting(state, signals).tolist()
    return answer


def ready(state: RoundState, caps: list[int]) -> PricedStops:
    rule = PricedStops(Inner(caps))
    assert rule.choose(state).tolist() == caps
    return rule


@pytest.fixture
def alone(make_state: Any) -> RoundState:
    state: RoundState = make_state(1, 4, cost=COST, drafter="draft-model")
    return state


# A second is worth one token: 0.1 s of verification and 0.2 s of the next pass are worth 0.3.


@pytest.mark.parametrize(("rate", "goes_on"), [(0.31, True), (0.29, False)])
def test_a_token_earns_its_verification_and_the_next_pass(
    rate: float, goes_on: bool, alone: RoundState
) -> None:
    assert ask(ready(alone, [4]), alone, [0], [rate]) == [goes_on]


@pytest.mark.parametrize(("rate", "goes_on"), [(0.11, True), (0.09, False)])
def test_at_the_cap_there_is_no_next_pass_to_pay(
    rate: float, goes_on: bool, alone: RoundState
) -> None:
    assert ask(ready(alone, [1]), alone, [0], [rate]) == [goes_on]


def test_the_cap_is_what_is_possible(make_state: Any) -> None:
    """Eight are asked for, but the text ends after one."""
    state = make_state(1, 8, cost=COST, drafter="draft-model", max_depths=np.array([1]))
    assert ask(ready(state, [8]), state, [0], [0.2]) == [True]


def test_survival_is_the_product_of_the_rates_so_far(alone: RoundState) -> None:
    rule = ready(alone, [4])
    assert ask(rule, alone, [0], [0.9]) == [True]
    assert ask(rule, alone, [0], [0.9], [0.4]) == [True]  # 0.36
    assert ask(rule, alone, [0], [0.9], [0.4], [0.8]) == [False]  # 0.288


def test_tokens_drawn_already_are_in_the_pass(make_state: Any) -> None:
    """The third token of the pass is free, the fourth costs 1 s."""
    cost = CostModel(
        name="step",
        tokens=(1, 2, 3, 4),
        verify_s=(1.0, 1.2, 1.2, 2.2),
        draft_sequences=(1,),
        draft_s=(0.01,),
    )
    state = make_state(1, 4, cost=cost, drafter="draft-model")
    rule = ready(state, [4])
    assert ask(rule, state, [0], [0.9]) == [True]
    assert ask(rule, state, [0], [0.9], [0.1]) == [True]  # 0.09 over 0.01
    assert ask(rule, state, [0], [0.9], [0.9], [0.9]) == [False]  # 0.73 over 1.01


def test_sequences_share_the_next_pass(make_state: Any) -> None:
    """With two, a second is worth 2 / 1.1 tokens: 0.1 s are worth 0.18, the pass 0.36. Either alone would
    win 0.45 - 0.55, together they win 0.9 - 0.73.
    """
    state = make_state(2, 4, cost=COST, drafter="draft-model")
    assert ask(ready(state, [4, 4]), state, [0, 1], [0.45, 0.45]) == [True, True]
    assert ask(ready(state, [4, 4]), state, [0, 1], [0.45, 0.10]) == [False, False]
    assert ask(ready(state, [4, 4]), state, [0, 1], [0.70, 0.10]) == [True, False]


def test_a_sequence_at_its_cap_goes_before_likelier_ones(make_state: Any) -> None:
    """The likelier one does not earn a pass of its own, the other needs none."""
    state = make_state(2, 4, cost=COST, drafter="draft-model")
    assert ask(ready(state, [4, 1]), state, [0, 1], [0.3, 0.25]) == [False, True]


def test_only_those_still_drafting_are_judged(make_state: Any) -> None:
    state = make_state(3, 4, cost=COST, drafter="draft-model")
    rule = ready(state, [4, 4, 4])
    assert ask(rule, state, [0, 1, 2], [0.9, 0.01, 0.9]) == [True, False, True]
    assert ask(rule, state, [0, 2], [0.9, 0.9], [0.9, 0.01]) == [True, False]


def test_unknown_confidence_is_none(alone: RoundState) -> None:
    rule, nan = ready(alone, [4]), np.full((1, 1), np.nan)
    assert rule.keep_drafting(alone, DraftSignals(np.arange(1), 0, nan, nan, nan)).tolist() == [
        False
    ]


def test_survival_so_far_uses_the_intercept_of_each_position() -> None:
    model = OnlineLogistic(3)
    model.slope, model.intercepts = 1.0, np.array([0.0, np.log(3), 5.0])
    # Odds of a half are 1: rates 0.5 and 0.75.
    assert survival_so_far(model, np.full((1, 2), 0.5)) == pytest.approx([0.375])


# ------------------------------------------------------------- what it learns


def test_time_is_worth_what_rounds_have_earned(alone: RoundState, make_outcome: Any) -> None:
    """A round of 1.3 s (two tokens in the pass, one draft pass) commits 2 tokens: gain 2 / 1.3."""
    rule = ready(alone, [4])
    assert rule.gain == 1.0
    rule.observe(make_outcome(alone, [1], [1], draft_pass_sequences=(1,)))
    assert rule.gain == pytest.approx(2 / 1.3)
    rule.choose(alone)
    assert ask(rule, alone, [0], [0.45]) == [False]  # 0.3 s are worth 0.46 now
    rule.choose(alone)
    assert ask(rule, alone, [0], [0.47]) == [True]
    # The next one commits one token in 1.0 s.
    rule.observe(make_outcome(alone, [0], [0]))
    assert rule.gain == pytest.approx((0.98 * 2 + 1) / (0.98 * 1.3 + 1.0))


def test_time_is_worth_what_plain_decoding_makes_of_it_at_least(
    alone: RoundState, make_outcome: Any
) -> None:
    rule = ready(alone, [4])
    rule.observe(make_outcome(alone, [4], [0], draft_pass_sequences=(1, 1, 1, 1)))
    assert rule.gain == 1.0


def test_prompts_in_the_pass_do_not_make_time_cheap(make_state: Any, make_outcome: Any) -> None:
    state = make_state(1, 4, cost=COST, drafter="draft-model", num_prefill_tokens=20)
    rule = ready(state, [4])
    outcome = make_outcome(
        state, [1], [1], draft_pass_sequences=(1,), num_prefill_tokens=20, num_pass_tokens=22
    )
    rule.observe(outcome)
    assert rule.gain == pytest.approx(2 / 1.3)


def test_it_learns_what_confidence_is_worth(alone: RoundState, make_outcome: Any) -> None:
    rule = ready(alone, [4])
    shown = top1_of([[0.9, 0.9, 0.9, 0.9]])
    for _ in range(300):
        rule.choose(alone)
        rule.observe(make_outcome(alone, [4], [0], draft_top1=shown))
    rule.choose(alone)
    assert ask(rule, alone, [0], [0.9]) == [False]


def test_the_inner_rule_hears_of_every_round(alone: RoundState, make_outcome: Any) -> None:
    inner = Inner([4])
    rule = PricedStops(inner)
    rule.choose(alone)
    outcome = make_outcome(alone, [2], [1])
    rule.observe(outcome)
    assert inner.outcomes == [outcome]


def test_reset_forgets(alone: RoundState, make_outcome: Any) -> None:
    inner = Inner([4])
    rule = PricedStops(inner)
    rule.choose(alone)
    rule.observe(make_outcome(alone, [4], [4]))
    assert rule.gain > 1
    rule.reset()
    assert (rule.gain, rule.acceptance, inner.num_resets) == (1.0, None, 1)
    PricedStops(FixedDepth(2)).reset()  # which has none of its own


# --------------------------------------------------------------------- seam


def test_with_prompt_lookup_it_is_the_inner_rule(make_state: Any, make_outcome: Any) -> None:
    state, inner = make_state(1, 4, cost=COST), Inner([3])
    rule = PricedStops(inner)
    assert rule.choose(state).tolist() == [3]
    outcome = make_outcome(state, [3], [1])
    rule.observe(outcome)
    assert inner.outcomes == [outcome]
    assert rule.acceptance is None


def test_it_is_as_lawful_as_the_rule_inside() -> None:
    assert lawful_rules(PricedStops(Inner([1]))) == {"greedy", "coupled"}
    assert "rejection" in lawful_rules(PricedStops())


def test_by_default_caps_go_by_the_last_rounds_confidence() -> None:
    assert isinstance(PricedStops().caps.survival, ConfidenceSurvival)  # type: ignore[attr-defined]
