"""What a law of the next token looks like from outside: its confidence."""

from __future__ import annotations

import torch
from specdepth.scheduler.state import Floats
from torch import Tensor


def law_signals(logits: Tensor) -> Floats:
    """Largest probability, entropy in nats, and margin of largest over second, at temperature 1.

    Args:
        logits: [N, V].

    Returns:
        float64 [3, N] on the host.
    """
    log_probs = torch.log_softmax(
        logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    probs = log_probs.exp()
    entropy = -(probs * log_probs.clamp_min(-1e30)).sum(-1)
    top = probs.topk(min(2, probs.shape[-1]), -1).values
    margin = top[:, 0] - top[:, -1] if top.shape[1] == 2 else top[:, 0]
    result: Floats = torch.stack([top[:, 0], entropy, margin]).double().cpu().numpy()
    return result
