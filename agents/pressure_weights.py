"""Sight of memory for a policy of offsets: a unit that bends its logits as the KV pool runs out.

Legend: K deepest depth, F features, M parameters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.policy_file import PolicyWeights
from specdepth.scheduler.state import Floats

PRESSURE_SCALES: Floats = np.array([0.3, 1.0, 0.2])
"""[M] what a parameter of 1 changes: log of the room where pressure begins, logit, logit a position."""
SCARCE_ROOM = 0.06
"""`kv_room` at which half the pressure is on: a block for every seven sequences with blocks of 16."""
_STEEP = 2.0
"""What a unit takes in without any room: nearly all of the pressure."""


def pressure_weights(weights: PolicyWeights, values: Floats) -> PolicyWeights:
    """Add one hidden unit to a policy of offsets, which holds at all loads.

    It is -1 where there is room, and rises to 1 as free blocks run out. So with room for all the policy
    decides as it did. Loads share it: a pool too small for 16 requests runs 6 of them, and how short it is
    shows in the room of each, not in how many run.

    Args:
        weights: of a policy of offsets with one hidden layer that reads raw features.
        values: [M] parameters.

    Raises:
        ValueError: another form of policy.
    """
    raw = not weights.mean.any() and bool((weights.inv_std == 1).all())
    if weights.action != "offset" or len(weights.weights) != 2 or not raw:
        raise ValueError(
            "memory pressure bends policies of offsets with one hidden layer over raw features, got one "
            f"of action {weights.action!r} with layers {weights.layer_sizes}."
        )
    moves = values * PRESSURE_SCALES
    row = np.zeros((1, NUM_FEATURES), np.float32)
    row[0, FEATURE_NAMES.index("kv_room")] = -_STEEP / (SCARCE_ROOM * np.exp(moves[0]))
    half = (moves[1] + moves[2] * (np.arange(len(weights.depths)) - 2.0)) / 2
    out = half[:, None].astype(np.float32)
    bias, out_bias = weights.biases
    return replace(
        weights,
        weights=(
            np.concatenate([weights.weights[0], row]),
            np.concatenate([weights.weights[1], out], axis=1),
        ),
        biases=(
            np.append(bias, np.float32(_STEEP)),
            (out_bias.astype(np.float64) + half).astype(np.float32),
        ),
    )


def sees_memory(weights: PolicyWeights) -> bool:
    """Whether a unit of the first layer reads how much KV is free."""
    columns = [FEATURE_NAMES.index(name) for name in ("kv_room", "kv_used")]
    return bool(weights.weights[0][:, columns].any())
