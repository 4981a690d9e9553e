"""The network of an EAGLE-3 draft model: one decoder layer that reads the target's hidden states.

[Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv 2503.01840, section 3.] The same module runs in training over whole texts and in the engine
over a paged pool; only the attention function that it is given differs. Parameters are named as in
EAGLE-3 checkpoints, which vLLM and SGLang read.

Legend: T tokens, H hidden size, A layers of the target that are read, V' draft vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [..., T, heads, D] to [..., T, query heads, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape of the network."""

    hidden_size: int
    """H, also of the target."""
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Tokens of the target."""
    draft_vocab_size: int
    """V', tokens that the draft model can name."""
    state_layers: tuple[int, ...]
    """Layers of the target whose inputs it reads, in increasing order (A of them)."""
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of an EAGLE model must be at least 1.")
        if self.num_attention_heads % max(self.num_key_value_heads, 1) or self.head_dim % 2:
            raise ValueError(
                "an EAGLE model needs an even head size and heads that share key/value heads evenly, "
                f"got {self.head_dim}, {self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"the draft vocabulary must have 1..{self.vocab_size} tokens, got "
                f"{self.draft_vocab_size}."
            )
        layers = self.state_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(f"layers to read must be different and increasing, got {layers}.")


class EagleAttention(nn.Module):
    """Projections of its attention; queries, keys and values see token and state side by side."""

    layer_idx = 0

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        wide, head = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(wide, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(wide, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(wide, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, config.hidden_size, bias=False)


class EagleMLP(nn.Module):
    """Llama's feed-forward block."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to the same."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class EagleLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.head_dim = config.head_dim
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = EagleMLP(config)

    def forward(
        self, embeddings: Tensor, states: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        """[..., T, H] token embeddings and states to new states; see `rotary_table`."""
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], -1)
        parts = (
            self.self_attn.q_proj(both),
            self.self_attn.k_proj(both),
            self.self_attn.v_proj(both),
        )
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        attended = attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        states = states + self.self_attn.o_proj(attended.flatten(-2))
        result: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result


class EagleNet(nn.Module):
    """All trained parameters; token embeddings are the target's own."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(len(config.state_layers) * size, size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    def read(self, target_states: Tensor) -> Tensor:
        """Target states [..., A * H] as the layer takes them, [..., H]."""
        states: Tensor = self.fc(target_states)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[..., V'] for what follows the token of each state [..., H] that the layer gave."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits


def rotary_table(config: EagleConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, float32 [positions, 1, D], the first half of the sines negative
    [Su et al. 2021, RoPE].
    """
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_theta**-powers).repeat(1, 2).unsqueeze(1)
    signs = torch.ones(config.head_dim, dtype=torch.float64)
    signs[: config.head_dim // 2] = -1
    return angles.cos().float(), (angles.sin() * signs).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., T, heads, D] by `rotary_table`, in halves as Llama has it."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
