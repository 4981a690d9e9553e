"""What a law of the next token looks like from outside: its confidence."""

from __future__ import annotations

import torch
from torch import Tensor

from . import bf16_rows


def law_signals(logits: Tensor, with_margin: bool = False) -> Tensor:
    """Largest probability and entropy in nats of each row, at temperature 1.

    Args:
        logits: [N, V].
        with_margin: also largest less second largest probability.

    Returns:
        float64 [2, N] or [3, N] on the device of `logits`.
    """
    if bf16_rows.can_read(logits):
        return bf16_rows.signals(logits)[: 2 + with_margin]
    # One row of 49k float32 columns stays in a CPU's cache while it is gone over five times.
    step = 1 if logits.device.type == "cpu" else max(len(logits), 1)
    parts = [_signals(rows, with_margin) for rows in torch.split(logits, step)]
    return torch.cat(parts, 1).double()


def _signals(logits: Tensor, with_margin: bool) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    shifted = logits.to(wide, copy=True)
    shifted.sub_(shifted.amax(-1, keepdim=True))
    weights = shifted.exp()
    total = weights.sum(-1)
    entropy = total.log() - torch.linalg.vecdot(weights, shifted.clamp_min_(-1e30)) / total
    signals = [1 / total, entropy]
    if with_margin:
        second = weights.topk(min(2, weights.shape[-1]), -1).values[:, -1]
        signals.append((1 - second) / total if weights.shape[-1] > 1 else 1 / total)
    return torch.stack(signals)
