from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from specdepth.agents.feature_groups import feature_mask
from specdepth.agents.slot_policy import CLIP, MAX_DEPTH_COLUMN, MIN_STD, SlotFeatures, SlotPolicy
from specdepth.envs.observation import ROW_HIGH, ROW_LOW
from specdepth.scheduler.features import HIGH, LOW, NUM_FEATURES, UNIT_DEPTH

SPACE = spaces.Box(ROW_LOW, ROW_HIGH)
K = 4


def make_policy(depth: int = K, **arguments: Any) -> SlotPolicy:
    torch.manual_seed(0)
    return SlotPolicy(
        SPACE,
        spaces.Discrete(depth + 1),
        lambda _: 1e-3,
        features_extractor_class=SlotFeatures,
        **arguments,
    )


def observations(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    rows = rng.uniform(LOW, HIGH, (count, NUM_FEATURES))
    rows = np.concatenate([np.ones((count, 1)), rows], 1).astype(np.float32)
    rows[:, MAX_DEPTH_COLUMN] = rng.integers(0, K + 1, count) / UNIT_DEPTH
    return rows


def test_depths_that_cannot_be_honoured_are_never_drawn() -> None:
    policy, rows = make_policy(), observations(500)
    actions, _, _ = policy(torch.from_numpy(rows))
    assert (actions.numpy() <= np.round(rows[:, MAX_DEPTH_COLUMN] * UNIT_DEPTH)).all()
    deepest, _ = policy.predict(rows, deterministic=True)
    assert (deepest <= np.round(rows[:, MAX_DEPTH_COLUMN] * UNIT_DEPTH)).all()
    assert len(np.unique(actions.numpy())) == K + 1


def test_a_feature_at_its_bound_excludes_no_depth() -> None:
    """It counts no further, and the engine clips."""
    policy = make_policy(depth=40)
    rows = observations(2)
    rows[:, MAX_DEPTH_COLUMN] = (31 / UNIT_DEPTH, HIGH[MAX_DEPTH_COLUMN - 1])
    assert policy.allowed(torch.from_numpy(rows)).sum(1).tolist() == [32, 41]


def test_without_a_choice_a_row_has_no_say_in_the_policy_loss() -> None:
    policy, rows = make_policy(), observations(8)
    rows[:, MAX_DEPTH_COLUMN] = 0
    _, log_prob, entropy = policy.evaluate_actions(
        torch.from_numpy(rows), torch.zeros(8, dtype=torch.int64)
    )
    assert entropy is not None
    assert torch.equal(log_prob, torch.zeros(8))
    assert torch.equal(entropy, torch.zeros(8))
    log_prob.sum().backward()
    assert all(not p.grad.any() for p in policy.action_net.parameters() if p.grad is not None)


def test_the_ways_to_ask_for_probabilities_agree() -> None:
    policy, rows = make_policy(), torch.from_numpy(observations(50))
    torch.manual_seed(1)
    actions, values, log_prob = policy(rows)
    again = policy.evaluate_actions(rows, actions)
    assert torch.equal(again[0], values)
    assert torch.equal(again[1], log_prob)
    table = policy.log_probs(rows)
    assert torch.allclose(table.gather(1, actions[:, None])[:, 0], log_prob, atol=1e-6)
    assert torch.allclose((table.exp() * policy.allowed(rows)).sum(1), torch.ones(50))


def test_features_are_normalised_by_what_was_seen() -> None:
    features, rows = SlotFeatures(SPACE), observations(1000)
    features.update(rows[:300])
    features.update(rows[300:])
    normal = features(torch.from_numpy(rows)).numpy()
    std = rows[:, 1:].std(0)
    assert normal.mean(0) == pytest.approx(np.zeros(NUM_FEATURES), abs=1e-3)
    assert normal.std(0)[std > MIN_STD] == pytest.approx(1, abs=1e-3)


def test_a_feature_that_never_varied_does_not_explode_when_it_does() -> None:
    features, rows = SlotFeatures(SPACE), observations(100)
    rows[:, 5] = 0
    features.update(rows)
    rows[:, 5] = 1
    normal = features(torch.from_numpy(rows))
    assert normal.abs().max() <= CLIP


def test_statistics_travel_with_the_weights() -> None:
    policy, other = make_policy(), make_policy()
    policy.normaliser.update(observations(100))
    other.load_state_dict(policy.state_dict())
    other.normaliser.update(observations(50, 1))
    policy.normaliser.update(observations(50, 1))
    assert torch.equal(policy.normaliser.mean, other.normaliser.mean)
    assert int(policy.normaliser.count) == 150


def test_updates_without_rows_change_nothing() -> None:
    features = SlotFeatures(SPACE)
    features.update(np.zeros((0, len(ROW_LOW)), np.float32))
    assert not features.mean.any()
    assert features.inv_std.eq(1).all()


def test_other_actions_and_extractors_are_refused() -> None:
    with pytest.raises(ValueError, match="one discrete depth"):
        SlotPolicy(SPACE, spaces.MultiDiscrete([5, 5]), lambda _: 1e-3)
    policy = SlotPolicy(SPACE, spaces.Discrete(5), lambda _: 1e-3)
    with pytest.raises(ValueError, match="no SlotFeatures"):
        _ = policy.normaliser


def test_masked_features_are_constant_in_the_network() -> None:
    features = SlotFeatures(SPACE, masked=("proposal",))
    hidden = torch.from_numpy(feature_mask(("proposal",)) == 0)
    assert 0 < int(hidden.sum()) < NUM_FEATURES
    rows = observations(64)
    features.update(rows)
    seen = features(torch.from_numpy(rows))
    assert bool((seen[:, hidden] == 0).all())
    assert bool((seen[:, ~hidden].std(0) > 0).all())
