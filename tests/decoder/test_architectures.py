"""Tiny random models of each architecture: right beyond the sliding window, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from specdepth.decoder.models import PackedModel, UnsupportedModelError
from tests.decoder.tiny import (
    VOCAB,
    Watched,
    build_decoder,
    from_config,
    greedy_text,
    noisy_copy,
    ragged,
    repetitive_prompts,
    tiny_llama,
)

WINDOW = 8
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA = BASE | {"head_dim": 8, "tie_word_embeddings": False}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 4,
}

SUPPORTED = {
    "Llama": lambda: transformers.LlamaConfig(**BASE),
    "Qwen2": lambda: transformers.Qwen2Config(**BASE),
    "Qwen2 with a window": lambda: transformers.Qwen2Config(
        **BASE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "Qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=8),
    "Mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=WINDOW),
    "Gemma": lambda: transformers.GemmaConfig(**GEMMA),
    "Gemma 2": lambda: transformers.Gemma2Config(
        **GEMMA,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=8,
    ),
    "Gemma 3": lambda: transformers.Gemma3TextConfig(
        **GEMMA,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "GPT-2": lambda: transformers.GPT2Config(**GPT2),
    "GPT-2 scaled by layer": lambda: transformers.GPT2Config(
        **GPT2, scale_attn_by_inverse_layer_idx=True
    ),
}
WITH_WINDOW = ("Qwen2 with a window", "Mistral", "Gemma 2", "Gemma 3")


def build(config: Any, dtype: torch.dtype = torch.float64) -> transformers.PreTrainedModel:
    model = from_config(config, seed=2, dtype=dtype)
    model.set_attn_implementation("eager")  # sdpa knows no soft-capping
    return model


@pytest.mark.parametrize("name", SUPPORTED)
def test_speculative_text_equals_plain_text_beyond_the_window(name: str) -> None:
    target = build(SUPPORTED[name]())
    prompts = repetitive_prompts()[2:5:2]
    assert min(map(len, prompts)) > 3 * WINDOW
    texts = [greedy_text(target, prompt, 20) for prompt in prompts]
    assert min(len(set(text)) for text in texts) > 3
    for draft in ("prompt-lookup", noisy_copy(target, 0.03)):
        decoder = build_decoder(target, draft, max_num_batched_tokens=20)
        batch = decoder.generate(prompts, 20, depth_scheduler=Watched(ragged(0)))
        assert [result.token_ids for result in batch] == texts
    assert 0.2 < batch.metrics.acceptance_rate < 1.0


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_the_window_matters_in_that_test(name: str) -> None:
    config = SUPPORTED[name]()
    prompt = repetitive_prompts()[2]
    text = greedy_text(build(config), prompt, 20)
    config.sliding_window = 1000
    assert greedy_text(build(config), prompt, 20) != text


REFUSED = {
    "attention sinks": lambda: transformers.GptOssConfig(
        **BASE, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "linear_attention": lambda: transformers.MambaConfig(**MAMBA),
    "of kind linear_attention": lambda: transformers.JambaConfig(
        **BASE, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
    "layers of kind linear_attention": lambda: transformers.Qwen3NextConfig(
        **BASE,
        **EXPERTS,
        head_dim=8,
        num_experts=2,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "hybrid": lambda: transformers.FalconH1Config(
        **BASE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4
    ),
    "conv": lambda: transformers.Lfm2Config(**BASE, layer_types=["conv", "full_attention"]),
    "chunked_attention": lambda: transformers.Llama4TextConfig(
        **BASE, head_dim=8, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=8
    ),
    r"rotary embedding \(dynamic\)": lambda: transformers.LlamaConfig(
        **BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    r"rotary embedding \(longrope\)": lambda: transformers.Phi3Config(
        **BASE,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    ),
    "2 of 2 layers outside transformers' attention interface": lambda: transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4
    ),
}


@pytest.mark.parametrize("feature", REFUSED)
def test_what_cannot_be_reproduced_is_refused_by_name(feature: str) -> None:
    model = build(REFUSED[feature](), torch.float32)
    with pytest.raises(UnsupportedModelError, match=feature) as refused:
        PackedModel(model)
    assert type(model).__name__ in str(refused.value)


def test_encoder_decoder_models_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        PackedModel(transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen2MoeConfig(
            **BASE,
            **EXPERTS,
            num_experts=2,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=2,
        ),
        transformers.PhimoeConfig(
            **BASE, num_local_experts=2, num_experts_per_tok=1, sliding_window=40
        ),
    ],
    ids=["Qwen2MoE", "PhiMoE"],
)
def test_a_window_that_only_the_mask_knows_is_refused_although_the_check_is_shorter(
    config: Any,
) -> None:
    """Their attention is not told the window, so paged text would be wrong from token 41 on."""
    with pytest.raises(UnsupportedModelError, match="mask of its own making"):
        PackedModel(build(config, torch.float32))


def test_a_window_as_long_as_the_model_is_no_window() -> None:
    config = transformers.PhimoeConfig(
        **BASE, num_local_experts=2, num_experts_per_tok=1, sliding_window=256
    )
    PackedModel(build(config, torch.float32))


def test_a_refused_model_stays_as_it_was() -> None:
    model = build(REFUSED["attention sinks"](), torch.float32)
    before = greedy_text(model, [1, 2, 3], 4)
    with pytest.raises(UnsupportedModelError):
        PackedModel(model)
    assert model.config._attn_implementation == "eager"
    assert greedy_text(model, [1, 2, 3], 4) == before


def test_attention_that_differs_in_silence_is_caught_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model whose own attention does something that no keyword tells."""
    model = tiny_llama()
    model.set_attn_implementation("eager")
    own = transformers.models.llama.modeling_llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any) -> Any:
        far = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        return own(module, query, key, value, mask + 0.05 * far, **kw)  # ALiBi, say

    name = "transformers.models.llama.modeling_llama.eager_attention_forward"
    monkeypatch.setattr(name, biased)
    with pytest.raises(UnsupportedModelError, match="relative error of logits"):
        PackedModel(copy.deepcopy(model))
    monkeypatch.undo()
    PackedModel(model)
