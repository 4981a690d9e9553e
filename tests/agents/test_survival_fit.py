from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from specdepth.agents.survival_fit import SurvivalFit, SurvivalFitConfig, fit_survival, inputs_for
from specdepth.agents.survival_rows import (
    SHALLOW_SHARE,
    UNKNOWN_SHARE,
    Behaviour,
    SurvivalRows,
    collect_rows,
    exploring_behaviours,
    greedy_behaviours,
)
from specdepth.decoder.trace_files import load_trace
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.off import Off
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.features import FEATURE_NAMES, FEATURES
from specdepth.scheduler.survival_estimators import MatchLengthSurvival
from specdepth.scheduler.survival_model import SurvivalCard, SurvivalModel
from tests.agents.made_trace import DEPTH, RATES, make_trace

torch.set_num_threads(1)
TRACE = make_trace(24, 24)
COST = CostModel.linear(knee=8)
INPUTS = inputs_for("prompt-lookup")
QUICK = SurvivalFitConfig(num_steps=150, hidden_units=8)


@cache
def collected() -> SurvivalRows:
    return collect_rows(TRACE, COST, TRACE.rows("train"), exploring_behaviours(0, DEPTH))


def made_rows(size: int = 2500, seed: int = 0, **changes: Any) -> SurvivalRows:
    """Rows without a trace: acceptance goes by match length; other features are noise in bounds."""
    rng = np.random.default_rng(seed)
    features = rng.random((size, len(FEATURES))).astype(np.float32)
    match = rng.integers(1, 5, size)
    first = FEATURE_NAMES.index("match_1")
    features[:, first : first + 4] = match[:, None] == np.arange(1, 5)
    accepts = rng.random((size, DEPTH)) < np.array(RATES)[match, None]
    fields: dict[str, Any] = {
        "features": features,
        "runs": np.cumprod(accepts, axis=1).sum(axis=1),
        "limits": np.full(size, DEPTH),
        "requests": np.arange(size) // 50,
        "max_num_speculative_tokens": DEPTH,
    }
    return SurvivalRows(**(fields | changes))


@cache
def fitted(monotone: bool = True) -> SurvivalFit:
    config = SurvivalFitConfig(num_steps=150, hidden_units=8, monotone=monotone)
    return fit_survival(made_rows(), INPUTS, config)


def predict(fit: SurvivalFit, features: Any) -> Any:
    card = SurvivalCard(model_pair="made", drafter="prompt-lookup")
    return SurvivalModel(fit.weights, card).conditional_acceptance(features)


# Rows


def test_labels_are_the_trace_at_the_position_whatever_was_drafted() -> None:
    rows = np.arange(6)
    parts = [
        collect_rows(TRACE, COST, rows, [Behaviour(scheduler=scheduler, load=2)])
        for scheduler in (Off(), FixedDepth(1), FixedDepth(DEPTH))
    ]
    every = TRACE.select(rows)
    offers = np.minimum(every.proposal_length, every.num_tokens.repeat(every.num_tokens) - 1)
    assert offers.any()
    # Off visits each position once: its labels are the trace itself, less the ends of texts.
    left = np.concatenate([np.arange(n, 0, -1) for n in every.num_tokens])
    limits = np.minimum(every.proposal_length, left - 1)
    order = np.lexsort((parts[0].features[:, FEATURE_NAMES.index("generated")], parts[0].requests))
    np.testing.assert_array_equal(parts[0].limits[order], limits[limits > 0])
    runs = np.minimum(every.accepted, limits)[limits > 0]
    np.testing.assert_array_equal(parts[0].runs[order], runs)
    assert len(parts[0]) > len(parts[1]) > len(parts[2])


def test_rows_without_anything_to_draft_are_left_out() -> None:
    assert collected().limits.min() >= 1


def test_match_lengths_come_back_from_the_features() -> None:
    rows = collect_rows(TRACE, COST, np.arange(4), [Behaviour(scheduler=Off(), load=1)])
    first_four = slice(0, int(TRACE.num_tokens[:4].sum()))
    shown, length = TRACE.match_length[first_four], TRACE.proposal_length[first_four]
    counts = np.bincount(rows.match_lengths, minlength=5)
    # the last position of each text may show a match, but nothing can be drafted there
    last = TRACE.starts[:4] + TRACE.num_tokens[:4] - 1
    shown = np.delete(shown, last)
    np.testing.assert_array_equal(
        counts, np.bincount(shown[np.delete(length, last) > 0], minlength=5)
    )


@pytest.mark.parametrize("top", [4, 8, 16])
def test_rows_are_cut_to_what_an_engine_with_a_smaller_limit_shows(top: int) -> None:
    """A real trace, since made ones do not know how agreement falls along a proposal."""
    trace = load_trace("default")
    rows = trace.rows("train")[:8]
    smaller = replace(
        trace,
        info=replace(trace.info, max_num_speculative_tokens=top),
        accepted=np.minimum(trace.accepted, top),
        proposal_length=np.minimum(trace.proposal_length, top),
        agreement=trace.agreement[:, :top],
    )
    behaviours = [Behaviour(scheduler=FixedDepth(2), load=2)]
    whole, expected = (collect_rows(one, COST, rows, behaviours) for one in (trace, smaller))
    cut = whole.cut(np.full(len(whole), top))
    same = [name for name in FEATURE_NAMES if name not in ("kv_used", "kv_room")]  # pools differ
    columns = [FEATURE_NAMES.index(name) for name in same]
    np.testing.assert_array_equal(cut.features[:, columns], expected.features[:, columns])
    np.testing.assert_array_equal(cut.runs, expected.runs)
    np.testing.assert_array_equal(cut.limits, expected.limits)
    assert (whole.limits > top).any()


def test_a_share_of_the_rows_is_seen_again_as_other_engines_show_them() -> None:
    trace = load_trace("default")
    behaviours = [Behaviour(scheduler=FixedDepth(2), load=2)]
    rows = collect_rows(trace, COST, trace.rows("train")[:8], behaviours)
    more = rows.with_fewer_tokens(np.random.default_rng(0))
    added = more.select(np.arange(len(rows), len(more)))
    assert len(added) == pytest.approx(SHALLOW_SHARE * len(rows), rel=0.2)
    assert {*added.limits.tolist()} <= {*range(1, 17)}
    assert {4, 8, 16} <= {*added.limits.tolist()}
    np.testing.assert_array_equal(more.features[: len(rows)], rows.features)
    shown = rows.as_other_engines(np.random.default_rng(0))
    unknown = shown.features[:, FEATURE_NAMES.index("target_known")] == 0
    assert unknown.sum() > UNKNOWN_SHARE * len(rows)


def test_an_engine_of_few_tokens_has_no_smaller_one() -> None:
    rows = made_rows(100)  # of 4
    assert rows.with_fewer_tokens(np.random.default_rng(0)) is rows


def test_a_verdict_reaches_the_first_rejected_token_and_no_further() -> None:
    rows = made_rows(3, runs=np.array([0, 2, 4]), limits=np.array([4, 3, 4]))
    reached = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(rows.reached, np.array(reached, np.bool_))
    np.testing.assert_array_equal(rows.survived.sum(axis=1), [0, 2, 4])
    np.testing.assert_array_equal(rows.offered.sum(axis=1), [4, 3, 4])


def test_rows_put_together_keep_their_order() -> None:
    rows, others = made_rows(100), made_rows(50, seed=1)
    both = SurvivalRows.concatenate([rows, others])
    assert len(both) == 150
    np.testing.assert_array_equal(both.select(np.arange(100, 150)).runs, others.runs)


def test_history_depends_on_the_behaviour() -> None:
    column = FEATURE_NAMES.index("drafted_tokens")
    off = collect_rows(TRACE, COST, np.arange(4), [Behaviour(scheduler=Off(), load=2)])
    deep = collect_rows(TRACE, COST, np.arange(4), [Behaviour(scheduler=FixedDepth(4), load=2)])
    assert off.features[:, column].max() == 0
    assert deep.features[:, column].max() > 0


def test_greedy_rules_are_tried_at_several_loads() -> None:
    loads = [behaviour.load for behaviour in greedy_behaviours(MatchLengthSurvival())]
    assert len(set(loads)) == len(loads) >= 3


def test_collecting_without_a_behaviour_is_refused() -> None:
    with pytest.raises(ValueError, match="no behaviour"):
        collect_rows(TRACE, COST, np.arange(4), [])


# Inputs


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_inputs_are_features_of_the_sequence_not_of_the_machine(drafter: Any) -> None:
    inputs = inputs_for(drafter)
    assert set(inputs) <= set(FEATURE_NAMES)
    machine = ("load_", "running", "waiting", "kv_", "price", "pass_tokens", "prefill", "batch_")
    assert not [name for name in inputs if any(word in name for word in machine)]


def test_a_draft_model_has_confidences_and_no_matches() -> None:
    inputs = inputs_for("draft-model")
    assert "draft_top1_first" in inputs
    assert not [name for name in inputs if name.startswith("match")]


# Fitting


def test_the_fit_finds_the_law_that_made_the_rows() -> None:
    rows = made_rows(seed=1)
    chances = predict(fitted(), rows.features)
    for match in range(1, 5):
        mean = chances[rows.match_lengths == match].mean()
        assert mean == pytest.approx(RATES[match], abs=0.06)


def test_the_loss_is_close_to_the_entropy_of_the_law() -> None:
    rows = made_rows()
    rate = np.array(RATES)[rows.match_lengths][:, None].repeat(DEPTH, axis=1)[rows.reached]
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)).mean()
    assert fitted().loss == pytest.approx(entropy, abs=0.03)


def test_the_same_rows_and_seed_give_the_same_weights() -> None:
    rows = made_rows(500)
    first, second = (fit_survival(rows, INPUTS, QUICK).weights for _ in range(2))
    np.testing.assert_array_equal(first.hidden_weight, second.hidden_weight)
    np.testing.assert_array_equal(first.out_bias, second.out_bias)


def test_fitting_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit_survival(made_rows(200), INPUTS, QUICK)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "name", ["acceptance", "acceptance_slow", "match_agreement", "agreement_1", "agreement_8"]
)
def test_survival_never_falls_as_a_rising_input_rises(name: str) -> None:
    features = np.random.default_rng(3).random((200, len(FEATURES))).astype(np.float32)
    chances = []
    for value in np.linspace(0, 1, 6):
        features[:, FEATURE_NAMES.index(name)] = value
        chances.append(predict(fitted(), features))
    for lower, higher in pairwise(chances):
        assert np.all(higher >= lower - 1e-6)


def test_survival_never_falls_with_match_length() -> None:
    features = np.random.default_rng(4).random((200, len(FEATURES))).astype(np.float32)
    first = FEATURE_NAMES.index("match_1")
    chances = []
    for match in range(5):
        features[:, first : first + 4] = np.arange(1, 5) == match
        chances.append(predict(fitted(), features))
    for lower, higher in pairwise(chances):
        assert np.all(higher >= lower - 1e-6)


def test_inputs_that_need_not_rise_may_fall() -> None:
    rows = made_rows()
    column = FEATURE_NAMES.index("target_entropy")
    falling = rows.features.copy()
    falling[:, column] = rows.runs == 0
    fit = fit_survival(made_rows(features=falling), INPUTS, QUICK)
    low, high = falling.copy(), falling.copy()
    low[:, column], high[:, column] = 0.0, 1.0
    assert np.all(predict(fit, low)[:, 0] > predict(fit, high)[:, 0])


def test_a_free_form_may_learn_what_a_monotone_one_cannot() -> None:
    rows = made_rows()
    column = FEATURE_NAMES.index("acceptance")
    against = rows.features.copy()
    against[:, column] = rows.runs == 0
    upside_down = made_rows(features=against)
    free, monotone = (
        fit_survival(
            upside_down,
            INPUTS,
            SurvivalFitConfig(num_steps=150, hidden_units=8, monotone=flag),
        )
        for flag in (False, True)
    )
    assert free.loss < monotone.loss - 0.1


def test_a_position_that_nothing_reached_does_no_harm() -> None:
    rows = made_rows(400, limits=np.full(400, 2), runs=np.minimum(made_rows(400).runs, 2))
    fit = fit_survival(rows, INPUTS, QUICK)
    assert np.isfinite(fit.weights.out_bias).all()
    assert np.isfinite(fit.loss)


def test_an_input_that_never_changed_says_nothing_where_it_does() -> None:
    rows = made_rows(500)
    for name in ("num_matches", "target_top1"):
        rows.features[:, FEATURE_NAMES.index(name)] = 0.5
    weights = fit_survival(rows, INPUTS, QUICK).weights
    assert not weights.hidden_weight[:, INPUTS.index("num_matches")].any()
    assert not weights.hidden_weight[:, INPUTS.index("target_top1")].any()


def test_a_match_length_that_was_never_seen_counts_as_the_one_below() -> None:
    rows = made_rows(500)
    seen = rows.select(rows.match_lengths < 4)
    weights = fit_survival(seen, INPUTS, QUICK).weights.hidden_weight
    at = INPUTS.index("match_4_up")
    np.testing.assert_allclose(weights[:, at], weights[:, at - 1], rtol=1e-5)


def test_the_fit_on_replayed_rows_beats_one_rate_for_all() -> None:
    rows = collected()
    fit = fit_survival(rows, INPUTS, QUICK)
    rate = (rows.survived & rows.reached).sum() / rows.reached.sum()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert fit.loss < entropy - 0.08


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_units": 0}, "hidden_units must be at least 1"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay 0 or more"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SurvivalFitConfig(**changes)


def test_nothing_to_fit_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_survival(made_rows(0), INPUTS, QUICK)
