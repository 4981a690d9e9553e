from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_checks import MAX_PASS_TOKENS
from specdepth.scheduler.depth import VerificationRule

SMOLLM2_S = tuple(ms / 1e3 for ms in (52.9, 61.2, 70.6, 83.2, 106, 159, 262, 463, 911))


def make_cost(**changes: Any) -> CostModel:
    fields: dict[str, Any] = {
        "name": "smollm2",
        "device": "cpu, 1 thread",
        "dtype": "bfloat16",
        "measured": True,
        "tokens": (1, 2, 4, 8, 16, 32, 64, 128, 256),
        "verify_s": SMOLLM2_S,
        "prefill_s": tuple(0.8 * seconds for seconds in SMOLLM2_S),
        "context_s": 1e-6,
        "draft_sequences": (1, 8, 32),
        "draft_s": (0.004, 0.006, 0.012),
        "draft_token_s": 0.0005,
        "overhead_s": 0.001,
        "weight_bytes": 269_000_000,
        "kv_bytes_per_token": 23_040,
        "flops_per_token": 2.69e8,
    }
    return CostModel(**(fields | changes))


COST = make_cost()


# Target passes


def test_a_verification_pass_reads_the_grid() -> None:
    assert make_cost(context_s=0.0).pass_s(16) == 0.106


def test_a_prefill_pass_costs_less_than_a_verification_pass() -> None:
    assert COST.pass_s(64, 64) == pytest.approx(0.8 * 0.262)


def test_a_mixed_pass_lies_between_by_its_share_of_prefill() -> None:
    assert COST.pass_s(64, 16) == pytest.approx(0.262 * (0.75 + 0.25 * 0.8))


def test_prefill_beyond_the_pass_counts_as_all_of_it() -> None:
    assert COST.pass_s(64, 80) == pytest.approx(0.8 * 0.262)


def test_context_adds_its_price_a_token() -> None:
    assert COST.pass_s(1, 0, 5000) == pytest.approx(0.0529 + 0.005)


def test_what_prompt_tokens_look_at_adds_its_price_a_pair() -> None:
    cost = replace(COST, prefill_pair_s=1e-6)
    assert cost.pass_s(64, 60, 500, 30_000) == pytest.approx(COST.pass_s(64, 60, 500) + 0.03)
    both = cost.pass_s(np.array([0, 64]), np.array([0, 60]), 500, np.array([30_000, 30_000]))
    assert both.tolist() == [0.0, pytest.approx(COST.pass_s(64, 60, 500) + 0.03)]


def test_a_round_is_priced_with_what_its_prompts_looked_at(make_state, make_outcome) -> None:
    outcome = make_outcome(make_state(2), [1, 0], [1, 0], num_prefill_pairs=20_000)
    cost = replace(COST, prefill_pair_s=1e-6)
    assert cost.outcome_s(outcome) == pytest.approx(COST.outcome_s(outcome) + 0.02)


def test_no_pass_costs_nothing_whatever_the_context() -> None:
    assert COST.pass_s(0, 0, 5000) == 0.0
    assert COST.pass_s(np.array([0, 1]), 0, 5000)[0] == 0.0


def test_without_prefill_times_verification_times_are_used() -> None:
    assert make_cost(prefill_s=()).pass_s(64, 64) == 0.262


def test_staircases_are_kept() -> None:
    cost = make_cost(tokens=(1, 8, 16), verify_s=(0.05, 0.12, 0.08), prefill_s=())
    assert cost.pass_s(8) > cost.pass_s(16)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 100_000))
def test_numbers_and_arrays_cost_the_same(tokens: int, prefill: int, context: int) -> None:
    each = COST.pass_s(np.array([tokens]), np.array([prefill]), np.array([context]))
    assert each[0] == pytest.approx(COST.pass_s(tokens, prefill, context))


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 60), st.integers(0, 999))
def test_passes_in_a_row_cost_what_each_does(
    first: int, count: int, prefill: int, context: int
) -> None:
    sizes = np.arange(first, first + count)
    for cost in (COST, GRAPHED):
        in_row = cost.passes_s(first, count, prefill, context)
        assert in_row.tolist() == cost.pass_s(sizes, prefill, context).tolist()


def test_whoever_writes_to_prices_writes_to_a_copy() -> None:
    cost = CostModel.linear()
    before = cost.passes_s(1, 8)
    cost.passes_s(1, 8)[:] = 0.0
    assert cost.passes_s(1, 8).tolist() == before.tolist()


def test_draft_passes_in_a_row_cost_what_each_does() -> None:
    free = CostModel.linear()
    for cost in (COST, GRAPHED, free):
        assert cost.draft_passes_s(9).tolist() == cost.draft_pass_s(np.arange(10)).tolist()


def test_arrays_broadcast() -> None:
    seconds = COST.pass_s(np.arange(6).reshape(2, 3), np.array([0, 1, 2]))
    assert seconds.shape == (2, 3)
    assert seconds[1, 2] == pytest.approx(COST.pass_s(5, 2))


def test_numpy_numbers_count_as_numbers() -> None:
    assert isinstance(COST.pass_s(np.int64(8)), float)


# Draft passes and rounds


def test_a_draft_round_sums_its_passes_and_the_catch_up() -> None:
    assert COST.draft_round_s((8, 1), 10) == pytest.approx(0.006 + 0.004 + 10 * 0.0005)


def test_a_round_without_draft_passes_drafts_for_nothing() -> None:
    assert COST.draft_round_s(()) == 0.0


def test_drafting_is_free_without_a_measured_drafter() -> None:
    cost = make_cost(draft_sequences=(), draft_s=())
    assert cost.drafter_is_free
    assert cost.draft_round_s((8, 8), 100) == 0.0
    assert cost.draft_pass_s(8) == 0.0
    assert cost.draft_pass_s(np.array([1, 8])).tolist() == [0.0, 0.0]


def test_a_round_is_priced_by_the_sum_of_depths_and_the_deepest_sequence() -> None:
    depths = np.array([3, 1, 0])
    expected = COST.pass_s(3 + 4) + COST.draft_round_s((2, 1, 1)) + 0.001
    assert COST.round_s(depths) == pytest.approx(expected)


def test_evening_out_depths_saves_draft_time_only() -> None:
    uneven, even = COST.round_s(np.array([[8, 0], [4, 4]]))
    assert uneven > even
    without = COST.round_s(np.array([[8, 0], [4, 4]]), drafter="prompt-lookup")
    assert without[0] == without[1]


@given(st.lists(st.lists(st.integers(0, 8), min_size=3, max_size=3), min_size=1, max_size=5))
def test_rounds_are_vectorised_over_leading_axes(rows: list[list[int]]) -> None:
    together = COST.round_s(np.array([rows, rows]), num_prefill_tokens=7, num_context_tokens=99)
    assert together.shape == (2, len(rows))
    for row, seconds in zip(rows, together[1], strict=True):
        passes = tuple(sum(depth > j for depth in row) for j in range(max(row)))
        tokens = sum(row) + 3 + 7
        expected = COST.pass_s(tokens, 7, 99) + COST.draft_round_s(passes) + 0.001
        assert seconds == pytest.approx(expected)


def test_pending_and_catch_up_tokens_are_charged() -> None:
    seconds = COST.round_s(np.array([1, 1]), num_pending_tokens=6, num_catch_up_tokens=4)
    assert seconds == pytest.approx(COST.pass_s(8) + COST.draft_round_s((2,), 4) + 0.001)


# The knee


def test_marginal_price_is_the_slope() -> None:
    assert COST.marginal_s(64) == pytest.approx((0.463 - 0.262) / 64)
    assert COST.marginal_s(32, span=96) == pytest.approx((0.463 - 0.159) / 96)


def test_a_wider_span_looks_past_a_step() -> None:
    cost = make_cost(tokens=(1, 8, 9, 16), verify_s=(1.0, 1.0, 2.0, 2.0), prefill_s=())
    assert cost.marginal_s(8) == pytest.approx(1.0)
    assert cost.marginal_s(8, span=8) == pytest.approx(1.0 / 8)
    assert cost.marginal_s(np.array([8]), span=8).tolist() == pytest.approx([1.0 / 8])


def test_the_knee_is_the_first_pass_that_costs_twice_one_token() -> None:
    knee = COST.knee_tokens()
    assert knee == 16
    assert COST.pass_s(knee) >= 2 * COST.pass_s(1) > COST.pass_s(knee - 1)


def test_the_knee_lies_beyond_the_grid_when_the_grid_ends_before_it() -> None:
    assert CostModel.linear(base_s=1.0, token_s=2**-10, max_tokens=64).knee_tokens() == 1025


def test_a_flat_machine_has_no_knee() -> None:
    assert CostModel.linear(token_s=0.0).knee_tokens() == MAX_PASS_TOKENS


def test_free_tokens_cost_less_than_the_tolerance() -> None:
    free = COST.free_tokens(0.2)
    assert free == 1
    assert COST.pass_s(1 + free) <= 1.2 * COST.pass_s(1) < COST.pass_s(2 + free)


def test_tokens_up_to_the_knee_of_a_linear_machine_are_free() -> None:
    assert CostModel.linear(knee=48).free_tokens(0.0) == 47


def test_a_linear_machine_is_linear() -> None:
    cost = CostModel.linear(base_s=0.05, token_s=0.002, knee=8, draft_base_s=0.003)
    assert cost.pass_s(8) == pytest.approx(0.05)
    assert cost.pass_s(5000) == pytest.approx(0.05 + 4992 * 0.002)
    assert cost.draft_pass_s(7) == pytest.approx(0.003)
    assert not cost.measured


# CUDA graphs

GRAPHED = make_cost(context_s=0.0, cuda_graph_sizes=(1, 2, 4, 8, 16, 24, 32))


def test_a_pass_is_padded_to_the_next_captured_size() -> None:
    assert GRAPHED.pass_s(9) == GRAPHED.pass_s(16) == 0.106
    assert GRAPHED.pass_s(17) == pytest.approx((0.106 + 0.159) / 2)


def test_a_pass_larger_than_any_graph_is_not_padded() -> None:
    assert GRAPHED.pass_s(33) == make_cost(context_s=0.0).pass_s(33)


def test_prefill_and_draft_passes_are_padded_too() -> None:
    assert GRAPHED.pass_s(9, 9) == pytest.approx(0.8 * 0.106)
    assert GRAPHED.draft_pass_s(5) == GRAPHED.draft_pass_s(8)


def test_rounds_are_padded_as_passes_are() -> None:
    depths = np.array([[2, 3], [3, 3], [8, 8]])
    expected = [GRAPHED.pass_s(n) + 0.001 for n in (8, 8, 24)]
    assert GRAPHED.round_s(depths, drafter="prompt-lookup") == pytest.approx(expected)


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_padded_numbers_and_arrays_cost_the_same(tokens: int, prefill: int) -> None:
    each = GRAPHED.pass_s(np.array([tokens]), np.array([prefill]))
    assert each[0] == pytest.approx(GRAPHED.pass_s(tokens, prefill))


def test_the_knee_of_a_staircase_is_the_first_size_of_a_step() -> None:
    assert GRAPHED.knee_tokens() == 9
    assert GRAPHED.free_tokens(0.2) == 1


def test_the_last_token_of_a_step_is_dear_and_the_others_are_free() -> None:
    assert GRAPHED.marginal_s(10) == 0.0
    assert GRAPHED.marginal_s(16) > 0


# Beyond the grid


def test_a_pass_within_the_grid_is_not_extrapolated() -> None:
    assert COST.extrapolation(256) is None


def test_extrapolation_says_how_far() -> None:
    sentence = COST.extrapolation(640)
    assert sentence is not None
    assert "measured up to 256 packed tokens" in sentence
    assert "up to 640 are extrapolated, 2.5 times as far" in sentence
    assert "was modelled up to" in str(CostModel.linear(max_tokens=64).extrapolation(65))


# Checks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ()}, "tokens needs 1 to"),
        ({"tokens": (2, 4), "verify_s": (1.0, 1.0), "prefill_s": ()}, "1 first"),
        ({"tokens": (1, 4, 4), "verify_s": (1.0,) * 3, "prefill_s": ()}, "ascending"),
        ({"tokens": (1, 2.5), "verify_s": (1.0, 1.0), "prefill_s": ()}, "whole numbers"),
        ({"verify_s": (1.0, 2.0)}, "has 2 points and tokens 9"),
        ({"prefill_s": (1.0, 2.0)}, "prefill_s has 2 points"),
        ({"verify_s": (float("nan"), *SMOLLM2_S[1:])}, "verify_s must be a number"),
        ({"verify_s": (0.0, *SMOLLM2_S[1:])}, "above 0"),
        ({"verify_s": (*SMOLLM2_S[:-1], 0.2)}, "falls to 0.2 s at 256"),
        ({"verify_s": ("1", *SMOLLM2_S[1:])}, "verify_s must be a number"),
        ({"draft_s": ()}, "draft_s has 0 points"),
        ({"draft_sequences": ()}, "draft_sequences needs"),
        ({"context_s": -1.0}, "context_s"),
        ({"overhead_s": float("inf")}, "overhead_s"),
        ({"draft_token_s": True}, "draft_token_s"),
        ({"weight_bytes": -5}, "weight_bytes"),
        ({"cuda_graph_sizes": (4, 2)}, "cuda_graph_sizes must be .* ascending"),
        ({"cuda_graph_sizes": (0, 2)}, "cuda_graph_sizes must be .* above 0"),
        ({"cuda_graph_sizes": (1.5,)}, "cuda_graph_sizes must be .* whole"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_cost(**changes)


# Files


def test_a_saved_model_loads_as_the_same(tmp_path: Path) -> None:
    COST.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == COST
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_captured_sizes_are_kept(tmp_path: Path) -> None:
    GRAPHED.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == GRAPHED


def test_files_from_before_captured_sizes_can_be_read() -> None:
    values = COST.to_dict()
    del values["cuda_graph_sizes"]
    assert CostModel.from_dict(values) == COST


def test_lists_and_arrays_are_taken_as_grids() -> None:
    cost = make_cost(tokens=list(COST.tokens), verify_s=np.array(SMOLLM2_S))
    assert cost == COST


def test_a_model_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(COST)).pass_s(17) == COST.pass_s(17)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        make_cost(name="other").save(path)
    assert CostModel.load(path) == COST
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read cost model .*none\.json: No such file"):
        CostModel.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, '"format" must be'),
        ({"format_version": 2}, "format version 2"),
        ({"format_version": True}, "format version True"),
        ({"surprise": 1}, r"unknown fields \['surprise'\]"),
        ({"measured": "yes"}, "measured must be a bool"),
        ({"name": 5}, "name must be a str"),
        ({"tokens": "1,2"}, "tokens must be a list"),
        ({"cuda_graph_sizes": 8}, "cuda_graph_sizes must be a list"),
        ({"verify_s": [[1.0]] * 9}, "verify_s must be a number"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST.to_dict() | change))
    with pytest.raises(ValueError, match=words):
        CostModel.load(path)


def test_missing_fields_are_named() -> None:
    values = COST.to_dict()
    del values["verify_s"]
    with pytest.raises(ValueError, match=r"missing fields \['verify_s'\]"):
        CostModel.from_dict(values)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[1]", b"[" * 100_000, b"NaN"])
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot use cost model"):
        CostModel.load(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    text = json.dumps(COST.to_dict())
    path = tmp_path / "cost.json"
    for end in range(0, len(text) - 1, 37):
        path.write_text(text[:end])
        with pytest.raises(ValueError, match="cannot use cost model"):
            CostModel.load(path)


def test_oversized_files_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ValueError, match="larger than"):
        CostModel.load(path)


SAMPLING = CostModel(
    name="sampling",
    tokens=(1, 8, 64),
    verify_s=(0.04, 0.05, 0.1),
    prefill_s=(0.04, 0.045, 0.08),
    draft_sequences=(1, 16),
    draft_s=(0.004, 0.008),
    cuda_graph_sizes=(8, 64),
    rejection_row_s=3e-4,
    coupled_row_s=9e-4,
    rejection_draw_s=2e-4,
    coupled_draw_s=5e-4,
)


@pytest.mark.parametrize(
    ("rule", "row_s", "draw_s"), [("rejection", 3e-4, 2e-4), ("coupled", 9e-4, 5e-4)]
)
def test_sampled_rows_are_part_of_a_pass_and_draws_of_a_draft_pass(
    rule: VerificationRule, row_s: float, draw_s: float
) -> None:
    sampled = SAMPLING.sampled(rule)
    for n in (8, 64):
        assert sampled.pass_s(n) == pytest.approx(SAMPLING.pass_s(n) + n * row_s)
        assert sampled.pass_s(n, n) == SAMPLING.pass_s(n, n)  # prompt tokens have no rows
    assert sampled.draft_pass_s(8) == pytest.approx(SAMPLING.draft_pass_s(8) + 8 * draw_s)
    assert sampled.sampled("rejection") is sampled  # nothing is charged twice
    assert sampled.sampled("coupled") is sampled


def test_greedy_requests_and_models_without_these_prices_stay_as_they_are() -> None:
    assert SAMPLING.sampled("greedy") is SAMPLING
    plain = CostModel.linear()
    assert plain.sampled("coupled") is plain


@pytest.mark.parametrize("name", ["rejection_row_s", "coupled_draw_s"])
def test_prices_of_sampling_are_checked_and_kept(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        CostModel(name="bad", tokens=(1,), verify_s=(0.1,), **{name: -1.0})  # type: ignore[arg-type]
    SAMPLING.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == SAMPLING
