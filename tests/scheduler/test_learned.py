from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.depth import DepthScheduler, check_depths, check_lawful
from specdepth.scheduler.features import HIGH, LOW, feature_matrix
from specdepth.scheduler.learned import LearnedScheduler, save_policy


def reference_scores(weights: Any, observation: Any) -> list[float]:
    """The network in float64, one number at a time."""
    hidden = [
        min(max((x - mean) * inv_std, -weights.clip), weights.clip)
        for x, mean, inv_std in zip(
            observation.tolist(), weights.mean.tolist(), weights.inv_std.tolist(), strict=True
        )
    ]
    for i, (weight, bias) in enumerate(zip(weights.weights, weights.biases, strict=True)):
        if i and weights.activation == "tanh":
            hidden = [float(np.tanh(h)) for h in hidden]
        elif i:
            hidden = [max(h, 0.0) for h in hidden]
        hidden = [
            sum(w * h for w, h in zip(row, hidden, strict=True)) + b
            for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
        ]
    return hidden


def varied_state(make_state: Any, num_running: int = 16, **changes: Any) -> Any:
    rng = np.random.default_rng(1)
    fields = {
        "acceptance_ema": rng.random(num_running),
        "match_length": rng.integers(0, 5, num_running),
        "last_depth": rng.integers(-1, 9, num_running),
        "positions": rng.integers(1, 4000, num_running),
        "target_top1": rng.random(num_running),
    }
    return make_state(num_running, **(fields | changes))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (16,), (16, 12, 5)])
def test_scores_are_those_of_the_network(
    make_weights: Any, make_card: Any, activation: str, hidden: tuple[int, ...]
) -> None:
    weights = make_weights(activation=activation, hidden=hidden)
    observations = np.random.default_rng(0).uniform(LOW, HIGH, (20, len(LOW))).astype(np.float32)
    scores = LearnedScheduler(weights, make_card()).scores(observations)
    for row, observation in zip(scores, observations, strict=True):
        assert row.tolist() == pytest.approx(reference_scores(weights, observation), abs=2e-4)


@pytest.mark.parametrize("clip", [0.5, 10.0])
def test_a_policy_on_raw_features_scores_as_if_it_normalised_them(
    make_weights: Any, make_card: Any, clip: float
) -> None:
    mean, inv_std = np.zeros(len(LOW), np.float32), np.ones(len(LOW), np.float32)
    weights = make_weights(mean=mean, inv_std=inv_std, clip=clip)
    observations = np.random.default_rng(0).uniform(LOW, HIGH, (20, len(LOW))).astype(np.float32)
    scores = LearnedScheduler(weights, make_card()).scores(observations)
    for row, observation in zip(scores, observations, strict=True):
        assert row.tolist() == pytest.approx(reference_scores(weights, observation), abs=2e-4)


def test_observations_beyond_the_clip_are_clipped(make_weights: Any, make_card: Any) -> None:
    scheduler = LearnedScheduler(make_weights(clip=0.1), make_card())
    far = np.full((1, len(LOW)), 100.0, np.float32)
    np.testing.assert_array_equal(scheduler.scores(far), scheduler.scores(10 * far))


def test_scoring_leaves_the_observations_alone(make_weights: Any, make_card: Any) -> None:
    observations = np.ones((2, len(LOW)), np.float32)
    LearnedScheduler(make_weights(), make_card()).scores(observations)
    assert (observations == 1).all()


def test_each_sequence_gets_its_best_action(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    weights = make_weights(depths=(0, 8, 1, 7, 2, 6, 3, 5, 4))
    state = varied_state(make_state)
    scheduler = LearnedScheduler(weights, make_card())
    depths = check_depths(scheduler.choose(state), state, scheduler)
    rows = feature_matrix(state)
    expected = [weights.depths[int(np.argmax(reference_scores(weights, row)))] for row in rows]
    assert depths.tolist() == expected
    assert len(set(expected)) > 1, "the test would not notice a constant"


def test_choices_repeat(make_state: Any, make_weights: Any, make_card: Any) -> None:
    scheduler = LearnedScheduler(make_weights(), make_card())
    state = varied_state(make_state)
    assert scheduler.choose(state).tolist() == scheduler.choose(state).tolist()


def test_no_running_sequence_needs_no_choice(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    assert LearnedScheduler(make_weights(), make_card()).choose(make_state(0)).shape == (0,)


def test_masked_policies_stay_within_what_is_possible(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    limits = np.arange(16) % 9
    state = varied_state(make_state, max_depths=limits)
    free = LearnedScheduler(make_weights(), make_card()).choose(state)
    masked = LearnedScheduler(make_weights(), make_card(mask_depths=True)).choose(state)
    assert (masked <= limits).all()
    assert (free > limits).any()
    np.testing.assert_array_equal(masked[free <= limits], free[free <= limits])


def test_a_loaded_policy_decides_as_before_it_was_saved(
    tmp_path: Path, make_state: Any, make_weights: Any, make_card: Any
) -> None:
    before = LearnedScheduler(make_weights(), make_card(mask_depths=True))
    save_policy(tmp_path, before.weights, before.card)
    after = LearnedScheduler.load(tmp_path)
    state = varied_state(make_state)
    rows = feature_matrix(state)
    np.testing.assert_array_equal(after.scores(rows), before.scores(rows))
    np.testing.assert_array_equal(after.choose(state), before.choose(state))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"model_pair": "Qwen + ngram"}, "for model pair SmolLM2.* not Qwen"),
        ({"drafter": "draft-model"}, "for drafter prompt-lookup, not draft-model"),
        ({"max_num_speculative_tokens": 4}, "for max_num_speculative_tokens 8, not 4"),
    ],
)
def test_a_policy_for_something_else_is_refused(
    tmp_path: Path, make_weights: Any, make_card: Any, wanted: dict[str, Any], words: str
) -> None:
    save_policy(tmp_path, make_weights(), make_card())
    with pytest.raises(ValueError, match=words):
        LearnedScheduler.load(tmp_path, **wanted)


def test_a_policy_that_fits_is_loaded(tmp_path: Path, make_weights: Any, make_card: Any) -> None:
    card = make_card()
    save_policy(tmp_path, make_weights(), card)
    scheduler = LearnedScheduler.load(
        tmp_path,
        model_pair=card.model_pair,
        drafter="prompt-lookup",
        max_num_speculative_tokens=8,
    )
    assert scheduler.max_num_speculative_tokens == 8
    assert isinstance(scheduler, DepthScheduler)


def test_another_limit_at_run_time_is_refused(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    with pytest.raises(ValueError, match="max_num_speculative_tokens 8, the decoder has 4"):
        LearnedScheduler(make_weights(), make_card()).choose(make_state(2, 4))


def test_another_kind_of_drafter_at_run_time_is_refused(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    state = dataclasses.replace(make_state(2), drafter="draft-model")
    with pytest.raises(ValueError, match="the drafter prompt-lookup, the decoder has draft-model"):
        LearnedScheduler(make_weights(), make_card()).choose(state)


def test_weights_for_other_features_are_refused(make_weights: Any, make_card: Any) -> None:
    weights = make_weights(hidden=())
    narrow = dataclasses.replace(
        weights,
        mean=weights.mean[:5],
        inv_std=weights.inv_std[:5],
        weights=(weights.weights[0][:, :5],),
    )
    with pytest.raises(ValueError, match="policy for 5 features"):
        LearnedScheduler(narrow, make_card())


def test_learned_depths_are_lawful_under_rejection(make_weights: Any, make_card: Any) -> None:
    check_lawful(LearnedScheduler(make_weights(), make_card()), "rejection", has_draft_model=True)


def test_running_a_policy_imports_numpy_and_safetensors_only(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    save_policy(tmp_path, make_weights(), make_card())
    code = (
        "import sys; from specdepth.scheduler.baselines import make_scheduler;"
        "make_scheduler(sys.argv[1]);"
        "heavy = {'torch', 'stable_baselines3', 'gymnasium', 'transformers', 'pickle5', 'wandb'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
