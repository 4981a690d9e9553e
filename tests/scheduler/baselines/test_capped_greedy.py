from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.scheduler.baselines.capped_greedy import (
    CappedGreedyDepth,
    Shrinkage,
    _worth_by_rank,
    shrink,
)
from specdepth.scheduler.baselines.greedy import GreedyDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import check_lawful
from specdepth.scheduler.survival_estimators import MatchLengthSurvival
from tests.scheduler.baselines.known_survival import (
    KnownSurvival,
    best_goodput,
    goodput,
    random_cost,
    random_survival,
)
from tests.scheduler.baselines.plain_greedy import plain_depths

SMALL: dict[str, Any] = {
    "num_running": st.integers(1, 3),
    "depth": st.integers(1, 3),
    "seed": st.integers(0, 10_000),
}


def candidates(survival: Any) -> list[list[int]]:
    """Depths of every cap and number of tokens, by walking along the tokens one at a time."""
    num_rows, depth = survival.shape
    tokens = sorted(
        itertools.product(range(depth), range(num_rows)), key=lambda t: (-survival[t[1], t[0]], t)
    )
    found = [[0] * num_rows]
    for cap in range(1, depth + 1):
        depths = [0] * num_rows
        for column, row in tokens:
            if column < cap:
                depths[row] += 1
                found.append(list(depths))
    return found


# The best depths


@settings(max_examples=60)
@given(**SMALL)
def test_no_depths_are_better_under_an_affine_draft_price(
    num_running: int, depth: int, seed: int, make_state_once: Any
) -> None:
    """Then a round's price is a function of the cap and the sum of depths."""
    rng = np.random.default_rng(seed)
    base, slope = rng.random(2) * [0.3, 0.1]
    cost = random_cost(
        rng, draft_sequences=(1, 2, 16), draft_s=tuple(base + slope * n for n in (1, 2, 16))
    )
    survival = random_survival(rng, num_running, depth)
    state = make_state_once(num_running, depth, cost=cost, drafter="draft-model")
    depths = CappedGreedyDepth(KnownSurvival(survival)).choose(state)
    assert goodput(state, survival, depths) == pytest.approx(best_goodput(state, survival))


@settings(max_examples=60)
@given(**SMALL)
def test_no_depths_are_better_where_drafting_is_free(
    num_running: int, depth: int, seed: int, make_state_once: Any
) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, num_running, depth)
    state = make_state_once(num_running, depth, cost=random_cost(rng), drafter="draft-model")
    depths = CappedGreedyDepth(KnownSurvival(survival)).choose(state)
    assert goodput(state, survival, depths) == pytest.approx(best_goodput(state, survival))


@settings(max_examples=60)
@given(num_running=st.integers(1, 5), depth=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_it_is_the_best_of_its_candidates_under_any_price(
    num_running: int, depth: int, seed: int, make_state_once: Any
) -> None:
    """Staircases of draft passes and prompts in the same pass included."""
    rng = np.random.default_rng(seed)
    draft_s = 0.1 + np.cumsum(rng.random(6) * 0.1)
    cost = random_cost(rng, draft_sequences=tuple(range(1, 7)), draft_s=tuple(draft_s))
    survival = random_survival(rng, num_running, depth)
    state = make_state_once(
        num_running,
        depth,
        cost=cost,
        drafter="draft-model",
        num_prefill_tokens=int(rng.integers(0, 5)),
    )
    depths = CappedGreedyDepth(KnownSurvival(survival)).choose(state)
    best = max(goodput(state, survival, one) for one in candidates(survival))
    assert goodput(state, survival, depths) == pytest.approx(best)


@settings(max_examples=60)
@given(num_running=st.integers(1, 8), depth=st.integers(1, 5), seed=st.integers(0, 1_000_000))
def test_it_chooses_as_the_plain_definition_does(
    num_running: int, depth: int, seed: int, make_state_once: Any
) -> None:
    """Tokens that cannot be the last one are left out of the search, and nobody can tell."""
    rng = np.random.default_rng(seed)
    steps = tuple(range(2, 17, 2)) if rng.random() < 0.3 else ()
    draft_s = rng.choice([0.0, 0.05]) + np.cumsum(rng.random(6) * rng.choice([0.01, 0.1]))
    cost = random_cost(
        rng,
        cuda_graph_sizes=steps,
        context_s=0.001,
        draft_sequences=tuple(range(1, 7)),
        draft_s=tuple(draft_s.tolist()),
        draft_token_s=0.01,
    )
    shape = rng.random()
    if shape < 0.3:
        dips = 1 - 0.1 * rng.random(len(cost.tokens))
        cost = replace(cost, verify_s=tuple((np.array(cost.verify_s) * dips).tolist()))
    elif shape < 0.5:  # flat here and there
        added = rng.random(15) * 0.4 * (rng.random(15) < 0.7)
        prices = (1 + np.cumsum(added)).tolist()
        cost = replace(cost, tokens=tuple(range(1, 16)), verify_s=tuple(prices), prefill_s=())
    elif rng.random() < 0.7:  # the same price for each token: then most are left out
        cost = replace(cost, tokens=(1, 16), verify_s=(1.0, 1.0 + 3 * rng.random()), prefill_s=())
    max_depths = rng.integers(0, depth + 1, num_running)
    survival = random_survival(rng, num_running, depth)
    if rng.random() < 0.3:
        survival = np.round(survival, 1)  # with ties
    survival = np.where(np.arange(depth) < max_depths[:, None], survival, 0.0)
    state = make_state_once(
        num_running,
        depth,
        cost=cost,
        drafter=str(rng.choice(["draft-model", "prompt-lookup"])),
        max_depths=max_depths,
        draft_lag=rng.integers(0, 9, num_running) * rng.integers(0, 2),
        num_prefill_tokens=int(rng.choice([0, 0, 5])),
    )
    shrinkage = Shrinkage(
        pull=float(rng.choice([0.0, 0.4])),
        exponent=float(rng.choice([1.0, 0.85])),
        price=float(rng.choice([0.0, 0.7, 1.0, 1.6])),
    )
    depths = CappedGreedyDepth(KnownSurvival(survival), shrinkage).choose(state)
    assert depths.tolist() == plain_depths(survival, state, shrinkage).tolist()


def test_a_flat_step_does_not_put_all_tokens_in_the_search() -> None:
    """The fourth token is free, and yet those that survive 0.1 or less pay under no number."""
    seconds = np.array([1.0, 1.3, 1.6, 1.9, 1.9, 2.2])
    survival = np.array([[0.9, 0.5, 0.1, 0.05, 0.01]])
    worth = _worth_by_rank(survival, seconds, 1)
    assert 0.1 < worth < 0.5
    assert _worth_by_rank(survival, np.ones(6), 1) == 0
    assert _worth_by_rank(survival[:, :0], seconds[:1], 1) == np.inf


def test_a_cap_repairs_the_rule_that_ignores_draft_time(make_state: Any) -> None:
    """Fifteen sequences are good for one token, one for eight: eight passes for one are too many."""
    survival = np.zeros((16, 8))
    survival[:, 0] = 0.8
    survival[0] = 0.9 ** np.arange(1, 9)
    cost = CostModel.linear(base_s=1.0, token_s=0.005, draft_base_s=0.15)
    state = make_state(16, 8, cost=cost, drafter="draft-model")
    blind = GreedyDepth(KnownSurvival(survival)).choose(state)
    capped = CappedGreedyDepth(KnownSurvival(survival)).choose(state)
    assert blind.tolist() == [8] + [1] * 15
    assert capped.tolist() == [1] * 16
    assert goodput(state, survival, capped) > 1.3 * goodput(state, survival, blind)


def test_prompt_lookup_has_no_draft_passes_to_cap(make_state: Any) -> None:
    rng = np.random.default_rng(0)
    cost = CostModel.linear(base_s=1.0, token_s=0.05, draft_base_s=5.0)
    for _ in range(20):
        known = KnownSurvival(random_survival(rng, 6, 8))
        state = make_state(6, 8, cost=cost)
        capped = CappedGreedyDepth(known).choose(state)
        assert capped.tolist() == GreedyDepth(known).choose(state).tolist()
        assert capped.any()


@pytest.mark.parametrize(("num_remaining", "depth"), [(3, 0), (400, 1)])
def test_catching_up_is_spread_over_the_rest_of_the_text(
    num_remaining: int, depth: int, make_state: Any
) -> None:
    """200 tokens cost 2 s: too much for 3 tokens, nothing for 400."""
    cost = CostModel.linear(base_s=1.0, token_s=0.01, draft_base_s=0.05, draft_token_s=0.01)
    state = make_state(
        1,
        1,
        cost=cost,
        drafter="draft-model",
        draft_lag=np.array([200]),
        num_remaining=np.array([num_remaining]),
    )
    assert CappedGreedyDepth(KnownSurvival([[0.6]])).choose(state).tolist() == [depth]


def test_nothing_on_offer_and_nobody_running_are_fine(make_state: Any) -> None:
    cost = CostModel.linear(draft_base_s=0.1)
    for drafter in ("prompt-lookup", "draft-model"):
        idle = make_state(3, 4, cost=cost, drafter=drafter)
        assert not CappedGreedyDepth(KnownSurvival(np.zeros((3, 4)))).choose(idle).any()
        nobody = make_state(0, 4, cost=cost, drafter=drafter)
        assert CappedGreedyDepth(MatchLengthSurvival()).choose(nobody).tolist() == []


def test_it_is_lawful_everywhere() -> None:
    check_lawful(CappedGreedyDepth(MatchLengthSurvival()), "rejection", has_draft_model=True)


# Shrinkage


def test_survival_is_pulled_to_the_mean_of_those_that_can_draft_so_deep() -> None:
    survival = np.array([[0.8, 0.6], [0.4, 0.0], [0.0, 0.0]])
    pulled = shrink(survival, np.array([2, 1, 0]), Shrinkage(pull=0.5))
    assert pulled == pytest.approx(np.array([[0.7, 0.6], [0.5, 0.0], [0.0, 0.0]]))


def test_a_pulled_row_still_falls() -> None:
    """The mean at the second position is over the good sequence alone."""
    survival = np.array([[0.9, 0.9], [0.1, 0.0]])
    pulled = shrink(survival, np.array([2, 1]), Shrinkage(pull=1.0))
    assert pulled == pytest.approx(np.array([[0.5, 0.5], [0.5, 0.0]]))


def test_the_exponent_comes_before_the_pull() -> None:
    survival = np.array([[0.8, 0.4], [0.4, 0.2]])
    shrunk = shrink(survival, np.array([2, 2]), Shrinkage(pull=0.5, exponent=2.0))
    assert shrunk == pytest.approx(np.array([[0.52, 0.13], [0.28, 0.07]]))


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0.25, 4))
def test_shrunk_survival_is_survival(seed: int, pull: float, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    max_depths = rng.integers(0, 5, 6)
    beyond = np.arange(4) >= max_depths[:, None]
    survival = np.where(beyond, 0.0, random_survival(rng, 6, 4))
    shrunk = shrink(survival, max_depths, Shrinkage(pull=pull, exponent=exponent))
    assert (shrunk[beyond] == 0).all()
    assert ((shrunk >= 0) & (shrunk <= 1)).all()
    assert (np.diff(shrunk, axis=1) <= 0).all()


def test_a_full_pull_treats_all_alike(make_state: Any) -> None:
    survival = np.array([[0.9, 0.8], [0.1, 0.0]])
    state = make_state(2, 2, cost=CostModel.linear(base_s=1.0, token_s=0.1))
    alike = CappedGreedyDepth(KnownSurvival(survival), Shrinkage(pull=1.0))
    assert CappedGreedyDepth(KnownSurvival(survival)).choose(state).tolist() == [2, 0]
    assert alike.choose(state).tolist() == [2, 2]


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_a_higher_price_never_lengthens_the_round(drafter: str, make_state: Any) -> None:
    cost = CostModel.linear(base_s=1.0, token_s=0.05, draft_base_s=0.1, knee=4)
    state = make_state(5, 6, cost=cost, drafter=drafter)
    sums = []
    for price in (0.0, 0.5, 1.0, 2.0, 4.0, 100.0):
        known = KnownSurvival(random_survival(np.random.default_rng(7), 5, 6))
        depths = CappedGreedyDepth(known, Shrinkage(price=price)).choose(state)
        sums.append(int(depths.sum()))
    assert sums == sorted(sums, reverse=True)
    assert sums[0] == 30
    assert sums[-1] == 0


def test_shrinkage_is_interpolated_over_the_logarithm_of_the_load() -> None:
    scheduler = CappedGreedyDepth(
        MatchLengthSurvival(),
        {
            4: Shrinkage(pull=0.1, price=1.0),
            16: Shrinkage(pull=0.5, price=1.2, exponent=2.0, stop_price=0.6),
        },
    )
    assert scheduler.shrinkage_at(1) == scheduler.shrinkage_at(4) == Shrinkage(pull=0.1)
    middle = scheduler.shrinkage_at(8)
    assert (middle.pull, middle.exponent, middle.price) == pytest.approx((0.3, 1.5, 1.1))
    assert middle.stop_price == pytest.approx(0.8)
    assert scheduler.shrinkage_at(99) == scheduler.shrinkage_at(16)


@pytest.mark.parametrize(
    "options",
    [
        {"pull": 1.1},
        {"pull": -0.1},
        {"exponent": 0},
        {"price": -1},
        {"pull": np.nan},
        {"stop_price": -1},
    ],
)
def test_shrinkage_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shrinkage: expected a pull in"):
        Shrinkage(**options)


@pytest.mark.parametrize("by_load", [{}, {0: Shrinkage()}])
def test_shrinkage_by_load_names_real_loads(by_load: dict[int, Shrinkage]) -> None:
    with pytest.raises(ValueError, match="at least one number of sequences, all 1 or more"):
        CappedGreedyDepth(MatchLengthSurvival(), by_load)
