"""An EAGLE-3 draft model that runs ragged packed passes over a paged KV pool.

Legend: T tokens of a pass, N rows whose logits are wanted, H hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdepth.scheduler.state import Ints

from .attention import Backend, PassLayout, paged_attention
from .bf16_layer import LayerKernel, LayerWeights, rms_norm
from .eagle_net import EagleNet, rotary_table
from .models import PackedModel
from .paged_model import LayerShape, PagedModel
from .prepack import can_prepack, prepack
from .roofline import ModelSize


class EagleModel(PagedModel):
    """The network beside its target, whose embeddings it looks tokens up in.

    Args:
        net: taken over; converted to the target's dtype and device.
        names: [V'] the target's id of each draft token.
        target: the model that it drafts for; its layers are watched from now on.
        name: for policies and reports.

    Raises:
        ValueError: a network for a target of another shape.
    """

    def __init__(self, net: EagleNet, names: Tensor, target: PackedModel, name: str) -> None:
        config, embedding = net.config, target.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        if config.hidden_size != embedding.shape[1] or config.vocab_size != len(embedding):
            raise ValueError(
                f"the EAGLE-3 draft model {name} is for a target of {config.vocab_size} tokens and "
                f"hidden size {config.hidden_size}, {target.name} has {len(embedding)} and "
                f"{embedding.shape[1]}; use the target that it was trained for."
            )
        target.watch(config.state_layers)
        self.net, self.name, self.config = net, name, config
        self.device, self.dtype = target.device, target.dtype
        net.to(self.device, self.dtype).requires_grad_(False)
        self.names = names.to(self.device)
        heads, dim = config.num_key_value_heads, config.head_dim
        self.shapes = [LayerShape(heads, dim, dim)]
        self.backend: Backend = target.backend
        if self.backend == "bf16-kernel" and not self.has_kernel():
            self.backend = "sdpa"
        self.layers, self.block_size = [], 0
        self.vocab_size = config.draft_vocab_size
        self.max_positions = config.max_position_embeddings
        num_parameters = sum(p.numel() for p in net.parameters())
        self.size = ModelSize(
            num_parameters=num_parameters,
            weight_bytes=sum(p.numel() * p.element_size() for p in net.parameters()),
            flops_per_token=2.0 * num_parameters,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )
        self._embedding = embedding
        self._cos, self._sin = (table.to(self.device, self.dtype) for table in rotary_table(config))
        self._kernel: LayerKernel | None = None
        if can_prepack(self.dtype, self.device):
            prepack(net)
            self._kernel = _layer_kernel(net)

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes of what is kept of the target's states for one token."""
        return self.config.hidden_size * self._embedding.element_size()

    def read(self, target_states: Tensor) -> Tensor:
        """Target states [T, A * H] as passes take them, [T, H]."""
        return self.net.read(target_states)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layout: PassLayout,
        logit_rows: Ints,
        states: Tensor | None = None,
    ) -> Tensor:
        """One packed pass; leaves the N new states in `states`.

        Args:
            token_ids: [T] int64: entry t of a sequence holds token t + 1.
            positions: [T] int64 entries.
            layout: where they live.
            logit_rows: [N] rows of the packed row whose logits are wanted.
            states: [T, H], from `read` or from the pass before; zeros where left out.

        Returns:
            [N, V'] logits.
        """
        embeddings = self._embedding[token_ids]
        if states is None:
            states = torch.zeros_like(embeddings)
        cos, sin = self._cos[positions], self._sin[positions]
        if self._kernel is not None and layout.kernel is not None:
            kv = layout.layers[0]
            assert kv.rows is not None
            out = self._kernel(
                states, cos, sin, kv.rows, layout.write_index, layout.kernel, beside=embeddings
            )
        else:

            def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                # As transformers calls it: [1, heads, T, D].
                rows = (part.transpose(0, 1)[None] for part in (query, key, value))
                attended, _ = paged_attention(self.net.midlayer.self_attn, *rows, layout=layout)
                return attended[0]

            out = self.net.midlayer(embeddings, states, cos, sin, attention)
        self.states = out[torch.from_numpy(logit_rows).to(self.device)]
        if self._kernel is None:
            return self.net.logits(self.states)
        norm = self.net.norm
        logits: Tensor = self.net.lm_head(
            rms_norm(self.states, norm.weight, self.config.rms_norm_eps)
        )
        return logits


def _layer_kernel(net: EagleNet) -> LayerKernel | None:
    """The layer in one call, where the kernels take it; `net` is prepacked."""
    layer, config = net.midlayer, net.config
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    weights = LayerWeights(
        input_norm=layer.hidden_norm.weight.detach(),
        input_epsilon=config.rms_norm_eps,
        post_norm=layer.post_attention_layernorm.weight.detach(),
        post_epsilon=config.rms_norm_eps,
        beside_norm=layer.input_layernorm.weight.detach(),
        beside_epsilon=config.rms_norm_eps,
        qkv=attention.q_proj.joint.kernel,
        out=attention.o_proj.kernel,
        gate_up=mlp.gate_proj.joint.kernel,
        down=mlp.down_proj.kernel,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
    )
    return LayerKernel(weights) if weights.fit else None
