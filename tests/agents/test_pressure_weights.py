from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdepth.agents.offset_policy import starting_weights
from specdepth.agents.offset_weights import FLAGS, LAST_FLAG, SCALES, offset_weights
from specdepth.agents.pressure_weights import (
    PRESSURE_SCALES,
    SCARCE_ROOM,
    pressure_weights,
    sees_memory,
)
from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights
from tests.agents.toy_rule import SHRINKAGE, toy_rule

CARD = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)


def rows(flag: str, num: int = 40) -> np.ndarray:
    features = np.random.default_rng(0).random((num, NUM_FEATURES)).astype(np.float32)
    for name in (*FLAGS.values(), LAST_FLAG):
        features[:, FEATURE_NAMES.index(name)] = name == flag
    return features


def scores(weights: PolicyWeights, features: np.ndarray) -> np.ndarray:
    return LearnedScheduler(weights, CARD).scores(features)


def moved(flag: str, room: float, pressure: np.ndarray) -> np.ndarray:
    """What `pressure` adds to the logits where `flag` is set, with so much room."""
    features = rows(flag)
    features[:, FEATURE_NAMES.index("kv_room")] = room
    blind = offset_weights(toy_rule(), {4: np.ones(len(SCALES))})
    return scores(pressure_weights(blind, pressure), features) - scores(blind, features)


@pytest.mark.parametrize("flag", ["load_1", "load_3_4", LAST_FLAG])
def test_a_full_pool_moves_logits_and_room_does_not(flag: str) -> None:
    pressure = np.array([0.0, -2.0, -1.0])
    expected = pressure[1] * PRESSURE_SCALES[1] + pressure[2] * PRESSURE_SCALES[2] * (
        np.arange(4) - 2
    )
    # Without any room a tanh of 2 is 2 % short of all the pressure.
    full, half = moved(flag, 0.0, pressure), moved(flag, SCARCE_ROOM, pressure)
    np.testing.assert_allclose(full, np.broadcast_to(expected, full.shape), rtol=0.03)
    np.testing.assert_allclose(half, np.broadcast_to(expected / 2, half.shape), rtol=1e-3)
    np.testing.assert_allclose(moved(flag, 1.0, pressure), 0, atol=1e-5)


def test_pressure_can_begin_earlier() -> None:
    later, earlier = np.array([0.0, -2.0, 0.0]), np.array([3.0, -2.0, 0.0])
    room = 2 * SCARCE_ROOM
    assert (moved("load_2", room, earlier) < 5 * moved("load_2", room, later)).all()


def test_it_can_be_told_whether_a_policy_sees_memory() -> None:
    blind = offset_weights(toy_rule(), {4: np.ones(len(SCALES))})
    assert not sees_memory(blind)
    assert sees_memory(pressure_weights(blind, np.ones(len(PRESSURE_SCALES))))


def test_ppo_can_hold_it_and_the_rule_stays_as_it_was() -> None:
    weights = pressure_weights(offset_weights(toy_rule(), {}), np.ones(len(PRESSURE_SCALES)))
    assert starting_weights(LearnedScheduler(weights, CARD)) is weights
    assert weights.layer_sizes == (NUM_FEATURES, 5 + 1, 4)
    assert weights.shrinkage == SHRINKAGE


def test_a_policy_of_another_form_is_refused() -> None:
    weights = offset_weights(toy_rule(), {})
    scaled = replace(weights, inv_std=np.full(NUM_FEATURES, 2.0, np.float32))
    with pytest.raises(ValueError, match="over raw features"):
        pressure_weights(scaled, np.ones(len(PRESSURE_SCALES)))
