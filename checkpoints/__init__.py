"""Shipped policies, rules, survival models, draft models, traces and cost models, by name; each kind has a
folder with a card.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path


def shipped_names(kind: str, suffix: str = "") -> tuple[str, ...]:
    """Names of what the package ships of a kind, sorted.

    Args:
        kind: folder, such as "traces".
        suffix: of files; empty where each is a folder.
    """
    folder = files(__name__) / kind
    if not folder.is_dir():
        return ()
    if not suffix:
        return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(suffix))
    return tuple(sorted(name.removesuffix(suffix) for name in names))


def shipped_path(kind: str, name: str, suffix: str = "") -> AbstractContextManager[Path]:
    """Path of one of them, while the context lasts: a zipped package is unpacked for it.

    Args:
        kind: folder.
        name: one of `shipped_names(kind, suffix)`.
        suffix: of the file.
    """
    return as_file(files(__name__) / kind / f"{name}{suffix}")
