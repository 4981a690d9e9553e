"""Exported policies on disk: a folder with `policy.safetensors` (weights) and `config.json`.

Both formats are data, never code, and nothing of a file is trusted before it is checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .baselines.capped_greedy import Shrinkage
from .features import FEATURES
from .model_folder import CONFIG_FILE, UNREADABLE, FolderFormat, some_names

WEIGHTS_FILE = "policy.safetensors"

POLICY = FolderFormat(
    noun="policy",
    remedy="export it again",
    make="train",
    made="trained",
    name="specdepth-policy",
    version=1,
    weights_file=WEIGHTS_FILE,
    fields={
        "model_pair": str,
        "drafter": str,
        "max_num_speculative_tokens": int,
        "depths": list,
        "mask_depths": bool,
        "features": list,
        "layer_sizes": list,
        "activation": str,
        "weights_sha256": str,
        "env_id": str,
        "git_sha": str,
        "versions": dict,
        "training": dict,
    },
)

_MAX_LAYERS = 16
_MAX_WIDTH = 4096
_MAX_DEPTH = 1024

Activation = Literal["tanh", "relu"]
Action = Literal["depth", "offset", "batch"]
"""What the outputs of a policy say. "depth": a score for each depth, the best one wins. "offset": the logit
of each position's acceptance if those before it were accepted, bent as learning found it pays, for the
greedy rule with its shrinkage to choose by. "batch": scores as in "depth", but for one depth that all
sequences share, from what they have in common (`batch_row`). See `LearnedScheduler`."""
Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyWeights:
    """A multi-layer perceptron from features to one score an action.

    scores = W_n act(... act(W_1 clip((x - mean) * inv_std, -clip, clip) + b_1) ...) + b_n

    Raises:
        ValueError: sizes that do not fit together, sizes out of bounds, values that are not finite.
    """

    weights: tuple[Float32s, ...]
    """One float32 [outputs, inputs] a layer."""
    biases: tuple[Float32s, ...]
    """One float32 [outputs] a layer."""
    mean: Float32s
    """[F] subtracted from the features."""
    inv_std: Float32s
    """[F] that the difference is multiplied by."""
    clip: float = 10.0
    """Bound of the normalised features."""
    activation: Activation = "tanh"
    depths: tuple[int, ...]
    """Depth that each output stands for; 1..K for offsets."""
    action: Action = "depth"
    shrinkage: Mapping[int, Shrinkage] = field(default_factory=dict)
    """For offsets: shrinkage and price of the greedy rule, by number of running sequences."""
    stops: bool = False
    """For offsets: whether `PricedStops` decides after each draft pass, where there is a draft model."""

    def __post_init__(self) -> None:
        sizes = [self.mean.size, *(bias.size for bias in self.biases)]
        if not 1 <= len(self.weights) <= _MAX_LAYERS or len(self.weights) != len(self.biases):
            raise ValueError(f"a policy has 1 to {_MAX_LAYERS} layers with one bias each.")
        if not all(1 <= size <= _MAX_WIDTH for size in sizes):
            raise ValueError(f"policy layers are 1 to {_MAX_WIDTH} wide, got {sizes}.")
        shapes: dict[str, tuple[Float32s, tuple[int, ...]]] = {
            "mean": (self.mean, (sizes[0],)),
            "inv_std": (self.inv_std, (sizes[0],)),
        }
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            shapes[f"weight {i}"] = (weight, (sizes[i + 1], sizes[i]))
            shapes[f"bias {i}"] = (bias, (sizes[i + 1],))
        for name, (array, shape) in shapes.items():
            if array.shape != shape or array.dtype != np.float32:
                raise ValueError(
                    f"policy {name} is {array.dtype} {array.shape}, expected float32 {shape}."
                )
            if not np.isfinite(array).all():
                raise ValueError(f"policy {name} holds NaN or infinite values.")
        if not (np.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"policy clip must be a number above 0, got {self.clip}.")
        if self.activation not in ("tanh", "relu"):
            raise ValueError(f'policy activation is "tanh" or "relu", got {self.activation!r}.')
        if len(self.depths) != sizes[-1] or not all(0 <= d <= _MAX_DEPTH for d in self.depths):
            raise ValueError(
                f"policy depths must be {sizes[-1]} numbers in 0..{_MAX_DEPTH}, one an action, "
                f"got {self.depths}."
            )
        if self.action not in get_args(Action):
            raise ValueError(f"policy action is one of {get_args(Action)}, got {self.action!r}.")
        if self.action == "offset" and self.depths != tuple(range(1, len(self.depths) + 1)):
            raise ValueError(f"offsets are for depths 1..K in order, got {self.depths}.")
        if (self.action == "offset") != bool(self.shrinkage):
            raise ValueError("offsets, and they alone, need a shrinkage by number of sequences.")
        if type(self.stops) is not bool:
            raise ValueError(f'policy "stops" is true or false, got {self.stops!r}.')
        if self.stops and self.action != "offset":
            raise ValueError(f'stops are for offsets, this policy\'s action is "{self.action}".')

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Features, hidden widths, actions."""
        return (len(self.mean), *(len(bias) for bias in self.biases))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCard:
    """What a policy was made for and how."""

    model_pair: str
    """Target and draft model."""
    drafter: str
    """A `DrafterKind`."""
    max_num_speculative_tokens: int
    """K."""
    mask_depths: bool = False
    """Whether actions deeper than `RoundState.max_depths` are masked before the best is taken."""
    env_id: str = ""
    git_sha: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings and results, JSON values."""


def save_policy(folder: str | os.PathLike[str], weights: PolicyWeights, card: PolicyCard) -> Path:
    """Write a policy into `folder`, which is made if needed; other files in it are left alone.

    An interrupted save leaves the old policy or one that `read_policy` refuses, never a mixture:
    the configuration comes last and carries the checksum of the weights.

    Returns:
        The folder.

    Raises:
        ValueError: weights that do not fit the present features or K; a value JSON cannot hold.
    """
    folder = Path(folder)
    if len(weights.mean) != len(FEATURES):
        raise ValueError(f"policy for {len(weights.mean)} features, there are {len(FEATURES)}.")
    if max(weights.depths) > card.max_num_speculative_tokens:
        raise ValueError(
            f"policy with depth {max(weights.depths)}, deeper than max_num_speculative_tokens, "
            f"which is {card.max_num_speculative_tokens}."
        )
    tensors = {"mean": weights.mean, "inv_std": weights.inv_std}
    tensors["clip"] = np.array([weights.clip], np.float32)
    for i, (weight, bias) in enumerate(zip(weights.weights, weights.biases, strict=True)):
        tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"] = weight, bias
    config = {
        "model_pair": card.model_pair,
        "drafter": card.drafter,
        "max_num_speculative_tokens": card.max_num_speculative_tokens,
        "depths": list(weights.depths),
        "action": weights.action,
        "shrinkage": {str(load): asdict(one) for load, one in sorted(weights.shrinkage.items())},
        "stops": weights.stops,
        "mask_depths": card.mask_depths,
        "features": [{"name": f.name, "unit": f.unit} for f in FEATURES],
        "layer_sizes": list(weights.layer_sizes),
        "activation": weights.activation,
        "env_id": card.env_id,
        "git_sha": card.git_sha,
        "versions": dict(card.versions),
        "training": dict(card.training),
    }
    POLICY.write(folder, tensors, config)
    return folder


def read_policy(folder: str | os.PathLike[str]) -> tuple[PolicyWeights, PolicyCard]:
    """Read what `save_policy` wrote.

    Raises:
        ValueError: missing, damaged, oversized or foreign files, another format version, other
            features than this version computes. One sentence that names the folder.
    """
    folder = Path(folder)
    try:
        config = POLICY.read_config(folder)
        for name in ("depths", "layer_sizes"):
            if not all(type(value) is int for value in config[name]):
                raise ValueError(f'{CONFIG_FILE}: "{name}" must hold whole numbers.')
        _check_features(config["features"])
        tensors = POLICY.read_tensors(folder, config["weights_sha256"])
        return _weights(config, tensors), _card(config)
    except UNREADABLE as error:
        raise POLICY.refusal(folder, error) from error


def _check_features(listed: list[Any]) -> None:
    entries = [item if isinstance(item, dict) else {"name": item} for item in listed[:_MAX_WIDTH]]
    theirs = [(str(entry.get("name")), str(entry.get("unit"))) for entry in entries]
    ours = [(feature.name, feature.unit) for feature in FEATURES]
    if theirs == ours:
        return
    their_names, our_names = [name for name, _ in theirs], [name for name, _ in ours]
    unknown = [name for name in their_names if name not in our_names]
    missing = [name for name in our_names if name not in their_names]
    units = [a[0] for a, b in zip(theirs, ours, strict=False) if a[0] == b[0] and a[1] != b[1]]
    if unknown or missing:
        detail = f"it has {some_names(unknown)} that are not known, and lacks {some_names(missing)}"
    elif their_names != our_names:
        detail = "they come in another order"
    else:
        detail = f"{some_names(units)} have another unit"
    raise ValueError(f"it was trained on other features: {detail}; train or export it again.")


def _weights(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> PolicyWeights:
    sizes = config["layer_sizes"]
    if not 2 <= len(sizes) <= _MAX_LAYERS + 1 or sizes[0] != len(FEATURES):
        raise ValueError(f"layer sizes {sizes[:20]} fit no policy on {len(FEATURES)} features.")
    layers = range(len(sizes) - 1)
    expected = {"mean", "inv_std", "clip"}
    expected |= {f"layers.{i}.{part}" for i in layers for part in ("weight", "bias")}
    if set(tensors) != expected:
        difference = sorted(set(tensors) ^ expected)
        raise ValueError(f"{WEIGHTS_FILE}: missing or unknown tensors {some_names(difference)}.")
    if tensors["clip"].shape != (1,):
        raise ValueError(f"{WEIGHTS_FILE}: clip must be one number.")
    weights = PolicyWeights(
        weights=tuple(tensors[f"layers.{i}.weight"] for i in layers),
        biases=tuple(tensors[f"layers.{i}.bias"] for i in layers),
        mean=tensors["mean"],
        inv_std=tensors["inv_std"],
        clip=float(tensors["clip"][0]),
        activation=config["activation"],
        depths=tuple(config["depths"]),
        action=config.get("action", "depth"),
        shrinkage=_shrinkage(config.get("shrinkage", {})),
        stops=config.get("stops", False),
    )
    if weights.layer_sizes != tuple(sizes):
        raise ValueError(f"layers of {weights.layer_sizes}, the configuration says {sizes[:20]}.")
    top = config["max_num_speculative_tokens"]
    if not max(weights.depths) <= top <= _MAX_DEPTH:
        raise ValueError(f"depths {weights.depths} do not fit max_num_speculative_tokens {top}.")
    return weights


def _shrinkage(values: Any) -> dict[int, Shrinkage]:
    """By load; policies of earlier versions have none."""
    try:
        return {int(load): Shrinkage(**one) for load, one in values.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f'{CONFIG_FILE}: "shrinkage" is damaged: {error}.') from error


def _card(config: dict[str, Any]) -> PolicyCard:
    return PolicyCard(
        model_pair=config["model_pair"],
        drafter=config["drafter"],
        max_num_speculative_tokens=config["max_num_speculative_tokens"],
        mask_depths=config["mask_depths"],
        env_id=config["env_id"],
        git_sha=config["git_sha"],
        versions=config["versions"],
        training=config["training"],
    )
