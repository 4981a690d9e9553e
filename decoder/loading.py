"""Models by name: hub, local folder, or the default model of this package."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from typing_extensions import TypeIs

from . import bf16_kernels
from .default_model import default_model_path
from .native import cpu_flags
from .prepack import prepacked_dtype
from .tokenizers import end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_NAME = "default"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM with what belongs to it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: tuple[int, ...]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return a device that exists; None takes a GPU if there is one.

    Raises:
        ValueError: CUDA asked for and absent, or no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", got {device!r}.') from None
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", got {device!r}.')
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise ValueError(
                f"device={str(device)!r} was asked for, but torch {torch.__version__} sees {count} "
                'CUDA devices; use device="cpu" or install a CUDA build of torch.'
            )
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return a floating dtype by name or as it is; for "auto" the one that `device` is fastest with.

    That is bfloat16 where there are instructions for it or kernels of our own (`bf16_kernels`: half the time
    of float32 for few tokens, 0.85 of it for 72), else float16 on a GPU and float32 on a CPU: emulated
    bfloat16 takes 1.3 (one token) to 2.8 times (40) as long as float32.

    Raises:
        ValueError: not "auto" and not one of float64, float32, float16, bfloat16.
    """
    if dtype == "auto":
        if device.type == "cuda":
            return (
                torch.bfloat16
                if torch.cuda.is_bf16_supported(including_emulation=False)
                else torch.float16
            )
        fast = has_bf16(cpu_flags()) or bf16_kernels.load() is not None
        return torch.bfloat16 if fast else torch.float32
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if kind not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f'dtype must be "auto", float64, float32, float16 or bfloat16, got {dtype!r}.'
        )
    assert isinstance(kind, torch.dtype)
    return kind


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `resolve_dtype` takes."""
    return str(dtype).removeprefix("torch.")


def has_bf16(flags: Collection[str]) -> bool:
    """Whether a CPU with these flags of Linux has instructions for bfloat16: x86-64 or 64-bit Arm."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def load_model(
    source: str | Path | PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        source: "default", a folder, a hub name, or a loaded model (moved and converted in place).
        dtype: floating dtype.
        device: where it goes.
        tokenizer: used instead of the source's own.

    Raises:
        OSError: it cannot be found, or is damaged.
        ValueError: a loaded model that another decoder has in another format.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if is_model(source):
        model, name = source, type(source).__name__
        packed = prepacked_dtype(model)
        if packed is not None and (packed, "cpu") != (dtype, device.type):
            raise ValueError(
                f"This loaded model was prepacked for another decoder, in {dtype_name(packed)} on the CPU; "
                f"load it again to have it in {dtype_name(dtype)} on {device}."
            )
    else:
        name = str(source)
        path = str(default_model_path()) if name == DEFAULT_NAME else name
        if name == DEFAULT_NAME:
            name = "SmolLM2-135M-Instruct"
        elif Path(path).is_dir():
            name = Path(path).name
        if Path(path).is_dir() and not (Path(path) / "config.json").exists():
            raise OSError(f"The folder {path} was taken for a model, and has no config.json.")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except SafetensorError as error:
            raise OSError(f"The model {name!r} is damaged ({error}); fetch it again.") from error
        except OSError as error:
            raise OSError(
                f"The model {name!r} was not found, neither as a folder nor on the hub "
                f"({str(error).splitlines()[0]})"
            ) from error
        if tokenizer is None and _has_tokenizer(path):
            tokenizer = AutoTokenizer.from_pretrained(path)
    torch.nn.Module.to(model, device).train(False)
    for parameter in model.parameters():
        # Not `model.to(dtype)`: that would round the rotary frequencies, which stay float32.
        parameter.data = parameter.data.to(dtype)
    ends = end_token_ids(model.generation_config, model.config, tokenizer)
    return LoadedModel(name, model, tokenizer, ends)


def is_model(source: object) -> TypeIs[PreTrainedModel]:
    """Whether `source` is a loaded transformers model."""
    from transformers import PreTrainedModel

    return isinstance(source, PreTrainedModel)


def _has_tokenizer(path: str) -> bool:
    """Whether a folder holds a tokenizer; hub names are taken to have one."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES)
