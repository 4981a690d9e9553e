from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.online_cost import OnlineCost
from specdepth.scheduler.state import RoundOutcome

COST = CostModel(
    name="before",
    tokens=(1, 2, 4, 8, 16, 32, 64),
    verify_s=(0.05, 0.055, 0.06, 0.07, 0.09, 0.14, 0.25),
    context_s=1e-6,
    draft_sequences=(1, 32),
    draft_s=(0.005, 0.008),
)


@pytest.fixture
def ran(make_state, make_outcome):
    """A round of so many tokens whose pass took `factor` times what COST says."""

    def build(tokens: int, factor: float, *, draft_factor: float = 1.0) -> RoundOutcome:
        return make_outcome(
            make_state(4),
            [0] * 4,
            [0] * 4,
            num_pass_tokens=tokens,
            num_prefill_tokens=0,
            num_context_tokens=1000,
            draft_pass_sequences=(4, 2),
            num_catch_up_tokens=0,
            verify_s=factor * COST.pass_s(tokens) + 1000 * COST.context_s,
            draft_s=draft_factor * COST.draft_round_s((4, 2)),
        )

    return build


def test_what_prompts_looked_at_is_not_taken_for_a_slower_pass(make_state, make_outcome) -> None:
    cost = replace(COST, prefill_pair_s=1e-6)
    state = make_state(4)
    outcome = make_outcome(
        *(state, [0] * 4, [0] * 4),
        num_pass_tokens=64,
        num_prefill_tokens=60,
        num_prefill_pairs=50_000,
        draft_pass_sequences=(),
        verify_s=cost.pass_s(64, 60, state.num_context_tokens, 50_000),
    )
    online = OnlineCost(cost)
    for _ in range(50):
        online.observe(outcome)
    assert online.cost.pass_s(64, 60) == pytest.approx(COST.pass_s(64, 60))


def test_without_rounds_nothing_changes() -> None:
    assert OnlineCost(COST).cost == COST


def test_rounds_as_predicted_change_nothing(ran) -> None:
    online = OnlineCost(COST)
    for _ in range(50):
        online.observe(ran(8, 1.0))
    assert online.cost.pass_s(8) == pytest.approx(COST.pass_s(8))


def test_a_slower_machine_is_learned(ran) -> None:
    online = OnlineCost(COST)
    for _ in range(300):
        online.observe(ran(8, 1.3, draft_factor=1.2))
    assert online.cost.pass_s(8) == pytest.approx(1.3 * COST.pass_s(8), rel=0.03)
    assert online.cost.draft_pass_s(4) == pytest.approx(1.2 * COST.draft_pass_s(4), rel=0.03)
    assert online.cost.context_s == COST.context_s


def test_one_round_moves_a_price_by_a_percent_at_most(ran) -> None:
    online = OnlineCost(COST)
    online.observe(ran(8, 50.0))
    assert 1 < online.cost.pass_s(8) / COST.pass_s(8) < 1.0101


def test_spikes_do_not_move_the_median(ran) -> None:
    online, rng = OnlineCost(COST), np.random.default_rng(0)
    for _ in range(500):
        online.observe(ran(8, 10.0 if rng.random() < 0.1 else 1.1))
    assert online.cost.pass_s(8) == pytest.approx(1.1 * COST.pass_s(8), rel=0.03)


def test_factors_are_bounded(ran) -> None:
    online = OnlineCost(COST, bound=1.5)
    for _ in range(500):
        online.observe(ran(8, 9.0))
    assert online.cost.pass_s(8) == pytest.approx(1.5 * COST.pass_s(8), rel=0.01)


def test_buckets_learn_apart_and_sizes_between_them_lie_between(ran) -> None:
    online = OnlineCost(COST)
    for _ in range(500):
        online.observe(ran(2, 1.0))
        online.observe(ran(40, 1.4))
    factors = [online.cost.pass_s(n) / COST.pass_s(n) for n in COST.tokens]
    assert factors[0] == pytest.approx(1.0, abs=0.02)
    assert factors[-1] == pytest.approx(1.4, rel=0.03)
    assert factors == sorted(factors)


def test_factors_far_apart_still_make_a_cost_model(ran) -> None:
    online = OnlineCost(COST, bound=4.0)
    for _ in range(500):
        online.observe(ran(1, 4.0))
        online.observe(ran(40, 0.25))
    assert online.cost.pass_s(64) >= 0.5 * online.cost.pass_s(1)


@pytest.mark.parametrize("changes", [{"step": 0.0}, {"width": -1.0}, {"bound": 0.5}])
def test_impossible_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="step and width must be above 0"):
        OnlineCost(COST, **changes)
