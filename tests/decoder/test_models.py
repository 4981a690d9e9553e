"""The packed forward: chunks, interleaving and head rows change no logit; what it reports is right."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.models import PackedModel
from specdepth.decoder.packing import pack
from specdepth.decoder.roofline import model_size
from tests.decoder.tiny import VOCAB, next_logits, tiny_llama

MODEL = tiny_llama()
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (4, 30))


def packed_model(num_blocks: int = 64, block_size: int = 4) -> PackedModel:
    model = PackedModel(copy.deepcopy(MODEL))
    model.allocate(num_blocks, block_size)
    return model


PACKED = packed_model()


@torch.no_grad()
def full_logits(tokens: np.ndarray) -> torch.Tensor:
    logits: torch.Tensor = MODEL(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits
    return logits[0]


FULL = [full_logits(text) for text in TEXTS]


@settings(max_examples=20)
@given(
    cuts=st.lists(st.sets(st.integers(1, 29), max_size=5), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_ragged_chunks_of_interleaved_sequences_give_the_logits_of_whole_texts(
    cuts: list[set[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.permutation(64)[:32].reshape(4, 8).astype(np.int32)  # any blocks, in any order
    bounds = [sorted({0, 30} | cut) for cut in cuts]
    for step in range(max(map(len, bounds)) - 1):
        rows = [i for i in rng.permutation(4) if step + 1 < len(bounds[i])]
        starts = np.array([bounds[i][step] for i in rows])
        lengths = np.array([bounds[i][step + 1] for i in rows]) - starts
        spans = pack(starts, lengths)
        ids = TEXTS[np.array(rows)[spans.sequence], spans.positions]
        wanted = np.flatnonzero(rng.random(len(ids)) < 0.5)  # the head runs on these only
        with torch.inference_mode():
            logits = PACKED.forward(
                torch.from_numpy(ids),
                torch.from_numpy(spans.positions),
                PACKED.layout(tables[rows], starts, lengths),
                wanted,
            )
        for got, at in zip(logits, wanted, strict=True):
            expected = FULL[rows[spans.sequence[at]]][spans.positions[at]]
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_padding_rows_of_the_head_are_left_out() -> None:
    model = PackedModel(copy.deepcopy(MODEL), vocab_size=90)
    model.allocate(4, 4)
    layout = model.layout(np.zeros((1, 1), np.int32), np.zeros(1, np.int64), np.array([2]))
    with torch.inference_mode():
        logits = model.forward(torch.tensor([3, 4]), torch.arange(2), layout, np.array([1]))
    assert logits.shape == (1, 90)
    torch.testing.assert_close(logits[0], next_logits(MODEL, [3, 4])[:90])


def test_it_counts_parameters_bytes_and_arithmetic() -> None:
    # Two layers of 2 KV heads of 8 for keys and values.
    assert PACKED.kv_bytes_per_token == 2 * 2 * (8 + 8) * 8
    assert PACKED.size == model_size(MODEL)
    num_parameters = sum(p.numel() for p in MODEL.parameters())
    num_norms = sum(p.numel() for p in MODEL.parameters() if p.dim() == 1)
    embedding = VOCAB * 32  # looked up, neither streamed nor multiplied
    assert PACKED.size.num_parameters == num_parameters
    assert PACKED.size.weight_bytes == 8 * (num_parameters - embedding)
    assert PACKED.size.flops_per_token == 2 * (num_parameters - num_norms - embedding)
    tied = PackedModel(tiny_llama(tie_word_embeddings=True))
    # A tied embedding is the head: its rows are multiplied after all.
    assert tied.size.flops_per_token == 2 * (tied.size.num_parameters - num_norms)
    assert PACKED.size.kv_bytes_per_token == PACKED.kv_bytes_per_token
    assert PACKED.max_positions == 512


def test_a_pool_that_the_device_cannot_hold_names_the_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = packed_model()
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(MemoryError, match=r"kv_cache_bytes"):
        model.allocate(10**9, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    model = PackedModel(tiny_llama(dtype=dtype))
    assert model.dtype == dtype
    assert model.kv_bytes_per_token == 2 * 2 * (8 + 8) * torch.finfo(dtype).bits // 8
