"""A policy that always takes one depth, as an exported folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specdepth.scheduler.features import NUM_FEATURES
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights, save_policy


def save_constant(folder: Path, depth: int, top: int = 4, pair: str = "made") -> Path:
    """Write a policy for prompt lookup and K = `top`; returns the folder."""
    bias = np.zeros(top + 1, np.float32)
    bias[depth] = 1.0
    weights = PolicyWeights(
        weights=(np.zeros((top + 1, NUM_FEATURES), np.float32),),
        biases=(bias,),
        mean=np.zeros(NUM_FEATURES, np.float32),
        inv_std=np.ones(NUM_FEATURES, np.float32),
        depths=tuple(range(top + 1)),
    )
    card = PolicyCard(
        model_pair=f"{pair} + prompt-lookup",
        drafter="prompt-lookup",
        max_num_speculative_tokens=top,
        mask_depths=True,
    )
    return save_policy(folder, weights, card)
