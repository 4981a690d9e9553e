from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.features import FEATURE_NAMES, FEATURES, HIGH, LOW, feature_matrix
from specdepth.scheduler.state import RoundState

MATCH = ("match_1", "match_2", "match_3", "match_4_up")
LOAD = tuple(name for name in FEATURE_NAMES if name.startswith("load_"))
DRAFT = tuple(name for name in FEATURE_NAMES if name.startswith("draft_") and name != "draft_lag")
SEQUENCE_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(RoundState)
    if field.type in ("Ints", "Floats", "Bools")
)


def column(state: RoundState, name: str) -> list[float]:
    return feature_matrix(state)[:, FEATURE_NAMES.index(name)].tolist()


def draft_state(make_state: Any, **changes: Any) -> RoundState:
    top1 = np.array([[0.9, 0.6, np.nan], [np.nan] * 3])
    fields: dict[str, Any] = {
        "drafter": "draft-model",
        "draft_top1": top1,
        "draft_entropy": top1 * 2,
        "draft_margin": top1 / 2,
        "cost": CostModel.linear(base_s=0.05, draft_base_s=0.01),
    }
    state: RoundState = make_state(2, 3, **(fields | changes))
    return state


# The table


def test_names_are_unique_and_explained() -> None:
    assert len(set(FEATURE_NAMES)) == len(FEATURES)
    assert all(feature.unit and feature.meaning for feature in FEATURES)


def test_zero_which_means_unknown_lies_in_all_bounds() -> None:
    assert (LOW <= 0).all()
    assert (HIGH > 0).all()


def test_bounds_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        LOW[0] = 5


# The matrix


@pytest.mark.parametrize("num_running", [0, 1, 5, 40])
def test_one_float32_row_a_sequence(make_state: Any, num_running: int) -> None:
    matrix = feature_matrix(make_state(num_running))
    assert matrix.shape == (num_running, len(FEATURES))
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous


def test_every_call_returns_its_own_matrix(make_state: Any) -> None:
    state = make_state(2)
    first = feature_matrix(state)
    copy = first.copy()
    feature_matrix(make_state(2, acceptance_ema=np.ones(2)))
    np.testing.assert_array_equal(first, copy)


def test_the_state_is_not_written_to(make_state: Any) -> None:
    state = make_state(3)
    for name in SEQUENCE_FIELDS:
        getattr(state, name).flags.writeable = False
    feature_matrix(state)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("acceptance", {"acceptance_ema": np.array([0.25])}, 0.25),
        ("acceptance_slow", {"acceptance_ema_slow": np.array([0.75])}, 0.75),
        ("match_agreement", {"match_agreement": np.array([0.4])}, 0.4),
        ("last_depth", {"last_depth": np.array([6])}, 0.75),
        ("last_depth", {"last_depth": np.array([-1])}, 0.0),
        ("last_accepted", {"last_accepted": np.array([2])}, 0.25),
        ("last_match", {"last_match_length": np.array([3])}, 0.75),
        ("last_match", {"last_match_length": np.array([9])}, 1.0),
        ("proposal_length", {"proposal_length": np.array([4])}, 0.5),
        ("max_depth", {"max_depths": np.array([2])}, 0.25),
        ("remaining_near", {"num_remaining": np.array([3])}, 3 / 8),
        ("remaining_near", {"num_remaining": np.array([500])}, 4.0),
        ("full_streak", {"full_streak": np.array([3])}, 0.75),
        ("full_streak", {"full_streak": np.array([30])}, 1.0),
        ("drafted_tokens", {"num_drafted_tokens": np.array([4096])}, 1.0),
        ("drafted_rounds", {"num_drafted_rounds": np.array([15])}, 4 / np.log2(257)),
        ("rounds_since_draft", {"rounds_since_draft": np.array([32])}, 1.0),
        ("num_matches", {"num_matches": np.array([7])}, 3 / np.log2(65)),
        ("match_tokens", {"match_tokens": np.array([7])}, 3 / np.log2(17)),
        ("match_tokens", {"match_tokens": np.array([16])}, 1.0),
        ("match_distance", {"match_distance": np.array([63])}, 6 / np.log2(4097)),
        ("match_in_output", {"match_in_output": np.array([True])}, 1.0),
        ("draft_lag", {"draft_lag": np.array([1023])}, 10 / np.log2(1025)),
        ("context", {"positions": np.array([255])}, 8 / np.log2(131073)),
        ("generated", {"num_generated": np.array([63])}, 6 / np.log2(8193)),
        ("remaining", {"num_remaining": np.array([63])}, 6 / np.log2(8193)),
        ("target_top1", {"target_top1": np.array([0.8])}, 0.8),
        ("target_entropy", {"target_entropy": np.array([2.5])}, 0.5),
        ("running_share", {"max_num_seqs": 4}, 0.25),
        ("waiting_share", {"num_waiting": 8}, 0.25),
        ("waiting_share", {"num_waiting": 800}, 1.0),
        ("kv_used", {"kv_used_fraction": 0.75}, 0.75),
        ("kv_room", {"num_free_blocks": 1, "block_size": 18}, 18 / 36),
        ("kv_room", {"num_free_blocks": 0}, 0.0),
        ("pass_tokens", {"num_prefill_tokens": 62}, 6 / np.log2(4097)),
        ("prefill_share", {"num_prefill_tokens": 3}, 0.75),
    ],
)
def test_columns_hold_what_the_table_says(
    make_state: Any, name: str, changes: dict[str, Any], expected: float
) -> None:
    assert column(make_state(1, 8, **changes), name) == pytest.approx([expected], rel=1e-6)


def test_match_lengths_are_one_hot(make_state: Any) -> None:
    state = make_state(6, match_length=np.array([0, 1, 2, 3, 4, 7]))
    flags = np.array([column(state, name) for name in MATCH]).T
    assert flags.tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 1],
    ]


AGREEMENT_DEPTHS = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(
    ("depth", "places"),
    [(8, (1, 2, 3, 4, 6, 8)), (12, (1, 2, 3, 4, 6, 8)), (5, (1, 2, 3, 4, 5, 5)), (1, (1,) * 6)],
)
def test_agreement_is_shown_at_six_depths_or_the_deepest(
    make_state: Any, depth: int, places: tuple[int, ...]
) -> None:
    agreement = np.linspace(1.0, 0.25, 2 * depth).reshape(depth, 2).T
    state = make_state(2, depth, agreement=agreement)
    for feature, place in zip(AGREEMENT_DEPTHS, places, strict=True):
        expected = agreement[:, place - 1]
        assert column(state, f"agreement_{feature}") == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("num_running", "bucket"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (16, 4), (17, 5), (32, 5), (33, 6)],
)
def test_load_is_one_hot(make_state: Any, num_running: int, bucket: int) -> None:
    flags = [column(make_state(num_running), name)[0] for name in LOAD]
    assert flags == [float(i == bucket) for i in range(len(LOAD))]


def test_unknown_target_signals_are_flagged_and_zero(make_state: Any) -> None:
    state = make_state(2, target_top1=np.array([np.nan, 0.5]), target_entropy=np.full(2, np.nan))
    assert column(state, "target_known") == [0.0, 1.0]
    assert column(state, "target_top1") == [0.0, 0.5]
    assert column(state, "target_entropy") == [0.0, 0.0]


def test_draft_signals_cover_the_known_positions_only(make_state: Any) -> None:
    state = draft_state(make_state)
    assert column(state, "draft_known") == [1.0, 0.0]
    assert column(state, "draft_top1_first") == pytest.approx([0.9, 0.0])
    assert column(state, "draft_top1_mean") == pytest.approx([0.75, 0.0])
    assert column(state, "draft_top1_min") == pytest.approx([0.6, 0.0])
    assert column(state, "draft_entropy_mean") == pytest.approx([1.5 / 5, 0.0])
    assert column(state, "draft_margin_mean") == pytest.approx([0.375, 0.0])


def test_draft_columns_stay_empty_without_a_draft_model(make_state: Any) -> None:
    state = draft_state(make_state, drafter="prompt-lookup")
    assert all(column(state, name) == [0.0, 0.0] for name in DRAFT)


def test_draft_price_is_relative_to_the_pass(make_state: Any) -> None:
    state = draft_state(make_state, num_context_tokens=0)
    expected = 0.01 / state.cost.pass_s(2)
    assert column(state, "draft_price") == pytest.approx([expected] * 2)


def test_verify_price_is_the_survival_from_which_a_token_pays(make_state: Any) -> None:
    state = make_state(16)
    cost = state.cost
    price = column(state, "verify_price")[0]
    # at that acceptance, one more token each leaves tokens per second as they are
    before = 16 / cost.pass_s(16)
    after = 16 * (1 + price) / cost.pass_s(32)
    assert after == pytest.approx(before, rel=1e-6)


def test_verify_price_rises_with_load(make_state: Any) -> None:
    prices = [column(make_state(n), "verify_price")[0] for n in (1, 4, 16, 32)]
    assert prices == sorted(prices)


def test_a_deep_price_sees_past_the_free_tokens(make_state: Any) -> None:
    cost = CostModel.linear(base_s=0.05, token_s=0.01, knee=8)
    state = make_state(4, 8, cost=cost)
    assert column(state, "verify_price") == [0.0] * 4
    expected = (cost.pass_s(36) / cost.pass_s(4) - 1) / 8
    assert column(state, "verify_price_deep") == pytest.approx([expected] * 4)


def test_batch_columns_are_means_over_the_batch(make_state: Any) -> None:
    state = make_state(
        2,
        acceptance_ema=np.array([0.2, 0.6]),
        proposal_length=np.array([0, 3]),
        last_depth=np.array([-1, 8]),
    )
    assert column(state, "batch_acceptance") == pytest.approx([0.4, 0.4])
    assert column(state, "batch_offer_share") == [0.5, 0.5]
    assert column(state, "batch_last_depth") == [0.5, 0.5]


def test_unknown_counts_of_another_engine_read_as_zero(make_state: Any) -> None:
    known = {"num_running", "slots", "request_ids", "max_num_seqs", "cost", "drafter"}
    known |= {"max_num_speculative_tokens", "block_size", "num_blocks", "round_index"}
    plain = make_state(2)
    unknown: dict[str, Any] = {}
    for field in dataclasses.fields(plain):
        value = getattr(plain, field.name)
        if field.name in known:
            continue
        if isinstance(value, np.ndarray):
            missing = {"f": np.nan, "i": -1, "b": False}[value.dtype.kind]
            unknown[field.name] = np.full_like(value, missing)
        else:
            unknown[field.name] = float("nan") if isinstance(value, float) else -1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = feature_matrix(make_state(2, **unknown))
    per_sequence = matrix[:, : FEATURE_NAMES.index("load_1")]
    assert (per_sequence == 0).all()
    assert np.isfinite(matrix).all()


def test_depth_limit_zero_divides_by_nothing(make_state: Any) -> None:
    for drafter in ("none", "draft-model"):
        assert np.isfinite(feature_matrix(make_state(3, 0, drafter=drafter))).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_all_states_stay_in_bounds(data: Any, make_state_once: Any) -> None:
    num_running = data.draw(st.integers(1, 40))
    depth = data.draw(st.integers(0, 12))
    plain = make_state_once(num_running, depth)
    changes: dict[str, Any] = {
        "drafter": data.draw(st.sampled_from(["none", "prompt-lookup", "draft-model"])),
        "num_waiting": data.draw(st.integers(-1, 10**6)),
        "num_prefill_tokens": data.draw(st.integers(-1, 10**5)),
        "num_free_blocks": data.draw(st.integers(-1, 10**6)),
        "kv_used_fraction": data.draw(st.floats(0, 1) | st.just(float("nan"))),
    }
    for name in data.draw(st.sets(st.sampled_from(SEQUENCE_FIELDS), max_size=6)):
        like = getattr(plain, name)
        elements: st.SearchStrategy[Any] = (
            st.floats(-10, 100, width=32) | st.just(float("nan"))
            if like.dtype.kind == "f"
            else st.integers(-1, 2**40)
        )
        if like.dtype.kind == "b":
            elements = st.booleans()
        changes[name] = data.draw(arrays(like.dtype, like.shape, elements=elements))
    matrix = feature_matrix(make_state_once(num_running, depth, **changes))
    assert (matrix >= LOW).all()
    assert (matrix <= HIGH).all()


def test_rows_follow_the_order_of_sequences(make_state: Any) -> None:
    rng = np.random.default_rng(0)
    state = draft_state(make_state, acceptance_ema=rng.random(2), match_length=np.array([1, 4]))
    swapped = dataclasses.replace(
        state, **{name: getattr(state, name)[::-1] for name in SEQUENCE_FIELDS}
    )
    np.testing.assert_allclose(feature_matrix(swapped), feature_matrix(state)[::-1], rtol=1e-6)
