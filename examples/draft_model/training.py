"""Training-time test of an EAGLE-3 draft model: losses and acceptance of several draft steps at once.

[Li et al. 2025, EAGLE-3, arXiv 2503.01840, section 3.2.] In step 0 each entry reads the target's state; in
step j it reads the model's own output of step j - 1 one entry to the left, and attends to target-state
entries up to j before it and to its own entries between. That is what the engine does at depth j + 1.

Legend: B texts, T entries, S steps, H hidden size, V' draft vocabulary. Entry t holds token t + 1 and the
target's state of token t; it predicts token t + 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specdepth.decoder.eagle_net import EagleNet, rotary_table


class Unrolled:
    """Runs a network over whole texts for S steps."""

    def __init__(self, net: EagleNet, num_steps: int) -> None:
        self.net, self.num_steps = net, num_steps
        self._cos, self._sin = rotary_table(net.config)

    def steps(self, embeddings: Tensor, target_states: Tensor) -> Iterator[Tensor]:
        """Yield outputs [B, T, H] of each step; those at t < j of step j mean nothing.

        Args:
            embeddings: [B, T, H] of token t + 1.
            target_states: [B, T, A * H] of token t.
        """
        length = embeddings.shape[1]
        cos, sin = (table[:length].to(embeddings.dtype) for table in (self._cos, self._sin))
        states = self.net.read(target_states)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            repeats = query.shape[2] // key.shape[2]
            keys.append(key.repeat_interleave(repeats, 2))
            values.append(value.repeat_interleave(repeats, 2))
            return step_attention(query, keys, values)

        for step in range(self.num_steps):
            states = self.net.midlayer(embeddings, states, cos, sin, attention)
            yield states
            if step + 1 < self.num_steps:
                states = F.pad(states, (0, 0, 1, 0))[:, :-1]


def step_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the last of len(keys) steps.

    Args:
        query: [B, T, heads, D] of step j.
        keys: [B, T, heads, D] of steps 0..j.
        values: the same.
    """
    step, length = len(keys) - 1, query.shape[1]
    scale = query.shape[-1] ** -0.5
    rows = query.transpose(1, 2)
    if not step:
        key, value = keys[0].transpose(1, 2), values[0].transpose(1, 2)
        return F.scaled_dot_product_attention(rows, key, value, is_causal=True).transpose(1, 2)
    at = torch.arange(length)
    seen = at[None, :] <= at[:, None] - step
    scores = rows @ keys[0].permute(0, 2, 3, 1) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    own = [
        (query * shifted(keys[i], step - i)).sum(-1).transpose(1, 2) * scale
        for i in range(1, step + 1)
    ]
    weights = torch.cat([scores, torch.stack(own, -1)], -1).float().softmax(-1).to(query.dtype)
    result = (weights[..., :length] @ values[0].transpose(1, 2)).transpose(1, 2)
    for i in range(1, step + 1):
        weight = weights[..., length + i - 1].transpose(1, 2)[..., None]
        result = result + weight * shifted(values[i], step - i)
    return result


def shifted(x: Tensor, by: int) -> Tensor:
    """[B, T, ...] moved right by `by` entries."""
    if not by:
        return x
    return F.pad(x, (0, 0, 0, 0, by, 0))[:, : x.shape[1]]


def soft_loss(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean cross entropy with the target's law over the draft vocabulary; both [N, V']."""
    law = target_logits.float().softmax(-1)
    return -(law * logits.float().log_softmax(-1)).sum(1).mean()
