from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.priced_stops import PricedStops, stands_at
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals, lawful_rules
from specdepth.scheduler.online_logistic import OnlineLogistic
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState
from tests.scheduler.baselines.known_survival import KnownSurvival

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


def ask(rule: PricedStops, state: RoundState, rows: list[int], *rates: list[float]) -> list[int]:
    """Ask about `rows` after each pass, for the last answer; `rates` are of the tokens drawn so far and of
    the next one, and before anything was learned also of the one after each, if that one stands.
    """
    top1 = top1_of(np.array(rates).T)
    for step in range(len(rates)):
        shown = top1[:, : step + 1]
        answer = rule.keep_drafting(state, DraftSignals(np.array(rows), step, shown, shown, shown))
        assert answer.dtype == np.int64
    depths: list[int] = answer.tolist()
    return depths


def ready(state: RoundState, caps: list[int] | None = None) -> PricedStops:
    rule = PricedStops(Inner([1] * state.num_running if caps is None else caps))
    rule.choose(state)
    return rule


@pytest.fixture
def alone(make_state: Any) -> RoundState:
    state: RoundState = make_state(1, 4, cost=COST, drafter="draft-model")
    return state


# ----------------------------------------------------------------- who drafts


def test_who_drafts_may_go_as_deep_as_there_is_room(make_state: Any) -> None:
    state = make_state(4, 8, drafter="draft-model", max_depths=np.array([8, 3, 8, 0]))
    assert PricedStops(Inner([1, 8, 0, 2])).choose(state).tolist() == [8, 3, 0, 0]


# ------------------------------------------------------------------ who draws

# A second is worth one token: 0.1 s of verification and 0.2 s of the next pass are worth 0.3.


@pytest.mark.parametrize(("rate", "depth"), [(0.11, 1), (0.09, 0)])
def test_a_token_that_is_shown_earns_its_verification(
    rate: float, depth: int, alone: RoundState
) -> None:
    assert ask(ready(alone), alone, [0], [rate]) == [depth]


def test_survival_is_the_product_of_the_rates_so_far(alone: RoundState) -> None:
    rule = ready(alone)
    assert ask(rule, alone, [0], [0.9]) == [4]
    assert ask(rule, alone, [0], [0.9], [0.8]) == [4]
    assert ask(rule, alone, [0], [0.9], [0.8], [0.15]) == [3]  # 0.108
    assert ask(rule, alone, [0], [0.9], [0.8], [0.12]) == [2]  # 0.0864


STEP = CostModel(
    name="step",
    tokens=(1, 2, 3, 4),
    verify_s=(1.0, 1.2, 1.2, 2.2),
    draft_sequences=(1,),
    draft_s=(0.01,),
)
"""The third token of the pass is free, the fourth costs 1 s."""


def test_tokens_drawn_already_are_in_the_pass(make_state: Any) -> None:
    state = make_state(1, 4, cost=STEP, drafter="draft-model")
    rule = ready(state)
    assert ask(rule, state, [0], [0.9]) == [4]  # 0.9 over 0.2, then 0.81 over 0.01
    assert ask(rule, state, [0], [0.9], [0.1]) == [2]  # 0.09 over 0, then 0.009 over 1.01
    assert ask(rule, state, [0], [0.9], [0.9], [0.9]) == [2]  # 0.73 over 1.0


def test_a_round_that_is_drafted_again_starts_anew(make_state: Any) -> None:
    """After a failure, say; with the token of the first try in the pass the second would be free."""
    state = make_state(1, 4, cost=STEP, drafter="draft-model")
    rule = ready(state)
    assert ask(rule, state, [0], [0.9]) == [4]
    assert ask(rule, state, [0], [0.15]) == [0]


def test_the_likelier_ones_draw_where_not_all_can(make_state: Any) -> None:
    """One token more costs nothing, two cost 0.5 s, which are worth a token."""
    cost = CostModel(
        name="tile",
        tokens=(1, 2, 3, 4),
        verify_s=(1.0, 1.0, 1.0, 1.5),
        draft_sequences=(1,),
        draft_s=(1.0,),
    )
    state = make_state(2, 4, cost=cost, drafter="draft-model")
    assert ask(ready(state), state, [0, 1], [0.3, 0.4]) == [0, 1]
    assert ask(ready(state), state, [0, 1], [0.4, 0.3]) == [1, 0]


def test_only_those_still_drafting_are_judged(make_state: Any) -> None:
    """With three a second is worth 2.5 tokens, a token's verification 0.25 and a pass 0.5."""
    state = make_state(3, 4, cost=COST, drafter="draft-model")
    rule = ready(state)
    assert ask(rule, state, [0, 1, 2], [0.9, 0.01, 0.9]) == [4, 0, 4]
    assert ask(rule, state, [0, 2], [0.95, 0.95], [0.95, 0.01]) == [4, 1]  # 0.857 over 0.75


def test_unknown_confidence_is_none(alone: RoundState) -> None:
    rule, nan = ready(alone), np.full((1, 1), np.nan)
    assert rule.keep_drafting(alone, DraftSignals(np.arange(1), 0, nan, nan, nan)).tolist() == [0]


# ------------------------------------------------------------------ who rides


@pytest.mark.parametrize(("rate", "depth"), [(0.56, 4), (0.54, 1)])
def test_the_token_after_earns_the_pass_and_its_verification(
    rate: float, depth: int, alone: RoundState
) -> None:
    """0.56 x 0.56 = 0.31 and 0.54 x 0.54 = 0.29 over 0.3."""
    assert ask(ready(alone), alone, [0], [rate]) == [depth]


@pytest.mark.parametrize("room", [1, 3])
def test_at_the_limit_nobody_rides(room: int, make_state: Any) -> None:
    """The text ends there."""
    state = make_state(1, 8, cost=COST, drafter="draft-model", max_depths=np.array([room]))
    assert ask(ready(state), state, [0], *[[0.99]] * room) == [room]


def test_sequences_share_the_next_pass(make_state: Any) -> None:
    """With two, a second is worth 2 / 1.1 tokens: 0.1 s are worth 0.18, the pass 0.36. Either alone would
    win 0.42 - 0.55, together they win 0.85 - 0.73.
    """
    state = make_state(2, 4, cost=COST, drafter="draft-model")
    assert ask(ready(state), state, [0, 1], [0.65, 0.65]) == [4, 4]
    assert ask(ready(state), state, [0, 1], [0.65, 0.20]) == [1, 1]
    assert ask(ready(state), state, [0, 1], [0.75, 0.20]) == [4, 1]
    assert ask(ready(state), state, [0, 1], [0.75, 0.10]) == [4, 0]


def test_a_sequence_at_its_limit_has_no_share_in_the_next_pass(make_state: Any) -> None:
    depths = np.array([1, 4])
    state = make_state(2, 4, cost=COST, drafter="draft-model", max_depths=depths)
    assert ask(ready(state), state, [0, 1], [0.9, 0.65]) == [1, 1]
    assert ask(ready(state), state, [0, 1], [0.9, 0.75]) == [1, 4]


def test_each_position_has_its_own_intercept_and_the_unknown_no_chance() -> None:
    model = OnlineLogistic(3)
    model.slope, model.intercepts = 1.0, np.array([0.0, np.log(3), 5.0])
    shown = np.array([[0.0], [np.nan]])  # odds of a half are 1
    assert stands_at(model, shown, 0).tolist() == pytest.approx([0.5, 0])
    assert stands_at(model, shown, 1).tolist() == pytest.approx([0.75, 0])


# ------------------------------------------------------------- what it learns


def test_time_is_worth_what_rounds_have_earned(alone: RoundState, make_outcome: Any) -> None:
    """A round of 1.3 s (two tokens in the pass, one draft pass) commits 2 tokens: gain 2 / 1.3."""
    rule = ready(alone)
    assert rule.gain == 1.0
    rule.observe(make_outcome(alone, [1], [1], draft_pass_sequences=(1,)))
    assert rule.gain == pytest.approx(2 / 1.3)
    rule.choose(alone)
    # 0.1 s are worth 0.154 now and 0.3 s 0.462.
    asked = {rate: ask(rule, alone, [0], [rate])[0] for rate in (0.15, 0.16, 0.67, 0.69)}
    assert asked == {0.15: 0, 0.16: 1, 0.67: 1, 0.69: 4}
    # The next one commits one token in 1.0 s.
    rule.observe(make_outcome(alone, [0], [0]))
    assert rule.gain == pytest.approx((0.98 * 2 + 1) / (0.98 * 1.3 + 1.0))


def test_the_inner_rules_stop_price_makes_time_dearer(make_state: Any) -> None:
    """By load: 0.1 s of verification are worth 0.1, and 0.3 of the pass 0.3, times the price."""
    caps = CappedGreedyDepth(
        KnownSurvival(np.full((1, 4), 0.99)), {1: Shrinkage(stop_price=2.0), 2: Shrinkage()}
    )
    state = make_state(1, 4, cost=COST, drafter="draft-model")
    rule = PricedStops(caps)
    assert rule.choose(state).tolist() == [4]
    asked = {rate: ask(rule, state, [0], [rate])[0] for rate in (0.19, 0.21, 0.76, 0.79)}
    assert asked == {0.19: 0, 0.21: 1, 0.76: 1, 0.79: 4}


def test_time_is_worth_what_plain_decoding_makes_of_it_at_least(
    alone: RoundState, make_outcome: Any
) -> None:
    rule = ready(alone)
    rule.observe(make_outcome(alone, [4], [0], draft_pass_sequences=(1, 1, 1, 1)))
    assert rule.gain == 1.0


def test_prompts_in_the_pass_do_not_make_time_cheap(make_state: Any, make_outcome: Any) -> None:
    state = make_state(1, 4, cost=COST, drafter="draft-model", num_prefill_tokens=20)
    rule = ready(state)
    outcome = make_outcome(
        state, [1], [1], draft_pass_sequences=(1,), num_prefill_tokens=20, num_pass_tokens=22
    )
    rule.observe(outcome)
    assert rule.gain == pytest.approx(2 / 1.3)


def test_it_learns_what_confidence_is_worth(alone: RoundState, make_outcome: Any) -> None:
    rule = ready(alone)
    shown = top1_of([[0.9, 0.9, 0.9, 0.9]])
    for _ in range(300):
        rule.choose(alone)
        rule.observe(make_outcome(alone, [4], [0], draft_top1=shown))
    rule.choose(alone)
    assert ask(rule, alone, [0], [0.9]) == [0]


@pytest.mark.parametrize(("num_accepted", "depth"), [(1, 1), (2, 4)])
def test_it_learns_what_follows_a_token_that_stands(
    num_accepted: int, depth: int, alone: RoundState, make_outcome: Any
) -> None:
    rule = ready(alone)
    shown = top1_of([[0.6, 0.6, 0.6, 0.6]])
    for _ in range(300):
        rule.choose(alone)
        rule.observe(make_outcome(alone, [2], [num_accepted], draft_top1=shown))
    rule.choose(alone)
    assert ask(rule, alone, [0], [0.6]) == [depth]


def test_at_most_one_token_has_none_after_it(make_state: Any, make_outcome: Any) -> None:
    state = make_state(1, 1, cost=COST, drafter="draft-model")
    rule = ready(state)
    for _ in range(OnlineLogistic.refit_interval):
        assert ask(rule, state, [0], [0.9]) == [1]
        rule.observe(make_outcome(state, [1], [1], draft_top1=top1_of([[0.9]])))
        rule.choose(state)


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
    assert (rule.gain, rule.acceptance, rule.following, inner.num_resets) == (1.0, None, None, 1)
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
