from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdepth.checkpoints
from specdepth.scheduler.features import FEATURE_NAMES, feature_matrix
from specdepth.scheduler.state import Floats
from specdepth.scheduler.survival_model import (
    SurvivalCard,
    SurvivalModel,
    SurvivalWeights,
    save_survival,
)

INPUTS = ("match_2", "acceptance", "last_match")
CARD = SurvivalCard(model_pair="target + prompt-lookup", drafter="prompt-lookup")


def build_model(depth: int = 8, hidden: int = 4, scale: float = 1.0) -> SurvivalModel:
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> Any:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    weights = SurvivalWeights(
        inputs=INPUTS,
        hidden_weight=draw(hidden, len(INPUTS)),
        hidden_bias=draw(hidden),
        out_weight=draw(depth, hidden),
        out_bias=draw(depth),
    )
    return SurvivalModel(weights, CARD)


def test_survival_is_the_product_of_sigmoids_of_a_two_layer_network(make_state: Any) -> None:
    state = make_state(2, acceptance_ema=np.array([0.25, 1.0]), last_match_length=np.array([0, 4]))
    weights = SurvivalWeights(
        inputs=INPUTS,
        hidden_weight=np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 0.0]], np.float32),
        hidden_bias=np.array([0.0, -1.0], np.float32),
        out_weight=np.repeat(np.array([[2.0, 1.0]], np.float32), 8, axis=0),
        out_bias=np.linspace(0.0, -0.7, 8, dtype=np.float32),
    )
    # Both have a match of 2, so the second hidden unit is tanh(1 - 1) = 0.
    hidden = np.tanh(np.array([0.25, 1.0 + 0.5]))
    logits = 2 * hidden[:, None] - np.arange(8) / 10
    expected = np.cumprod(1 / (1 + np.exp(-logits)), axis=1)
    got = SurvivalModel(weights, CARD).survival(state)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_inputs_are_found_by_name_not_by_place(make_state: Any) -> None:
    model = build_model()
    features = feature_matrix(make_state(3))
    columns = [FEATURE_NAMES.index(name) for name in INPUTS]
    changed = features.copy()
    others = np.setdiff1d(np.arange(features.shape[1]), columns)
    changed[:, others] = 0.123
    np.testing.assert_array_equal(
        model.conditional_acceptance(changed), model.conditional_acceptance(features)
    )
    changed[:, columns[1]] = 0.9
    assert not np.allclose(
        model.conditional_acceptance(changed), model.conditional_acceptance(features)
    )


def test_nothing_survives_beyond_what_can_be_drafted(make_state: Any) -> None:
    survival = build_model().survival(make_state(3, max_depths=np.array([0, 3, 8])))
    np.testing.assert_array_equal(np.count_nonzero(survival, axis=1), [0, 3, 8])


@given(
    acceptance=st.floats(0, 1),
    match_length=st.integers(0, 9),
    limit=st.integers(0, 8),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
)
def test_survival_is_a_chance_that_never_rises(
    make_state_once: Any, acceptance: float, match_length: int, limit: int, scale: float
) -> None:
    state = make_state_once(
        1,
        acceptance_ema=np.array([acceptance]),
        match_length=np.array([match_length]),
        max_depths=np.array([limit]),
    )
    with np.errstate(all="raise", under="ignore"):
        survival = build_model(scale=scale).survival(state)
    assert survival.shape == (1, 8)
    assert np.all((survival >= 0) & (survival <= 1))
    assert np.all(np.diff(survival, axis=1) <= 0)


def test_a_sequence_alone_gets_what_it_gets_in_a_batch(make_state: Any) -> None:
    model = build_model()
    averages = np.array([0.1, 0.6, 0.9])
    together = model.survival(make_state(3, acceptance_ema=averages))
    for i, average in enumerate(averages):
        alone = model.survival(make_state(1, acceptance_ema=np.array([average])))
        np.testing.assert_allclose(alone[0], together[i], rtol=1e-6)


def test_no_sequences_give_no_rows(make_state: Any) -> None:
    assert build_model().survival(make_state(0)).shape == (0, 8)


def test_another_drafter_is_refused(make_state: Any) -> None:
    with pytest.raises(ValueError, match="fitted for the drafter prompt-lookup, the decoder has d"):
        build_model().survival(make_state(2, drafter="draft-model"))


@pytest.mark.parametrize("depth", [4, 12])
def test_an_engine_of_another_depth_reads_what_both_know(make_state: Any, depth: int) -> None:
    """The depth is no input, and what the model says nothing of has no chance."""
    both = min(depth, 8)
    seen = {"proposal_length": np.full(2, both), "max_depths": np.full(2, both)}

    def survival_at(top: int) -> Floats:
        state = make_state(
            2, depth=top, agreement=np.full((2, top), 0.5), last_depth=np.full(2, 4), **seen
        )
        return build_model().survival(state)

    survival, own = survival_at(depth), survival_at(8)
    assert survival.shape == (2, depth)
    np.testing.assert_array_equal(survival[:, :both], own[:, :both])
    assert not survival[:, both:].any()


def test_a_round_teaches_it_nothing(make_state: Any, make_outcome: Any) -> None:
    model, state = build_model(), make_state(2)
    before = model.survival(state)
    model.observe(make_outcome(state, [3, 3], [0, 0]))
    model.reset()
    np.testing.assert_array_equal(model.survival(state), before)


def test_a_loaded_model_estimates_as_the_one_that_was_saved(
    tmp_path: Path, make_state: Any
) -> None:
    model, state = build_model(), make_state(4)
    save_survival(tmp_path, model.weights, model.card)
    loaded = SurvivalModel.load(
        tmp_path,
        model_pair="target + prompt-lookup",
        drafter="prompt-lookup",
    )
    np.testing.assert_array_equal(loaded.survival(state), model.survival(state))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"model_pair": "other"}, "model pair target [+] prompt-lookup, not other"),
        ({"drafter": "draft-model"}, "drafter prompt-lookup, not draft-model"),
    ],
)
def test_a_model_for_something_else_is_refused_when_loaded(
    tmp_path: Path, wanted: dict[str, Any], words: str
) -> None:
    model = build_model()
    save_survival(tmp_path, model.weights, model.card)
    with pytest.raises(ValueError, match=f"was fitted for {words}"):
        SurvivalModel.load(tmp_path, **wanted)


# The shipped model


@pytest.fixture(scope="module")
def shipped() -> SurvivalModel:
    folder = Path(specdepth.checkpoints.__file__).parent / "survival" / "smollm2-prompt-lookup"
    return SurvivalModel.load(folder, drafter="prompt-lookup")


def test_the_shipped_model_never_falls_with_match_length_agreement_or_past_acceptance(
    shipped: SurvivalModel, make_state: Any
) -> None:
    rng = np.random.default_rng(0)
    noise = {
        "acceptance_ema_slow": rng.random(300),
        "target_top1": rng.random(300),
        "last_accepted": rng.integers(-1, 9, 300),
        "num_matches": rng.integers(1, 40, 300),
    }
    for name, values in (
        ("match_length", [np.full(300, n) for n in range(1, 6)]),
        ("match_agreement", [np.full(300, x) for x in np.linspace(0, 1, 6)]),
        ("acceptance_ema", [np.full(300, x) for x in np.linspace(0, 1, 6)]),
    ):
        chances = [shipped.survival(make_state(300, **noise, **{name: v})) for v in values]
        for lower, higher in pairwise(chances):
            assert np.all(higher >= lower - 1e-6), name


def test_the_shipped_model_tells_a_long_match_from_a_short_one(
    shipped: SurvivalModel, make_state: Any
) -> None:
    short, long = shipped.survival(make_state(2, match_length=np.array([1, 4])))
    assert long[0] > short[0] + 0.2


def test_running_it_needs_numpy_and_safetensors_alone() -> None:
    code = (
        "import sys, specdepth.scheduler.survival_model\n"
        "print([name for name in ('torch', 'gymnasium', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
