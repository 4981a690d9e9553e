from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.envs.reward import (
    REWARDS,
    ReferenceRate,
    added_s,
    charged_s,
    decision_s,
    depth_0_seconds_per_token,
    expected_tokens,
    modelled_s,
    relative_rewards,
    slot_rewards,
    team_rewards,
    throughput_rewards,
)
from specdepth.envs.workload_config import PromptPool, WorkloadConfig
from specdepth.envs.workload_run import WorkloadRun
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import RoundOutcome, RoundState
from tests.decoder.tiny import noisy_copy
from tests.envs.toy import toy_decoder, toy_model, toy_prompts

LINEAR = CostModel.linear(base_s=0.05, token_s=0.003)


def real_rounds(
    depths: list[int], cost: CostModel = LINEAR, **options: Any
) -> list[tuple[RoundState, RoundOutcome]]:
    """The first rounds of four requests, each sequence always with its own depth."""
    decoder = toy_decoder(cost=cost, **options)
    config = WorkloadConfig(arrivals="constant", num_requests=4, concurrency=4, max_new_tokens=20)
    workload = PromptPool(decoder, toy_prompts()).workload(config, np.random.default_rng(0))
    run = WorkloadRun(decoder.engine, workload)
    rounds: list[tuple[RoundState, RoundOutcome]] = []
    state = run.next_decision()
    while state is not None and len(rounds) < 4:
        outcome = run.finish_round(np.array(depths)[state.slots])
        rounds.append((state, outcome))
        state = run.next_decision()
    return rounds


def test_modelled_seconds_are_those_of_the_virtual_clock() -> None:
    cost = CostModel.linear(base_s=0.05, token_s=0.003, context_s=1e-5, overhead_s=0.002)
    for _, outcome in real_rounds([0, 1, 2, 4], cost):
        assert modelled_s(outcome, cost) == pytest.approx(charged_s(outcome))


def test_charged_seconds_leave_out_the_time_to_decide() -> None:
    decoder = toy_decoder()
    config = WorkloadConfig(arrivals="constant", num_requests=1, concurrency=1, max_new_tokens=9)
    workload = PromptPool(decoder, toy_prompts()).workload(config, np.random.default_rng(0))
    run = WorkloadRun(decoder.engine, workload)
    run.next_decision()
    decoder.engine.clock.wait_until(decoder.engine.clock.now() + 5)
    outcome = run.finish_round(np.array([0]))
    assert outcome.elapsed_s > 5
    assert charged_s(outcome) == pytest.approx(0.05 + 5 * 0.003)


def test_prompts_in_the_pass_are_not_the_depths_doing() -> None:
    (state, outcome), *_ = ROUNDS
    assert outcome.num_prefill_tokens == 4 * 5
    seconds = decision_s(state, outcome, LINEAR, modelled_s(outcome, LINEAR))
    assert seconds == pytest.approx(0.05 + 0.003 * (outcome.num_pass_tokens - 20 - 1))
    for state, outcome in ROUNDS[1:]:
        whole = modelled_s(outcome, LINEAR)
        assert decision_s(state, outcome, LINEAR, whole) == pytest.approx(whole)


def test_a_preempted_sequence_is_charged_what_its_text_takes_again() -> None:
    state, outcome = ROUNDS[1]
    preempted = np.array([False, False, False, True])
    outcome = replace(outcome, preempted=preempted)
    lost = state.positions[3]
    extra = decision_s(state, outcome, LINEAR, 1.0) - 1.0
    assert extra == pytest.approx(0.05 + 0.003 * (lost - 1))


def test_a_sequence_adds_its_drafted_tokens_to_the_pass() -> None:
    for state, outcome in real_rounds([0, 1, 2, 4]):
        assert added_s(state, outcome, LINEAR) == pytest.approx(0.003 * outcome.num_drafted)


def test_below_the_knee_drafts_are_free() -> None:
    cost = CostModel.linear(base_s=0.05, token_s=0.003, knee=64)
    for state, outcome in real_rounds([0, 1, 2, 4], cost)[1:]:
        assert added_s(state, outcome, cost) == pytest.approx(np.zeros(4))


def draft_rounds(depths: list[int]) -> tuple[CostModel, list[tuple[RoundState, RoundOutcome]]]:
    cost = CostModel.linear(base_s=0.05, token_s=0.003, draft_base_s=0.01, draft_token_s=0.001)
    return cost, real_rounds(depths, cost, draft=noisy_copy(toy_model(), 0.1))


def test_the_deepest_sequence_pays_for_the_draft_passes_that_it_needs_alone() -> None:
    cost, rounds = draft_rounds([0, 1, 1, 4])
    state, outcome = rounds[1]
    assert outcome.num_proposed.tolist() == [0, 1, 1, 4]
    lag = np.maximum(state.draft_lag, 0)
    expected = [
        0.0,
        0.001 + 0.003,
        0.001 + 0.003,
        # one place in the pass of three, three passes of its own
        0.001 + 3 * 0.011 + 4 * 0.003,
    ]
    assert added_s(state, outcome, cost) == pytest.approx(
        expected + 0.001 * lag * (outcome.num_proposed > 0)
    )


def test_what_a_sequence_adds_is_what_the_round_saves_without_it() -> None:
    cost, rounds = draft_rounds([4, 2, 0, 3])
    for state, outcome in rounds[1:]:
        depths = outcome.num_drafted
        lag = np.maximum(state.draft_lag, 0)

        def seconds(depths: Any, state: RoundState = state, lag: Any = lag) -> float:
            return float(
                cost.round_s(
                    depths,
                    num_prefill_tokens=0,
                    num_context_tokens=state.num_context_tokens,
                    num_catch_up_tokens=int(lag[depths > 0].sum()),
                )
            )

        saved = [
            seconds(depths) - seconds(np.where(np.arange(4) == i, 0, depths)) for i in range(4)
        ]
        assert added_s(state, outcome, cost) == pytest.approx(np.array(saved))


@given(
    depths=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    elapsed_s=st.floats(0.001, 1.0),
    price=st.floats(0.001, 1.0),
)
def test_rewards_of_the_slots_sum_to_the_rounds(
    depths: list[int], elapsed_s: float, price: float
) -> None:
    state, outcome = ROUNDS[sum(depths) % len(ROUNDS)]
    rewards = slot_rewards(
        state, outcome, elapsed_s=elapsed_s, seconds_per_token=price, cost=LINEAR
    )
    whole = outcome.num_committed.sum() - elapsed_s / price
    assert rewards.sum() == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_one_more_rejected_token_costs_exactly_what_it_adds() -> None:
    """A difference reward: the rest of the round is the same, whatever the sequence does."""
    state, outcome = ROUNDS[1]
    added = added_s(state, outcome, LINEAR)
    whole = modelled_s(outcome, LINEAR)
    rewards = slot_rewards(state, outcome, elapsed_s=whole, seconds_per_token=0.01, cost=LINEAR)
    base_s = 0.05 + 3 * 0.003  # the same round at depth 0
    expected = outcome.num_committed - (added + base_s / 4) / 0.01
    assert rewards == pytest.approx(expected)


def test_the_reference_rate_starts_as_decoding_without_speculation() -> None:
    rates = ReferenceRate(LINEAR, 4)
    assert [rates(n) for n in (1, 2, 4)] == pytest.approx([0.05, 0.053 / 2, 0.059 / 4])
    assert rates(4) == pytest.approx(depth_0_seconds_per_token(LINEAR, 4))


def test_a_bad_policy_does_not_raise_the_price_of_a_token() -> None:
    rates = ReferenceRate(LINEAR, 4)
    rates.note(2, 100.0, 1)
    rates.refresh()
    assert rates(2) == pytest.approx(0.053 / 2)


def test_the_reference_rate_moves_towards_what_is_measured_when_it_is_refreshed() -> None:
    rates = ReferenceRate(LINEAR, 4, prior_rounds=10)
    for _ in range(10):
        rates.note(2, 0.053, 4)
    assert rates(2) == pytest.approx(0.053 / 2)
    rates.refresh()
    assert rates(2) == pytest.approx(2 * 0.53 / (20 + 40))
    assert rates(1) == pytest.approx(0.05)


def test_one_rate_for_all_loads_is_that_of_all_rounds() -> None:
    rates = ReferenceRate(LINEAR, 4, by_load=False, prior_rounds=1)
    rates.note(1, 50.0, 1000)
    rates.note(2, 50.0, 3000)
    rates.refresh()
    assert rates(1) == rates(4) == pytest.approx(100 / 4000, rel=0.01)


def test_the_reference_rate_can_be_saved_and_put_back() -> None:
    rates = ReferenceRate(LINEAR, 4)
    rates.note(3, 1.0, 7)
    rates.refresh()
    other = ReferenceRate(LINEAR, 4)
    other.restore(rates.state())
    assert [other(n) for n in range(5)] == [rates(n) for n in range(5)]
    with pytest.raises(ValueError, match="1 machines with 4 slots, expected 1 with 8"):
        ReferenceRate(LINEAR, 8).restore(rates.state())


def test_machines_have_reference_rates_of_their_own() -> None:
    slow = CostModel.linear(base_s=0.5, token_s=0.03)
    rates = ReferenceRate([LINEAR, slow], 4, prior_rounds=10)
    assert rates(2, 1) == pytest.approx(0.53 / 2)
    for _ in range(10):
        rates.note(2, 0.53, 4, machine=1)
    rates.refresh()
    assert rates(2, 0) == pytest.approx(0.053 / 2)
    assert rates(2, 1) == pytest.approx(2 * 5.3 / (20 + 40))
    other = ReferenceRate([LINEAR, slow], 4)
    other.restore(rates.state())
    assert other(2, 1) == rates(2, 1)
    with pytest.raises(ValueError, match="2 machines with 4 slots, expected 1 with 4"):
        ReferenceRate(LINEAR, 4).restore(rates.state())


def test_rates_that_an_earlier_version_saved_are_read() -> None:
    rates = ReferenceRate(LINEAR, 2)
    old = {"seconds": [0.0, 1.0, 2.0], "tokens": [0.0, 4.0, 8.0], "rates": [0.1, 0.2, 0.3]}
    rates.restore(old)  # type: ignore[arg-type]
    assert [rates(n) for n in range(3)] == old["rates"]


ROUNDS = real_rounds([0, 1, 2, 4])


def test_relative_rewards_weigh_tokens_against_the_time_that_they_add() -> None:
    state, outcome = ROUNDS[1]
    drafted = outcome.num_drafted
    runs, depths = np.array([0, 1, 2, 4]), np.array([1, 1, 0, 2])
    rewards = relative_rewards(
        state,
        outcome,
        runs=runs,
        depths=depths,
        token_worth=0.8,
        seconds_per_token=0.01,
        cost=LINEAR,
    )
    gained = np.minimum(runs, drafted) - np.minimum(runs, depths)
    expected = 0.8 * gained - 0.003 * (drafted - depths) / 0.01
    assert rewards == pytest.approx(expected)


def test_agreement_with_the_reference_earns_nothing() -> None:
    for state, outcome in ROUNDS[1:]:
        rewards = relative_rewards(
            state,
            outcome,
            runs=np.full(state.num_running, 3),
            depths=outcome.num_drafted,
            token_worth=0.8,
            seconds_per_token=0.01,
            cost=LINEAR,
        )
        assert not rewards.any()


def test_as_a_team_everybody_is_paid_the_sum_of_the_differences() -> None:
    for state, outcome in ROUNDS:
        paid: dict[str, Any] = {"elapsed_s": 0.07, "seconds_per_token": 0.02, "cost": LINEAR}
        each = slot_rewards(state, outcome, **paid)
        whole = team_rewards(state, outcome, **paid)
        assert whole == pytest.approx(np.full(state.num_running, each.sum()))


def test_throughput_is_tokens_a_second_in_speeds_of_one_sequence_without_speculation() -> None:
    state, outcome = ROUNDS[1]
    committed = outcome.num_committed.sum()
    for price in (0.01, 0.5):  # of the reference policy, which has no part in it
        paid = throughput_rewards(
            state, outcome, elapsed_s=0.1, seconds_per_token=price, cost=LINEAR
        )
        assert paid == pytest.approx(np.full(4, committed / 0.1 * 0.05))


def test_throughput_of_rounds_is_not_that_of_the_whole() -> None:
    """Why it is the naive choice: two halves at 1 and 3 tokens a second are not 2."""
    state, outcome = ROUNDS[1]
    tokens = np.full(4, 1.0)
    seconds = (4.0, 4 / 3)
    each = [
        throughput_rewards(
            state, outcome, elapsed_s=s, seconds_per_token=1.0, cost=LINEAR, tokens=tokens
        )[0]
        for s in seconds
    ]
    assert np.mean(each) / 0.05 == pytest.approx(2.0)
    assert 8 / sum(seconds) == pytest.approx(1.5)


@pytest.mark.parametrize("form", sorted(REWARDS))
def test_other_tokens_can_be_paid_for_in_every_form(form: str) -> None:
    state, outcome = ROUNDS[1]
    paid: dict[str, Any] = {"elapsed_s": 0.07, "seconds_per_token": 0.02, "cost": LINEAR}
    same = outcome.num_committed.astype(np.float64)
    usual = REWARDS[form](state, outcome, **paid)
    assert REWARDS[form](state, outcome, **paid, tokens=same) == pytest.approx(usual)
    assert (REWARDS[form](state, outcome, **paid, tokens=same + 1) > usual).all()


def test_expected_tokens_are_the_bonus_and_the_survival_of_what_was_drafted() -> None:
    _, outcome = ROUNDS[1]
    assert outcome.num_drafted.tolist() == [0, 1, 2, 4]
    survival = np.tile([0.9, 0.6, 0.3, 0.1], (4, 1))
    assert expected_tokens(survival, outcome) == pytest.approx([1.0, 1.9, 2.5, 2.9])


def test_a_preempted_sequence_is_expected_to_commit_nothing() -> None:
    _, outcome = ROUNDS[1]
    outcome = replace(outcome, preempted=np.array([False, False, False, True]))
    assert expected_tokens(np.ones((4, 4)), outcome).tolist() == [1.0, 2.0, 3.0, 0.0]


def test_where_survival_is_certain_expected_tokens_are_those_committed() -> None:
    for _, outcome in ROUNDS[1:]:
        certain = np.arange(4) < outcome.num_accepted[:, None]
        tokens = expected_tokens(certain.astype(np.float64), outcome)
        assert tokens.tolist() == (outcome.num_accepted + 1).tolist()
