"""The lean Llama layer against the layer that it replaces."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdepth import SpeculativeDecoder
from specdepth.decoder.lean_llama import LeanLlamaLayer, LeanNorm, make_lean
from specdepth.decoder.models import PackedModel
from specdepth.decoder.prepack import can_prepack, prepack
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.prepacked import PREPACKED
from tests.decoder.threads import torch_threads
from tests.decoder.tiny import from_config, tiny_llama

needs_bf16 = pytest.mark.skipif(
    not can_prepack(torch.bfloat16, torch.device("cpu")), reason="needs AVX-512"
)
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-5}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def logits_of(packed: PackedModel, lengths: list[int], block_size: int = 4) -> torch.Tensor:
    """Logits of every token of sequences that start at 0, laid back to back."""
    packed.allocate(64, block_size)
    rng = np.random.default_rng(0)
    positions = np.concatenate([np.arange(n) for n in lengths])
    tables = np.arange(16 * len(lengths), dtype=np.int32).reshape(len(lengths), 16)
    layout = packed.layout(tables, np.zeros(len(lengths), np.int64), np.array(lengths))
    with torch.inference_mode():
        return packed.forward(
            torch.from_numpy(rng.integers(0, packed.vocab_size, len(positions))),
            torch.from_numpy(positions),
            layout,
            np.arange(len(positions)),
        ).double()


@pytest.mark.parametrize("lengths", [[1], [7], [1, 5, 1, 3], [1, 1, 1]])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("dtype", PREPACKED)
def test_it_computes_what_the_layer_computed(
    lengths: list[int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = tiny_llama(dtype=dtype, **WIDE, **options)
    lean = PackedModel(copy.deepcopy(model))
    assert sum(isinstance(m, LeanLlamaLayer) for m in lean.model.modules()) == 2
    exact = PackedModel(model.double())
    got, want = logits_of(lean, lengths), logits_of(exact, lengths)
    assert (got - want).norm() / want.norm() < TOLERANCE[dtype]


@on_each_kernel
@pytest.mark.parametrize("lengths", [[1], [7], [1, 5, 1, 3], [40, 1]])
@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}])
def test_the_kernel_computes_what_the_layer_computed(
    lengths: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(dtype=torch.bfloat16, **WIDE, **options, head_dim=32)
    lean = PackedModel(copy.deepcopy(model))
    exact = PackedModel(model.double())
    want = logits_of(exact, lengths, 16)
    monkeypatch.setattr("specdepth.decoder.lean_llama._rotate_", None)  # only the kernel runs
    got = logits_of(lean, lengths, 16)
    assert (got - want).norm() / want.norm() < TOLERANCE[torch.bfloat16]
    with torch_threads(3):
        assert torch.equal(logits_of(lean, lengths, 16), got)


@on_each_kernel
@pytest.mark.parametrize(
    "options",
    [{"head_dim": 16}, {"intermediate_size": 80}, {"hidden_act": "gelu"}],
    ids=["heads", "width", "activation"],
)
def test_what_the_kernel_does_not_take_runs_in_torch(options: dict[str, Any]) -> None:
    model = tiny_llama(dtype=torch.bfloat16, **(WIDE | {"head_dim": 32} | options))
    lean = PackedModel(copy.deepcopy(model))
    exact = PackedModel(model.double())
    for block_size in (4, 16):
        got, want = (logits_of(one, [3, 9], block_size) for one in (lean, exact))
        assert (got - want).norm() / want.norm() < TOLERANCE[torch.bfloat16]


@torch.inference_mode()
def test_the_norm_rounds_where_the_norm_of_llama_does() -> None:
    norm = LlamaRMSNorm(64, eps=1e-5).bfloat16()
    norm.weight.copy_(torch.randn(64))
    x = torch.randn(9, 64).bfloat16() * torch.logspace(-4, 4, 9)[:, None].bfloat16()
    got, want = LeanNorm(norm)(x).float(), norm(x).float()
    # The same but where the sum of squares, added in another order, tips the rounding of a value.
    assert float((got != want).float().mean()) < 0.02
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


@torch.inference_mode()
def test_the_norm_leaves_its_input_alone() -> None:
    """The residual is read again; in float32 nothing makes a copy of it on the way."""
    for dtype in TOLERANCE:
        x = torch.randn(3, 64).to(dtype)
        before = x.clone()
        LeanNorm(LlamaRMSNorm(64).to(dtype))(x)
        assert torch.equal(x, before)


@needs_bf16
def test_a_wrong_rotation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(dtype=torch.bfloat16, **WIDE)
    monkeypatch.setattr("specdepth.decoder.lean_llama._rotate_", lambda x, cos, sin: None)
    with pytest.raises(ValueError, match="prepacked weights do not reproduce"):
        PackedModel(model)


@needs_bf16
def test_layers_of_other_architectures_stay() -> None:
    config = MistralConfig(
        vocab_size=97,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        **WIDE,
    )
    model = from_config(config, dtype=torch.bfloat16)
    prepack(model)
    assert make_lean(model) == 0


def test_layers_that_are_not_prepacked_stay() -> None:
    assert make_lean(tiny_llama()) == 0


@needs_bf16
def test_a_lean_model_decodes_and_drafts() -> None:
    model = tiny_llama(dtype=torch.bfloat16, **WIDE)
    decoder = SpeculativeDecoder.from_pretrained(
        copy.deepcopy(model), copy.deepcopy(model), max_num_seqs=4, dtype=torch.bfloat16
    )
    batch = decoder.generate([[1, 2, 3], [4, 5]], max_new_tokens=12, depth_scheduler=4)
    assert [len(result.token_ids) for result in batch] == [12, 12]
    assert batch.metrics.acceptance_rate > 0.8  # the draft is the target, but for rounding
