"""EAGLE-3 checkpoints: a folder with `config.json` and `model.safetensors`, as vLLM and SGLang read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from specdepth.checkpoints import shipped_names, shipped_path
from specdepth.scheduler.files import read_bounded, write_atomic

from .eagle_net import EagleConfig, EagleNet
from .loading import dtype_name

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MAX_CONFIG_BYTES, MAX_WEIGHTS_BYTES = 1 << 20, 1 << 33

_PLAIN_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """An EAGLE-3 draft model, not yet beside its target."""

    name: str
    net: EagleNet
    names: Tensor
    """[V'] the target's id of each draft token."""


def shipped_drafts() -> tuple[str, ...]:
    """Names of the draft models that come with specdepth."""
    return shipped_names("drafts")


def find_eagle(source: str | Path) -> LoadedEagle | None:
    """Load the shipped draft model of this name, or the EAGLE-3 checkpoint in this folder.

    Returns:
        None where `source` is neither.

    Raises:
        ValueError: files that are damaged or not supported.
    """
    if str(source) in shipped_drafts():
        with shipped_path("drafts", str(source)) as folder:
            return LoadedEagle(str(source), *load_eagle(folder))
    folder = Path(source)
    return LoadedEagle(folder.name, *load_eagle(folder)) if is_eagle(folder) else None


def is_eagle(folder: Path) -> bool:
    """Whether `folder` holds an EAGLE-3 checkpoint."""
    try:
        config = json.loads(read_bounded(folder / CONFIG_FILE, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and ARCHITECTURE in (config.get("architectures") or ())


def save_eagle(folder: Path, net: EagleNet, names: Tensor) -> None:
    """Write a checkpoint.

    Args:
        folder: is made.
        net: in the dtype to be stored.
        names: [V'] the target's id of each token of the draft vocabulary, increasing.
    """
    config = net.config
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[names] = True
    tensors = {name: value.contiguous() for name, value in net.state_dict().items()}
    # The format stores ids as differences to the place, and the reverse as flags.
    tensors |= {"d2t": names - torch.arange(len(names)), "t2d": known}
    document: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(net.fc.weight.dtype),
        **{name: getattr(config, name) for name in _PLAIN_FIELDS},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.state_layers),
            "use_aux_hidden_state": True,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / CONFIG_FILE, json.dumps(document, indent=2) + "\n")


def load_eagle(folder: Path) -> tuple[EagleNet, Tensor]:
    """Read a checkpoint.

    Returns:
        The network in the stored dtype, and the target's id of each draft token, [V'].

    Raises:
        ValueError: files that are missing, damaged, or of another architecture.
    """
    try:
        config = _config(json.loads(read_bounded(folder / CONFIG_FILE, MAX_CONFIG_BYTES)))
        tensors = load(read_bounded(folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES))
        places = torch.arange(config.draft_vocab_size)
        names = tensors.pop("d2t", torch.zeros_like(places)).long()
        tensors.pop("t2d", None)
        tensors.pop("embed_tokens.weight", None)  # some carry a copy of the target's
        if names.shape != places.shape:
            raise ValueError(f"d2t has {len(names)} entries for {len(places)} draft tokens")
        names = names + places
        if not bool(((names >= 0) & (names < config.vocab_size)).all()):
            raise ValueError("d2t names tokens that the target does not have")
        if int(torch.bincount(names).max()) > 1:
            raise ValueError("d2t names a token twice")
        with torch.device("meta"):
            net = EagleNet(config)
        net.load_state_dict(tensors, strict=True, assign=True)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"cannot use the EAGLE-3 draft model in {folder}: {reason.rstrip('.')}."
        ) from error
    return net, names


def _config(document: dict[str, Any]) -> EagleConfig:
    if ARCHITECTURE not in (document.get("architectures") or ()):
        raise ValueError(f"its architecture is not {ARCHITECTURE}")
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not supported")
    if document.get("num_hidden_layers", 1) != 1:
        raise ValueError("EAGLE-3 has one layer here, it has more")
    fields = {name: document[name] for name in _PLAIN_FIELDS if name in document}
    fields.setdefault("head_dim", document["hidden_size"] // document["num_attention_heads"])
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    layers = (document.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = layers or document.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        raise ValueError(
            "it does not say which layers of the target it reads (eagle_aux_hidden_state_layer_ids)"
        )
    return EagleConfig(state_layers=tuple(layers), **fields)
