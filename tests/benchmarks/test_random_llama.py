from __future__ import annotations

from typing import Any

import pytest
import torch
from _random_llama import random_llama, walk, walking_llama

from specdepth.decoder.speculative_decoder import SpeculativeDecoder

SMALL: dict[str, Any] = {"hidden": 128, "layers": 2, "vocab": 300, "device": torch.device("cpu")}


def test_same_seed_gives_the_same_model_and_dtype_is_as_asked() -> None:
    one, two = (random_llama(**SMALL, dtype=torch.bfloat16, seed=4) for _ in range(2))
    other = random_llama(**SMALL, dtype=torch.bfloat16, seed=5)
    assert one.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not one.training


def test_the_walk_visits_each_token_once_before_it_returns() -> None:
    _, follows = walking_llama(**SMALL, dtype=torch.float32)
    text = walk(follows, [9, 17], 300)
    assert sorted(text) == list(range(300))
    assert text[-1] == 17


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_walking_llama_says_its_walk_in_each_dtype_and_batch(
    dtype: torch.dtype, depth: int
) -> None:
    model, follows = walking_llama(**SMALL, dtype=dtype)
    decoder = SpeculativeDecoder.from_pretrained(
        model, "prompt-lookup", dtype=dtype, device="cpu", max_num_seqs=3
    )
    prompts = [[4, 8, 15], [16], [23, 42], [1, 2, 3, 4]]
    out = decoder.generate(prompts, 30, depth_scheduler=depth)
    assert [r.token_ids for r in out] == [walk(follows, prompt, 30) for prompt in prompts]


@torch.no_grad()
def test_the_right_token_leads_by_far() -> None:
    model, follows = walking_llama(**SMALL, dtype=torch.float32)
    tokens = torch.arange(300).view(10, 30)
    logits = model(input_ids=tokens).logits
    assert torch.equal(logits.argmax(-1), follows[tokens])
    best = logits.topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > 2 * float(logits.std())
