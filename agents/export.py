"""From a trained PPO model to a policy that runs with numpy alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import nn

from specdepth.scheduler.baselines.capped_greedy import Shrinkage
from specdepth.scheduler.policy_file import (
    Activation,
    Float32s,
    PolicyCard,
    PolicyWeights,
    save_policy,
)

from .offset_policy import OffsetPolicy
from .policy_card import CARD_FILE, render_card
from .results import write_atomically
from .slot_policy import CLIP, BatchPolicy, SlotPolicy

ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: "tanh", nn.ReLU: "relu"}


def policy_weights(
    model: OnPolicyAlgorithm, shrinkage: Mapping[int, Shrinkage] | None = None
) -> PolicyWeights:
    """Copy the actor's layers and the normalisation; `depths` are 0..K, or 1..K for offsets.

    The policy object itself cannot be exported (its distribution caches graph tensors), so its
    linear layers are read out.

    Raises:
        ValueError: a model of another policy class, or with layers other than linear, tanh and ReLU.
    """
    policy = model.policy
    if not isinstance(policy, SlotPolicy | OffsetPolicy):
        raise ValueError(
            f"only policies trained with slots as agents can be exported, got "
            f"{type(policy).__name__}."
        )
    layers = [m for m in policy.mlp_extractor.policy_net.modules() if not list(m.children())]
    linear = [m for m in (*layers, policy.action_net) if isinstance(m, nn.Linear)]
    kinds = {type(m) for m in layers if not isinstance(m, nn.Linear)}
    if len(kinds) > 1 or not kinds <= set(ACTIVATIONS):
        raise ValueError(
            f"activations must all be tanh or all be ReLU, got {sorted(k.__name__ for k in kinds)}."
        )
    activation = ACTIVATIONS[kinds.pop()] if kinds else "tanh"
    num_outputs = linear[-1].out_features
    if isinstance(policy, OffsetPolicy):
        if not shrinkage:
            raise ValueError("a policy of offsets needs the shrinkage of the rule that it bends.")
        features = linear[0].in_features
        return PolicyWeights(
            weights=tuple(_array(m.weight) for m in linear),
            biases=tuple(_array(m.bias) for m in linear),
            mean=np.zeros(features, np.float32),
            inv_std=np.ones(features, np.float32),
            activation=activation,
            depths=tuple(range(1, num_outputs + 1)),
            action="offset",
            shrinkage=shrinkage,
        )
    normaliser = policy.normaliser
    return PolicyWeights(
        weights=tuple(_array(m.weight) for m in linear),
        biases=tuple(_array(m.bias) for m in linear),
        mean=_array(normaliser.mean),
        inv_std=_array(normaliser.inv_std),
        clip=CLIP,
        activation=activation,
        depths=tuple(range(num_outputs)),
        action="batch" if isinstance(policy, BatchPolicy) else "depth",
    )


def export_policy(
    model: OnPolicyAlgorithm,
    folder: str | os.PathLike[str],
    card: PolicyCard,
    shrinkage: Mapping[int, Shrinkage] | None = None,
) -> Path:
    """Write `policy.safetensors`, `config.json` and a model card, `README.md`.

    `LearnedScheduler.load(folder)` then chooses the depths that `model.predict` with
    `deterministic=True` does.

    Args:
        model: trained on a `SlotVecEnv`.
        folder: made if needed.
        card: what the policy was made for; must say `mask_depths`, as `SlotPolicy` masks.
        shrinkage: of the rule that a policy of offsets bends.

    Returns:
        The folder.

    Raises:
        ValueError: a model that cannot be exported, a card that does not fit it, or a place that
            cannot be written to.
    """
    if not card.mask_depths:
        raise ValueError("the card must say mask_depths=True: the policy was trained with masks.")
    weights = policy_weights(model, shrinkage)
    try:
        path = save_policy(folder, weights, card)
    except OSError as error:
        raise ValueError(f"cannot write the policy to {folder}: {error.strerror}.") from error
    write_atomically(path / CARD_FILE, render_card(weights, card, path))
    return path


def _array(tensor: torch.Tensor) -> Float32s:
    return np.array(tensor.detach().cpu().numpy(), np.float32)
