from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.priced_stops import PricedStops
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals, check_lawful
from specdepth.scheduler.features import feature_matrix
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.learned_offset import LogitSurvival, survival_of_logits
from specdepth.scheduler.online_logistic import OnlineLogistic
from specdepth.scheduler.policy_file import PolicyWeights, read_policy, save_policy

SHRINKAGE = {1: Shrinkage(price=1.25), 16: Shrinkage(pull=0.4, exponent=0.9, price=1.6)}


@pytest.fixture
def offsets(make_weights: Any) -> PolicyWeights:
    plain = make_weights()
    return make_weights(
        weights=(*plain.weights[:-1], plain.weights[-1][1:]),
        biases=(*plain.biases[:-1], plain.biases[-1][1:]),
        depths=tuple(range(1, 9)),
        action="offset",
        shrinkage=SHRINKAGE,
    )


def test_survival_is_the_product_of_the_positions_chances(make_state: Any) -> None:
    state = make_state(2, max_depths=np.array([8, 3]))
    logits = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    expected = np.cumprod(1 / (1 + np.exp(-logits.astype(np.float64))), axis=1)
    expected[1, 3:] = 0.0
    survival = survival_of_logits(logits, state)
    assert survival.dtype == np.float64
    np.testing.assert_allclose(survival, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("depth", [4, 12])
def test_offsets_fit_an_engine_of_any_depth(
    offsets: PolicyWeights, make_card: Any, make_state: Any, depth: int
) -> None:
    """Tokens that they know nothing of have no chance, so nobody drafts them."""
    policy = LearnedScheduler(offsets, make_card())
    cheap = CostModel(name="free", tokens=(1, 1000), verify_s=(1.0, 1.0))
    depths = policy.choose(make_state(5, depth=depth, cost=cheap))
    assert depths.tolist() == [min(depth, 8)] * 5


def test_huge_logits_are_certainties(make_state: Any) -> None:
    logits = np.full((1, 8), 1e6, np.float32)
    logits[0, 4:] = -1e6
    assert survival_of_logits(logits, make_state(1)).tolist() == [[1] * 4 + [0] * 4]


def test_offsets_choose_as_the_greedy_rule_over_their_logits(
    offsets: PolicyWeights, make_card: Any, make_state: Any
) -> None:
    policy = LearnedScheduler(offsets, make_card())
    rule = CappedGreedyDepth(LogitSurvival(policy.scores), SHRINKAGE)
    rng = np.random.default_rng(3)
    seen = set[int]()
    for num_running in (1, 2, 7, 32):
        state = make_state(
            num_running,
            max_depths=rng.integers(0, 9, num_running),
            acceptance_ema=rng.random(num_running),
            match_length=rng.integers(0, 5, num_running),
        )
        depths = policy.choose(state)
        np.testing.assert_array_equal(depths, rule.choose(state))
        assert (depths <= state.max_depths).all()
        seen.update(depths.tolist())
    assert len(seen) > 2


def test_offsets_with_stops_decide_as_the_stops_over_their_rule(
    tmp_path: Path, offsets: PolicyWeights, make_card: Any, make_state: Any, make_outcome: Any
) -> None:
    folder = save_policy(tmp_path, replace(offsets, stops=True), make_card(drafter="draft-model"))
    policy = LearnedScheduler.load(folder)
    rule = PricedStops(CappedGreedyDepth(LogitSurvival(policy.scores), SHRINKAGE))
    cost = CostModel.linear(base_s=1.0, token_s=0.1, draft_base_s=0.05)
    rng = np.random.default_rng(5)
    answers = set[int]()
    for _ in range(2 * OnlineLogistic.refit_interval):
        size = int(rng.integers(1, 5))
        state = make_state(size, cost=cost, drafter="draft-model", acceptance_ema=rng.random(size))
        depths = policy.choose(state)
        np.testing.assert_array_equal(depths, rule.choose(state))
        top1 = rng.random((size, 8))
        rows = np.flatnonzero(depths)
        signals = DraftSignals(rows, 0, *(top1[rows, :1] for _ in range(3)))
        told = policy.keep_drafting(state, signals)
        np.testing.assert_array_equal(told, rule.keep_drafting(state, signals))
        answers.update(told.tolist())
        drafted = rng.integers(0, 9, size)
        accepted = rng.integers(0, drafted + 1)
        for one in (policy, rule):
            one.observe(make_outcome(state, drafted, accepted, draft_top1=top1))
    assert answers == {0, 1, 8}
    stops = policy._rule
    assert isinstance(stops, PricedStops)
    assert stops.acceptance is not None
    assert stops.acceptance.num_refits > 0
    policy.reset()
    assert stops.acceptance is None


def test_policies_without_stops_have_no_hooks(offsets: PolicyWeights, make_card: Any) -> None:
    policy = LearnedScheduler(offsets, make_card())
    assert not hasattr(policy, "keep_drafting")
    assert not hasattr(policy, "reset")


def test_with_stops_it_is_lawful_under_rejection(offsets: PolicyWeights, make_card: Any) -> None:
    policy = LearnedScheduler(replace(offsets, stops=True), make_card(drafter="draft-model"))
    check_lawful(policy, "rejection", has_draft_model=True)


def same(logits: Any, _: Any) -> Any:
    return logits


def test_more_worth_is_never_less_depth(
    offsets: PolicyWeights, make_card: Any, make_state: Any
) -> None:
    policy = LearnedScheduler(offsets, make_card())
    state = make_state(1)
    logits = policy.scores(feature_matrix(state))
    depths = []
    for shift in (-3.0, 0.0, 3.0):
        moved = logits + np.float32(shift)
        rule = CappedGreedyDepth(LogitSurvival(partial(same, moved)))
        depths.append(int(rule.choose(state)[0]))
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]


def test_saved_offsets_read_as_the_same(
    tmp_path: Path, offsets: PolicyWeights, make_card: Any
) -> None:
    weights, _ = read_policy(save_policy(tmp_path, offsets, make_card()))
    assert weights.action == "offset"
    assert weights.shrinkage == SHRINKAGE
    assert weights.depths == tuple(range(1, 9))
    assert not weights.stops


@pytest.mark.parametrize("stops", [True, False])
def test_stops_are_in_the_configuration(
    stops: bool, tmp_path: Path, offsets: PolicyWeights, make_card: Any
) -> None:
    path = save_policy(tmp_path, replace(offsets, stops=stops), make_card()) / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("stops") is stops
    assert read_policy(tmp_path)[0].stops is stops
    path.write_text(json.dumps(config))  # as an earlier version wrote it
    assert not read_policy(tmp_path)[0].stops


def test_stops_are_for_offsets(make_weights: Any) -> None:
    with pytest.raises(ValueError, match='stops are for offsets, this policy\'s action is "depth"'):
        make_weights(stops=True)


def test_a_file_without_an_action_is_of_depths(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    path = save_policy(tmp_path, make_weights(), make_card()) / "config.json"
    config = json.loads(path.read_text())
    del config["action"], config["shrinkage"]
    path.write_text(json.dumps(config))
    assert read_policy(tmp_path)[0].action == "depth"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shrinkage": {}}, "need a shrinkage"),
        ({"shrinkage": {"1": {"pull": 2.0}}}, "expected a pull in 0..1"),
        ({"shrinkage": {"1": {"push": 2.0}}}, '"shrinkage" is damaged'),
        ({"shrinkage": [1]}, '"shrinkage" is damaged'),
        ({"depths": [2, 1, 3, 4, 5, 6, 7, 8]}, "depths 1..K in order"),
        ({"action": "price"}, "policy action is one of"),
        ({"action": "depth"}, "and they alone"),
        ({"stops": 1}, '"stops" is true or false, got 1'),
    ],
)
def test_damaged_offsets_are_refused(
    change: Any, sentence: str, tmp_path: Path, offsets: PolicyWeights, make_card: Any
) -> None:
    path = save_policy(tmp_path, offsets, make_card()) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        read_policy(tmp_path)
