"""Llama's decoder layer without its Python: the same operations on prepacked weights, called directly.

transformers runs some fourteen modules and wrappers a layer; over 30 thin layers they were a tenth of a pass
of one or eight tokens. Only for the exact class of Llama, on a CPU, after `prepack`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import PassLayout, paged_attention
from .prepack import JointPart, PackedLinear


class LeanLlamaLayer(nn.Module):
    """Stands where a prepacked `LlamaDecoderLayer` stood. Inference only."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._query_heads = attention.q_proj.out_features // attention.head_dim
        self._rotated_heads = (
            self._query_heads + attention.k_proj.out_features // attention.head_dim
        )
        self._qkv: PackedLinear = attention.q_proj.joint
        self._out: PackedLinear = attention.o_proj
        self._gate_up: PackedLinear = mlp.gate_proj.joint
        self._down: PackedLinear = mlp.down_proj
        self._activation: nn.Module = mlp.act_fn
        self._input_norm = layer.input_layernorm
        self._post_norm = layer.post_attention_layernorm

    def forward(
        self,
        hidden: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        layout: PassLayout,
        **_: Any,
    ) -> Tensor:
        """[1, T, hidden] to the same; keywords as `LlamaModel` passes them."""
        cos, sin = (part.unsqueeze(2) for part in position_embeddings)
        split = self._query_heads
        qkv = self._qkv(_rms_norm(hidden, self._input_norm))
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        rotated = _rotate(heads[:, :, : self._rotated_heads], cos, sin)
        attended, _none = paged_attention(
            self,
            rotated[:, :, :split].transpose(1, 2),
            rotated[:, :, split:].transpose(1, 2),
            heads[:, :, self._rotated_heads :].transpose(1, 2),
            layout=layout,
            scaling=self._scaling,
        )
        hidden = hidden + self._out(attended.flatten(2))
        gate, up = self._gate_up(_rms_norm(hidden, self._post_norm)).chunk(2, -1)
        result: Tensor = hidden + self._down(self._activation(gate) * up)
        return result


def make_lean(model: nn.Module) -> int:
    """Replace the prepacked Llama layers of `model` in place; returns how many."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Subclasses (other architectures) change what the layer does.
            if type(child) is LlamaDecoderLayer and isinstance(child.self_attn.q_proj, JointPart):
                setattr(module, name, LeanLlamaLayer(child))
                replaced += 1
    return replaced


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    """As `LlamaRMSNorm`: statistics in float32, rounded before the weight is applied."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norms.square_().mul_(1 / x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(norm.weight)
    return normed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [1, T, heads, D] by [1, T, 1, D]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
