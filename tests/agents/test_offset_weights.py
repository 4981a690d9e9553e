from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.offset_weights import FLAGS, INPUTS, LAST_FLAG, SCALES, offset_weights
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights
from specdepth.scheduler.survival_estimators import MatchLengthSurvival
from specdepth.scheduler.survival_model import SurvivalModel
from tests.agents.toy_rule import SHRINKAGE, toy_rule

CARD = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)


def rows(flag: str, num: int = 40) -> np.ndarray:
    features = np.random.default_rng(0).random((num, NUM_FEATURES)).astype(np.float32)
    for name in (*FLAGS.values(), LAST_FLAG):
        features[:, FEATURE_NAMES.index(name)] = name == flag
    return features


def rule_logits(features: np.ndarray) -> np.ndarray:
    model = toy_rule().survival
    assert isinstance(model, SurvivalModel)
    chance = model.conditional_acceptance(features).astype(np.float64)
    return np.log(chance / (1 - chance))


def scores(weights: PolicyWeights, features: np.ndarray) -> np.ndarray:
    return LearnedScheduler(weights, CARD).scores(features)


@pytest.mark.parametrize("by_load", [{}, {4: np.zeros(len(SCALES))}])
def test_without_offsets_it_is_the_rule(by_load: dict[int, np.ndarray]) -> None:
    weights = offset_weights(toy_rule(), by_load)
    features = rows("load_3_4")
    np.testing.assert_allclose(scores(weights, features), rule_logits(features), atol=1e-4)
    assert weights.shrinkage == SHRINKAGE


@pytest.mark.parametrize("stops", [True, False])
def test_stops_are_passed_on(stops: bool) -> None:
    assert offset_weights(toy_rule(), {}, stops=stops).stops is stops
    assert not offset_weights(toy_rule(), {}).stops


@pytest.mark.parametrize("load", [1, 8, 32])
def test_a_load_has_offsets_of_its_own(load: int) -> None:
    rng = np.random.default_rng(load)
    by_load = {one: rng.normal(size=len(SCALES)) for one in FLAGS}
    weights = offset_weights(toy_rule(), by_load)
    features = rows(FLAGS[load])
    moves = by_load[load] * SCALES
    middles = np.array([middle for middle, _ in INPUTS.values()])
    columns = [FEATURE_NAMES.index(name) for name in INPUTS]
    leaning = (features[:, columns] - middles) @ moves[5:]
    expected = rule_logits(features) + leaning[:, None] + moves[3] + moves[4] * (np.arange(4) - 2)
    # A line made of a tanh unit is off by a thousandth or so.
    np.testing.assert_allclose(scores(weights, features), expected, atol=5e-3)


def test_beyond_the_last_load_its_offsets_hold() -> None:
    by_load = {32: np.linspace(-1, 1, len(SCALES))}
    weights = offset_weights(toy_rule(), by_load)
    at_32, beyond = rows("load_17_32"), rows(LAST_FLAG)
    moved = scores(weights, beyond) - rule_logits(beyond)
    np.testing.assert_allclose(moved, scores(weights, at_32) - rule_logits(at_32), atol=1e-3)
    assert np.abs(moved).max() > 0.05


def test_shrinkage_moves_with_its_parameters_and_stays_in_range() -> None:
    values = np.zeros(len(SCALES))
    values[:3] = 100, -100, 1
    moved = offset_weights(toy_rule(), {2: values}).shrinkage
    assert set(moved) == {1, 2, 4}
    assert (moved[2].pull, moved[2].exponent) == (0.95, 0.3)
    assert moved[2].price == pytest.approx(toy_rule().shrinkage_at(2).price * np.exp(SCALES[2]))
    assert moved[1] == SHRINKAGE[1]


def test_a_rule_over_counts_has_no_network() -> None:
    with pytest.raises(ValueError, match="over a fitted survival model"):
        offset_weights(CappedGreedyDepth(MatchLengthSurvival()), {})
