"""Llama's decoder layer without its Python: the same operations on prepacked weights, called directly.

transformers runs some fourteen modules and wrappers a layer; over 30 thin layers they were a tenth of a pass
of one or eight tokens. Only for the exact class of Llama, on a CPU, after `prepack`. Where the kernels in
bfloat16 take all of a layer, it is one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import PassLayout, attend
from .bf16_layer import LayerKernel, LayerWeights
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
        self._query_width = attention.q_proj.out_features
        self._rotated_heads = (
            self._query_heads + attention.k_proj.out_features // attention.head_dim
        )
        self._qkv: PackedLinear = attention.q_proj.joint
        self._out: PackedLinear = attention.o_proj
        self._gate_up: PackedLinear = mlp.gate_proj.joint
        self._down: PackedLinear = mlp.down_proj
        self._activation: nn.Module = mlp.act_fn
        self._input_norm = LeanNorm(layer.input_layernorm)
        self._post_norm = LeanNorm(layer.post_attention_layernorm)
        weights = LayerWeights(
            input_norm=self._input_norm.weight.detach(),
            input_epsilon=self._input_norm.epsilon,
            post_norm=self._post_norm.weight.detach(),
            post_epsilon=self._post_norm.epsilon,
            qkv=self._qkv.kernel,
            out=self._out.kernel,
            gate_up=self._gate_up.kernel,
            down=self._down.kernel,
            num_heads=self._query_heads,
            num_kv_heads=self._rotated_heads - self._query_heads,
            head_dim=self._head_dim,
            scale=self._scaling,
        )
        fits = weights.fit and mlp.config.hidden_act == "silu"
        self._kernel = LayerKernel(weights) if fits else None

    def forward(
        self,
        hidden: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        layout: PassLayout,
        **_: Any,
    ) -> Tensor:
        """[1, T, hidden] to the same; keywords as `LlamaModel` passes them."""
        cos, sin = position_embeddings
        kv = layout.layers[self.layer_idx]
        assert kv.rows is not None
        row = hidden[0]
        if self._kernel is not None and layout.kernel is not None:
            places = layout.write_index
            return self._kernel(row, cos, sin, kv.rows, places, layout.kernel).unsqueeze(0)
        qkv = self._qkv(self._input_norm(row))
        heads = qkv.view(len(row), -1, self._head_dim)
        _rotate_(heads.narrow(1, 0, self._rotated_heads), cos, sin)
        kv.rows.index_copy_(0, layout.write_index, qkv[:, self._query_width :])
        attended = attend(heads.narrow(1, 0, self._query_heads), kv, layout, self._scaling)
        row = self._out(attended.flatten(1)).add_(row)
        gate_up = self._gate_up(self._post_norm(row))
        gate, up = gate_up.chunk(2, 1)
        gated = self._activation(gate).mul_(up)
        result: Tensor = self._down(gated).add_(row)
        return result.unsqueeze(0)


class LeanNorm(nn.Module):
    """`LlamaRMSNorm` on [T, hidden] in fewer calls: statistics in float32, rounded before the weight is
    applied.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight: Tensor = norm.weight
        self.epsilon: float = norm.variance_epsilon
        self._epsilon = torch.tensor(self.epsilon, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to the same."""
        wide = x.float()
        norms = torch.linalg.vector_norm(wide, 2, (1,), True)
        scale = torch.addcmul(self._epsilon, norms, norms, value=1 / x.shape[1]).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)


class LeanRotary(nn.Module):
    """Stands where `LlamaRotaryEmbedding` stood; its tables are shaped for `_rotate_`, once a pass."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(self, hidden: Tensor, *, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D], the first half of the sines negative."""
        cos, sin = self._rotary(hidden, position_ids=position_ids)
        low, high = sin[0].unsqueeze(1).chunk(2, -1)
        return cos[0].unsqueeze(1), torch.cat((-low, high), -1)


def make_lean(model: nn.Module) -> int:
    """Replace the prepacked Llama layers of `model` in place; returns how many."""
    from transformers.models.llama.modeling_llama import LlamaModel

    replaced = 0
    for module in list(model.modules()):
        # Subclasses (other architectures) change what a layer does.
        if type(module) is LlamaModel and all(map(_can_be_lean, module.layers)):
            for index, layer in enumerate(module.layers):
                module.layers[index] = LeanLlamaLayer(layer)
                replaced += 1
            module.rotary_emb = LeanRotary(module.rotary_emb)  # type: ignore[assignment]
    return replaced


def _can_be_lean(layer: nn.Module) -> bool:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return type(layer) is LlamaDecoderLayer and isinstance(layer.self_attn.q_proj, JointPart)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of [T, heads, D], in place, by the tables of `LeanRotary`."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(rolled, sin)
