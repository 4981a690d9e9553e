from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from specdepth.decoder.roofline import model_size, roofline, speculation_arithmetic
from specdepth.scheduler.cost import CostModel

VOCAB, HIDDEN, LAYERS, MLP, HEADS, KV_HEADS, HEAD_SIZE = 100, 16, 2, 32, 4, 2, 4


def make_llama(tied: bool):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


ATTENTION = HIDDEN * HEAD_SIZE * (2 * HEADS + 2 * KV_HEADS)
LINEAR = LAYERS * (ATTENTION + 3 * HIDDEN * MLP)
NORMS = (2 * LAYERS + 1) * HIDDEN
HEAD = VOCAB * HIDDEN

COST = CostModel(
    name="roof",
    tokens=(1, 8, 16),
    verify_s=(0.1, 0.1, 0.2),
    weight_bytes=10**9,
    kv_bytes_per_token=1000,
    flops_per_token=1e9,
)


@pytest.mark.parametrize("tied", [True, False])
def test_linear_layers_and_head_are_computed_and_the_embedding_is_looked_up(tied: bool) -> None:
    size = model_size(make_llama(tied))
    assert size.flops_per_token == 2 * (LINEAR + HEAD)
    assert size.weight_bytes == 2 * (LINEAR + HEAD + NORMS)
    assert size.num_parameters == LINEAR + NORMS + HEAD * (1 if tied else 2)


def test_grouped_heads_make_the_cache_small() -> None:
    assert model_size(make_llama(True)).kv_bytes_per_token == 2 * LAYERS * KV_HEADS * HEAD_SIZE * 2


def test_models_with_position_embeddings_are_counted() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    with torch.device("meta"):
        size = model_size(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert size.flops_per_token == 2 * (LAYERS * 12 * HIDDEN * HIDDEN + HEAD)
    assert size.kv_bytes_per_token == 2 * LAYERS * HIDDEN * 4


def test_roofline_rows_state_achieved_rates() -> None:
    one, eight, sixteen = roofline(COST)
    assert (one.tokens, eight.tokens, sixteen.tokens) == (1, 8, 16)
    assert [row.ratio for row in (one, eight, sixteen)] == [1.0, 1.0, 2.0]
    assert (one.gflop_s, one.gbyte_s) == pytest.approx((10.0, 10.0))
    assert (eight.gflop_s, eight.gbyte_s) == pytest.approx((80.0, 10.0))
    assert sixteen.gbyte_s == pytest.approx(5.0)
    assert eight.bytes_per_token == 10**9 / 8


def test_roofline_of_an_imported_model_has_times_only() -> None:
    row = roofline(CostModel(name="csv", tokens=(1,), verify_s=(0.1,)))[0]
    assert row.pass_s == 0.1
    assert row.gflop_s is row.gbyte_s is row.bytes_per_token is row.flops_per_token is None


def test_speculation_computes_more_and_moves_less() -> None:
    work = speculation_arithmetic(COST, acceptance_length=3.0, mean_depth=4.0)
    assert work.flops_ratio == pytest.approx(5 / 3)
    assert work.bytes_ratio == pytest.approx(1 / 3)
    assert work.time_ratio == pytest.approx(1 / 3)
    assert work.flops_per_token_off == 1e9


def test_depth_zero_changes_nothing() -> None:
    work = speculation_arithmetic(COST, acceptance_length=1.0, mean_depth=0.0, num_sequences=4)
    assert (work.flops_ratio, work.bytes_ratio, work.time_ratio) == (1.0, 1.0, 1.0)
    assert work.bytes_per_token == 10**9 / 4


def test_context_is_read_once_a_pass() -> None:
    work = speculation_arithmetic(
        COST, acceptance_length=2.0, mean_depth=4.0, num_sequences=2, context_length=500
    )
    assert work.bytes_per_token_off == 10**9 / 2 + 500 * 1000
    assert work.bytes_ratio == pytest.approx(0.5)


def test_a_batch_beyond_the_knee_pays_for_depth_in_time() -> None:
    work = speculation_arithmetic(COST, acceptance_length=1.2, mean_depth=1.0, num_sequences=8)
    assert work.bytes_ratio < 1 < work.time_ratio


def test_a_draft_model_adds_its_own_work() -> None:
    drafted = replace(COST, draft_sequences=(1,), draft_s=(0.01,))
    work = speculation_arithmetic(
        drafted,
        acceptance_length=2.0,
        mean_depth=2.0,
        draft_flops_per_token=1e8,
        draft_weight_bytes=1e8,
    )
    assert work.flops_per_token == pytest.approx((3e9 + 2e8) / 2)
    assert work.bytes_per_token == pytest.approx((1e9 + 2e8) / 2)
    assert work.time_per_token_s == pytest.approx((0.1 + 0.02) / 2)


@given(st.floats(0, 8), st.floats(0, 1), st.integers(1, 64))
def test_flops_never_fall_and_bytes_never_rise(depth: float, rate: float, batch: int) -> None:
    work = speculation_arithmetic(
        COST, acceptance_length=1 + depth * rate, mean_depth=depth, num_sequences=batch
    )
    assert work.flops_ratio >= 1 - 1e-12
    assert work.bytes_ratio <= 1 + 1e-12


@pytest.mark.parametrize("acceptance_length", [0.5, 5.5, float("nan")])
def test_an_impossible_acceptance_length_is_refused(acceptance_length: float) -> None:
    with pytest.raises(ValueError, match=r"acceptance_length must be in 1\.\.5"):
        speculation_arithmetic(COST, acceptance_length=acceptance_length, mean_depth=4.0)


def test_a_cost_model_without_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know its FLOPs"):
        speculation_arithmetic(CostModel.linear(), acceptance_length=2.0, mean_depth=4.0)
