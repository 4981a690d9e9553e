"""Prepacked and joined linear layers compute what the plain ones do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from specdepth.decoder.lean_llama import LeanLlamaLayer
from specdepth.decoder.models import PackedModel
from specdepth.decoder.prepack import (
    JointPart,
    PackedLinear,
    can_prepack,
    prepack,
    prepacked_dtype,
)
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from tests.decoder.prepacked import PREPACKED
from tests.decoder.tiny import tiny_llama

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_prepack(torch.bfloat16, CPU), reason="no AVX-512")


def bf16_linear(inputs: int, outputs: int, bias: bool, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias).bfloat16()


@pytest.mark.parametrize("dtype", PREPACKED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 33])
@torch.inference_mode()
def test_a_packed_layer_computes_what_the_plain_one_does(
    rows: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = bf16_linear(24, 40, bias).to(dtype)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(1, rows, 24).to(dtype)
    torch.testing.assert_close(packed(x), linear(x))
    assert (packed.in_features, packed.out_features) == (24, 40)


class Block(nn.Module):
    """Layers under the names that transformers' models use."""

    def __init__(self, bias: bool = False, odd: bool = False) -> None:
        super().__init__()
        self.q_proj = bf16_linear(16, 16, bias, 1)
        self.k_proj = bf16_linear(16, 8, bias != odd, 2)
        self.v_proj = bf16_linear(16, 8, bias, 3)
        self.gate_proj = bf16_linear(16, 24, False, 4)
        self.up_proj = bf16_linear(16, 24, False, 5)
        self.down_proj = bf16_linear(24, 16, False, 6)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        keyed = x if other is None else other
        both = torch.cat([self.q_proj(x), self.k_proj(keyed), self.v_proj(x)], -1)
        out: torch.Tensor = self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
        return torch.cat([both, out], -1)


@pytest.mark.parametrize("dtype", PREPACKED)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_projections_of_one_input_become_one_multiplication(bias: bool, dtype: torch.dtype) -> None:
    plain = Block(bias).to(dtype)
    packed = copy.deepcopy(plain)
    assert prepack(packed) == 3
    assert isinstance(packed.q_proj, JointPart)
    assert isinstance(packed.down_proj, PackedLinear)
    for rows in (1, 7):
        x = torch.randn(1, rows, 16).to(dtype)
        torch.testing.assert_close(packed(x), plain(x))
        torch.testing.assert_close(packed(x), plain(x))  # the same tensor again


@torch.inference_mode()
def test_joined_projections_of_different_inputs_are_still_right() -> None:
    plain = Block()
    packed = copy.deepcopy(plain)
    prepack(packed)
    x, other = torch.randn(1, 2, 16).bfloat16(), torch.randn(1, 2, 16).bfloat16()
    torch.testing.assert_close(packed(x, other), plain(x, other))
    torch.testing.assert_close(packed(x), plain(x))


@torch.inference_mode()
def test_a_pass_that_broke_off_leaves_nothing_stale() -> None:
    plain = Block()
    packed = copy.deepcopy(plain)
    prepack(packed)
    packed.q_proj(torch.randn(1, 2, 16).bfloat16())  # k and v were never asked for
    x = torch.randn(1, 2, 16).bfloat16()
    torch.testing.assert_close(packed(x), plain(x))


@torch.inference_mode()
def test_projections_that_differ_in_kind_stay_apart() -> None:
    plain = Block(bias=True, odd=True)
    packed = copy.deepcopy(plain)
    assert prepack(packed) == 5  # q, k, v, gate with up, down
    x = torch.randn(1, 2, 16).bfloat16()
    torch.testing.assert_close(packed(x), plain(x))


def test_only_two_formats_on_cpu_are_prepacked() -> None:
    assert not can_prepack(torch.float64, CPU)
    assert not can_prepack(torch.float16, CPU)
    assert not can_prepack(torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("dtype", PREPACKED)
def test_decoders_can_share_a_prepacked_model(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    shared = [
        SpeculativeDecoder.from_pretrained(model, "none", dtype=dtype, device="cpu")
        for _ in range(2)
    ]
    alone = SpeculativeDecoder.from_pretrained(
        tiny_llama(dtype=dtype), "none", dtype=dtype, device="cpu"
    )
    assert prepacked_dtype(model) == dtype
    prompts = [[1, 2, 3], [4, 5]]
    texts = [
        [result.token_ids for result in one.generate(prompts, max_new_tokens=9)]
        for one in (*shared, alone)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_prepacked_model_keeps_its_number_format() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    decoder = SpeculativeDecoder.from_pretrained(model, "none", dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match="in bfloat16 on the CPU; load it again"):
        SpeculativeDecoder.from_pretrained(model, "none", dtype="float64", device="cpu")
    assert len(decoder.generate([[1, 2]], max_new_tokens=3)[0].token_ids) == 3


def test_states_are_watched_in_passes_of_their_own_decoder_only() -> None:
    model = tiny_llama()
    watching, other = PackedModel(model), PackedModel(model)
    watching.watch([0, 1])
    ids = torch.arange(3)
    for packed in (watching, other):
        packed.allocate(1, 4)
        layout = packed.layout(np.zeros((1, 1), np.int32), np.array([0]), np.array([3]))
        with torch.inference_mode():
            packed.forward(ids, ids, layout, np.arange(3))
    assert len(watching._seen) == 2


@pytest.mark.parametrize("dtype", PREPACKED)
def test_a_prepacked_model_is_close_to_the_plain_one(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    ids = torch.arange(12)
    with torch.inference_mode():
        wanted = model(input_ids=ids[None], use_cache=False).logits[0].float()
        packed = PackedModel(model)
        packed.allocate(3, 4)
        layout = packed.layout(np.array([[2, 0, 1]], np.int32), np.array([0]), np.array([12]))
        logits = packed.forward(ids, ids, layout, np.arange(12)).float()
    assert any(isinstance(module, LeanLlamaLayer) for module in model.modules())
    assert float((logits - wanted).norm() / wanted.norm()) < (
        0.02 if dtype == torch.bfloat16 else 1e-5
    )
