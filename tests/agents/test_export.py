from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO

from specdepth.agents.export import export_policy, policy_weights
from specdepth.agents.slot_policy import MAX_DEPTH_COLUMN, SlotPolicy
from specdepth.agents.train import make_model
from specdepth.agents.train_config import PPOConfig
from specdepth.envs.decode_env import LiveDecodeEnv
from specdepth.envs.observation import ROW_HIGH, ROW_LOW
from specdepth.scheduler.features import HIGH, LOW, NUM_FEATURES, UNIT_DEPTH
from specdepth.scheduler.learned import LearnedScheduler, PolicyCard
from tests.agents.toy_training import toy_vec_env
from tests.envs.toy import toy_decoder, toy_prompts

K = 4


def card(**changes: Any) -> PolicyCard:
    fields: dict[str, Any] = {
        "model_pair": "toy+recorded-text",
        "drafter": "recorded-text",
        "max_num_speculative_tokens": K,
        "mask_depths": True,
        "env_id": "specdepth/LiveDecode-v0",
    }
    return PolicyCard(**(fields | changes))


def extreme_observations(count: int = 4096) -> Any:
    """Uniform, at the bounds, constant, and far from what the normalisation saw."""
    rng = np.random.default_rng(0)
    shape = (count, NUM_FEATURES)
    rows = rng.uniform(LOW, HIGH, shape)
    rows[::4] = np.where(rng.random((len(rows[::4]), NUM_FEATURES)) < 0.5, LOW, HIGH)
    rows[1::64] = LOW
    rows[2::64] = HIGH
    rows[3::64] = 0
    rows = np.concatenate([np.ones((count, 1)), rows], 1).astype(np.float32)
    rows[:, MAX_DEPTH_COLUMN] = rng.integers(0, K + 1, count) / UNIT_DEPTH
    return rows


def trained(config: PPOConfig) -> PPO:
    """Weights as large as after long training, and a normalisation that has moved."""
    model = make_model(config, toy_vec_env(), 0)
    assert isinstance(model.policy, SlotPolicy)
    rng = np.random.default_rng(1)
    seen = rng.uniform(0.1, 0.4, (500, len(ROW_LOW))).astype(np.float32)
    model.policy.normaliser.update(seen)
    for parameter in model.policy.parameters():
        parameter.data.mul_(3)
    return model


def exported_depths(folder: Path, rows: Any) -> Any:
    """What `LearnedScheduler.choose` does for states with these features."""
    scheduler = LearnedScheduler.load(folder, max_num_speculative_tokens=K)
    scores = scheduler.scores(rows[:, 1:])
    deepest = np.round(rows[:, MAX_DEPTH_COLUMN, None] * UNIT_DEPTH)
    return np.where(np.arange(K + 1) > deepest, -np.inf, scores).argmax(1)


@pytest.mark.parametrize(
    "config",
    [PPOConfig(), PPOConfig(hidden=(32,), activation="relu"), PPOConfig(hidden=(16, 24, 8))],
)
def test_the_exported_policy_chooses_what_the_trained_one_predicts(
    config: PPOConfig, tmp_path: Path
) -> None:
    model, rows = trained(config), extreme_observations()
    export_policy(model, tmp_path, card())
    predicted, _ = model.predict(rows, deterministic=True)
    assert np.array_equal(exported_depths(tmp_path, rows), predicted)
    assert len(np.unique(predicted)) > 2


def test_it_chooses_the_same_in_the_decoder(tmp_path: Path) -> None:
    """Whole states through `choose`, against the trained policy on the environment's rows."""
    model = trained(PPOConfig())
    scheduler = LearnedScheduler.load(export_policy(model, tmp_path, card()))
    env = toy_vec_env()
    rows = env.reset()
    for _ in range(60):
        state = env.state_of(0)
        predicted, _ = model.predict(rows, deterministic=True)
        assert np.array_equal(scheduler.choose(state), predicted[state.slots])
        rows = np.asarray(env.step(np.asarray(predicted))[0])
    batch = toy_decoder().generate(toy_prompts(), max_new_tokens=8, depth_scheduler=scheduler)
    assert all(len(result.token_ids) == 8 for result in batch)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model, rows = trained(PPOConfig()), extreme_observations(64)
    before, _ = model.predict(rows, deterministic=True)
    weights = policy_weights(model)
    for array in weights.weights:
        array[:] = 0
    after, _ = model.predict(rows, deterministic=True)
    assert np.array_equal(before, after)


def test_the_folder_holds_two_data_files_and_a_card_with_front_matter(tmp_path: Path) -> None:
    training = {
        "command": "specdepth train --seed 3",
        "seed": 3,
        "metrics": {"throughput_tok_s": 12.5, "acceptance_length": 1.75},
        "loads": [1, 2, 4],
        "machine": "toy machine",
    }
    export_policy(trained(PPOConfig()), tmp_path, card(training=training, git_sha="abc123"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["README.md", "config.json", "policy.safetensors"]
    text = (tmp_path / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert "library_name: specdepth" in front
    assert "- reinforcement-learning" in front
    assert 'type: "throughput_tok_s"' in front
    assert "value: 12.5" in front
    for part in (
        "toy+recorded-text",
        "$ specdepth train --seed 3",
        "Where it does not transfer",
        "toy machine",
        "[1, 2, 4]",
        "abc123",
        "sha256",
    ):
        assert part in body


def test_the_front_matter_is_yaml_whatever_the_names(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    odd = card(model_pair='a: "b"\n- c', env_id='x: #"', training={"metrics": {"p: q": 1.0}})
    export_policy(trained(PPOConfig()), tmp_path, odd)
    front = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    results = front["model-index"][0]["results"][0]
    assert results["dataset"]["name"] == 'x: #"'
    assert results["metrics"] == [{"type": "p: q", "value": 1.0}]


def test_a_card_without_masks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mask_depths=True"):
        export_policy(trained(PPOConfig()), tmp_path, card(mask_depths=False))


def test_a_policy_of_another_kind_is_refused(tmp_path: Path) -> None:
    env = LiveDecodeEnv(toy_decoder(), prompts=toy_prompts())
    model = PPO("MlpPolicy", env, n_steps=2, batch_size=2, device="cpu")
    with pytest.raises(ValueError, match=r"slots as agents can be exported, got ActorCriticPolicy"):
        export_policy(model, tmp_path, card())


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="cannot write the policy to"):
        export_policy(trained(PPOConfig()), blocked / "policy", card())


def test_observation_bounds_are_those_of_the_features() -> None:
    assert np.array_equal(ROW_LOW[1:], LOW)
    assert np.array_equal(ROW_HIGH[1:], HIGH)
