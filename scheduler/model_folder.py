"""A small network on disk: a folder with weights (safetensors) and `config.json`.

What exported policies and fitted survival models share. Both formats are data, never code, and nothing
of a file is trusted before it is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from .files import read_bounded, write_atomic

CONFIG_FILE = "config.json"
ANY = "any"
"""Model pair or drafter of what was made for all of them."""

_MAX_CONFIG_BYTES = 1 << 20
_MAX_WEIGHTS_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    """One kind of such folders."""

    noun: str
    """What it holds, for sentences."""
    remedy: str
    """What to do about a damaged one, as in "export it again"."""
    make: str
    """How it comes about: "train"."""
    made: str
    """And came about: "trained"."""
    name: str
    """The configuration's "format"."""
    version: int
    weights_file: str
    fields: Mapping[str, type]
    """Fields of the configuration, with their JSON types."""

    def write(
        self, folder: Path, tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any]
    ) -> None:
        """Write `tensors` and `config`, to which format and checksum are added.

        An interrupted save leaves the old files or such as `read` refuses, never a mixture: the
        configuration comes last and carries the checksum of the weights.

        Raises:
            ValueError: a value that JSON cannot hold.
        """
        # safetensors writes the buffer as it lies in memory, whatever the strides
        data = save_tensors({name: np.ascontiguousarray(array) for name, array in tensors.items()})
        document = {"format": self.name, "format_version": self.version, **config}
        document["weights_sha256"] = hashlib.sha256(data).hexdigest()
        try:
            text = json.dumps(document, indent=1, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"{self.noun} card: {error}.") from error
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / self.weights_file, data)
        write_atomic(folder / CONFIG_FILE, (text + "\n").encode())

    def read_config(self, folder: Path) -> dict[str, Any]:
        """The configuration, its format and the types of its fields checked.

        Raises:
            OSError: it cannot be read.
            ValueError: oversized, damaged or foreign.
        """
        try:
            config = json.loads(read_bounded(folder / CONFIG_FILE, _MAX_CONFIG_BYTES).decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{CONFIG_FILE} is damaged: {error}.") from error
        if not isinstance(config, dict) or config.get("format") != self.name:
            raise ValueError(f'{CONFIG_FILE} is of no {self.noun}: "format" must be "{self.name}".')
        version = config.get("format_version")
        if version != self.version or isinstance(version, bool):
            raise ValueError(
                f"format version {version!r}, this specdepth reads {self.version}; {self.remedy}, "
                "or install the version that wrote it."
            )
        for name, kind in self.fields.items():
            value = config.get(name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise ValueError(f'{CONFIG_FILE}: "{name}" is missing or of the wrong type.')
        return config

    def read_tensors(self, folder: Path, sha256: str) -> dict[str, NDArray[Any]]:
        """The weights, checked against their checksum.

        Raises:
            OSError: they cannot be read.
            ValueError: oversized or damaged.
            SafetensorError: no such file.
        """
        data = read_bounded(folder / self.weights_file, _MAX_WEIGHTS_BYTES)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(
                f"{self.weights_file} is damaged: its checksum differs; {self.remedy}."
            )
        return load_tensors(data)

    def refusal(self, folder: Path, error: Exception) -> ValueError:
        """What went wrong with reading `folder`, in a sentence that names it."""
        if isinstance(error, OSError):
            name = Path(error.filename).name if error.filename else "a file"
            return ValueError(f"no {self.noun} in {folder}: {name}: {error.strerror}.")
        if isinstance(error, SafetensorError):
            return ValueError(f"cannot use {self.noun} {folder}: {self.weights_file}: {error}.")
        return ValueError(f"cannot use {self.noun} {folder}: {error}")

    def check_fits(self, folder: Path, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Refuse what was made for something else; a wanted value of None takes any, and `ANY` fits all.

        Raises:
            ValueError: a value differs.
        """
        for name, value in wanted.items():
            if value is not None and found[name] not in (value, ANY):
                raise ValueError(
                    f"{self.noun} {folder} was {self.made} for {name} {found[name]}, not {value}; "
                    f"{self.make} one for it, or use this where it belongs."
                )


UNREADABLE = (OSError, SafetensorError, ValueError, RecursionError)
"""What reading a folder may raise before `FolderFormat.refusal` makes a sentence of it."""


def some_names(names: Sequence[str]) -> str:
    """The first names of a list, for a sentence."""
    shown = ", ".join(name[:40] for name in names[:8]) or "none"
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
