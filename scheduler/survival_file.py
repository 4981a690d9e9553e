"""Fitted survival models on disk: a folder with `survival.safetensors` and `config.json`.

As with exported policies (`policy_file.py`): both formats are data, never code, and nothing of a
file is trusted before it is checked.

Legend: I inputs, H hidden units, K deepest depth.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .features import FEATURES
from .model_folder import UNREADABLE, FolderFormat, some_names

WEIGHTS_FILE = "survival.safetensors"

SURVIVAL = FolderFormat(
    noun="survival model",
    remedy="fit it again",
    make="fit",
    made="fitted",
    name="specdepth-survival",
    version=1,
    weights_file=WEIGHTS_FILE,
    fields={
        "model_pair": str,
        "drafter": str,
        "max_num_speculative_tokens": int,
        "inputs": list,
        "hidden_units": int,
        "weights_sha256": str,
        "git_sha": str,
        "versions": dict,
        "training": dict,
    },
)

_MAX_WIDTH = 4096
_MAX_DEPTH = 1024
_UNITS = {feature.name: feature.unit for feature in FEATURES}

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalWeights:
    """Two layers from features to the logit of each position's conditional acceptance.

    logit h_j = out_j . tanh(W x + b) + out_bias_j; h_j is the chance that drafted token j is
    accepted if those before it were.

    Raises:
        ValueError: unknown or repeated inputs, sizes that do not fit together or are out of bounds,
            values that are not finite.
    """

    inputs: tuple[str, ...]
    """[I] names of columns of `feature_matrix`."""
    hidden_weight: Float32s
    """[H, I]"""
    hidden_bias: Float32s
    """[H]"""
    out_weight: Float32s
    """[K, H]"""
    out_bias: Float32s
    """[K]"""

    def __post_init__(self) -> None:
        unknown = [name for name in self.inputs if name not in _UNITS]
        if unknown:
            raise ValueError(f"survival inputs {some_names(unknown)} are no features.")
        if len(set(self.inputs)) != len(self.inputs):
            raise ValueError("survival inputs hold a name twice.")
        sizes = (len(self.inputs), self.hidden_bias.size, self.out_bias.size)
        if not all(1 <= size <= _MAX_WIDTH for size in sizes) or sizes[2] > _MAX_DEPTH:
            raise ValueError(
                f"a survival model has 1 to {_MAX_WIDTH} inputs and hidden units and 1 to "
                f"{_MAX_DEPTH} positions, got {sizes}."
            )
        shapes = {
            "hidden_weight": (sizes[1], sizes[0]),
            "hidden_bias": (sizes[1],),
            "out_weight": (sizes[2], sizes[1]),
            "out_bias": (sizes[2],),
        }
        for name, shape in shapes.items():
            array: Float32s = getattr(self, name)
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(
                    f"survival {name} is {array.dtype} {array.shape}, expected float32 {shape}."
                )
            if not np.isfinite(array).all():
                raise ValueError(f"survival {name} holds NaN or infinite values.")

    @property
    def max_num_speculative_tokens(self) -> int:
        """K."""
        return len(self.out_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalCard:
    """What a survival model was fitted for and how."""

    model_pair: str
    """Target and draft model."""
    drafter: str
    """A `DrafterKind`."""
    git_sha: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings and results, JSON values."""


def save_survival(
    folder: str | os.PathLike[str], weights: SurvivalWeights, card: SurvivalCard
) -> Path:
    """Write a model into `folder`, which is made if needed; other files in it are left alone.

    An interrupted save leaves the old model or one that `read_survival` refuses, never a mixture:
    the configuration comes last and carries the checksum of the weights.

    Returns:
        The folder.

    Raises:
        ValueError: a value that JSON cannot hold.
    """
    folder = Path(folder)
    config = {
        "model_pair": card.model_pair,
        "drafter": card.drafter,
        "max_num_speculative_tokens": weights.max_num_speculative_tokens,
        "inputs": [{"name": name, "unit": _UNITS[name]} for name in weights.inputs],
        "hidden_units": len(weights.hidden_bias),
        "git_sha": card.git_sha,
        "versions": dict(card.versions),
        "training": dict(card.training),
    }
    SURVIVAL.write(folder, {name: getattr(weights, name) for name in _TENSORS}, config)
    return folder


def read_survival(folder: str | os.PathLike[str]) -> tuple[SurvivalWeights, SurvivalCard]:
    """Read what `save_survival` wrote.

    Raises:
        ValueError: missing, damaged, oversized or foreign files, another format version, inputs that
            this version does not compute. One sentence that names the folder.
    """
    folder = Path(folder)
    try:
        config = SURVIVAL.read_config(folder)
        inputs = _checked_inputs(config["inputs"])
        tensors = SURVIVAL.read_tensors(folder, config["weights_sha256"])
        return _weights(config, inputs, tensors), _card(config)
    except UNREADABLE as error:
        raise SURVIVAL.refusal(folder, error) from error


_TENSORS = ("hidden_weight", "hidden_bias", "out_weight", "out_bias")


def _checked_inputs(listed: list[Any]) -> tuple[str, ...]:
    entries = [item if isinstance(item, dict) else {"name": item} for item in listed[:_MAX_WIDTH]]
    theirs = [(str(entry.get("name")), str(entry.get("unit"))) for entry in entries]
    unknown = [name for name, _ in theirs if name not in _UNITS]
    units = [name for name, unit in theirs if name in _UNITS and unit != _UNITS[name]]
    if unknown or units:
        detail = f"{some_names(unknown)} are not known"
        if not unknown:
            detail = f"{some_names(units)} have another unit"
        raise ValueError(f"it was fitted on other features: {detail}; fit it again.")
    return tuple(name for name, _ in theirs)


def _weights(
    config: dict[str, Any], inputs: tuple[str, ...], tensors: dict[str, NDArray[Any]]
) -> SurvivalWeights:
    if set(tensors) != set(_TENSORS):
        difference = sorted(set(tensors) ^ set(_TENSORS))
        raise ValueError(f"{WEIGHTS_FILE}: missing or unknown tensors {some_names(difference)}.")
    weights = SurvivalWeights(inputs=inputs, **tensors)
    sizes = (len(weights.hidden_bias), weights.max_num_speculative_tokens)
    told = (config["hidden_units"], config["max_num_speculative_tokens"])
    if sizes != told:
        raise ValueError(f"hidden units and positions are {sizes}, the configuration says {told}.")
    return weights


def _card(config: dict[str, Any]) -> SurvivalCard:
    return SurvivalCard(
        model_pair=config["model_pair"],
        drafter=config["drafter"],
        git_sha=config["git_sha"],
        versions=config["versions"],
        training=config["training"],
    )
