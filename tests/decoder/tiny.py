"""Tiny random models for exact tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 97


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> PreTrainedModel:
    """A Llama of two layers whose laws are far from uniform, so that greedy text varies."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | options))).to(dtype).eval()


def noisy_copy(model: PreTrainedModel, scale: float, seed: int = 1) -> PreTrainedModel:
    """The same model with weight noise of `scale` times each weight's own spread."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                parameter += scale * parameter.std() * torch.randn_like(parameter)
    return copied


def from_config(config: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of any architecture."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@torch.no_grad()
def greedy_text(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Target-only decoding by full forwards: the definition of the right answer."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
