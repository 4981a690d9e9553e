"""Randomly initialised Llamas for machines without weights.

`walking_llama` computes what a real model of its size computes, but its next token is certain: the head
holds the embeddings in another order and the layers add little to the residual stream, so the most
likely successor of each token leads by far. An ordinary random model has near ties at every token,
which bf16 and another batch decide differently; its text could not be recorded and proposed back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def random_llama(
    *,
    hidden: int,
    layers: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    max_positions: int = 2048,
    head_dim: int = 64,
    initializer_range: float = 0.02,
) -> LlamaForCausalLM:
    """A Llama with grouped queries (4 heads a KV head where there are that many) and no end token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(hidden // head_dim, 1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train(False)
    return model


@torch.no_grad()
def walking_llama(*, seed: int = 0, **options: Any) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """A random Llama whose greedy text walks one cycle through its vocabulary.

    Returns:
        The model, and int64 [V]: the token that follows each.
    """
    model = random_llama(seed=seed, **options)
    order = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed))
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.normal_(0.0, 1.0)
    head[follows.to(head.device)] = embedding
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    return model, follows


def walk(follows: torch.Tensor, prompt: list[int], length: int) -> list[int]:
    """The text that a walking Llama gives `prompt`."""
    text = [prompt[-1]]
    for _ in range(length):
        text.append(int(follows[text[-1]]))
    return text[1:]
