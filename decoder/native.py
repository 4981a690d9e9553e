"""Compiles C sources of this package at first use and keeps them in the user cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import torch  # noqa: F401  # brings the OpenMP runtime that libraries are loaded against

logger = logging.getLogger(__name__)

COMPILERS = ("gcc", "cc", "clang")
"""Tried in this order; the environment variable CC goes first."""

_BASE_FLAGS = ("-O3", "-fPIC", "-fopenmp", "-w")  # a stranger's compiler may warn of anything
_TIMEOUT_S = 120


def cpu_flags() -> frozenset[str]:
    """Instruction sets that Linux names for this CPU, as in /proc/cpuinfo; empty elsewhere."""
    if platform.system() != "Linux":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    names = ("flags", "Features")  # on x86-64 and on Arm
    return frozenset(next((line for line in lines if line.startswith(names)), "").split())


def compiled(
    sources: Sequence[Path], flags: Sequence[str] = (), *, headers: Sequence[Path] = ()
) -> ctypes.CDLL:
    """Load the shared library of some C files, compiled unless the very same were before.

    Args:
        sources: the files; the first gives its name.
        flags: for the compiler, besides optimisation and OpenMP.
        headers: what they include out of their folder.

    Raises:
        OSError: no compiler, a cache folder that cannot be written, or a library that cannot be loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    from .default_model import model_cache  # needs packages that the GPU check does without

    options = (*_BASE_FLAGS, *flags)
    content = b"\0".join([path.read_bytes() for path in (*sources, *headers)])
    digest = hashlib.sha256(content + " ".join(options).encode()).hexdigest()[:16]
    folder = model_cache() / "native"
    library = folder / f"{sources[0].stem}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(sources, options, library)
    return ctypes.CDLL(str(library))


def compiled_for(
    cpu: Collection[str],
    sources: Sequence[Path],
    flags: Sequence[str],
    *,
    headers: Sequence[Path] = (),
    without: str,
) -> ctypes.CDLL | None:
    """`compiled`, or None: on a CPU that lacks one of the instruction sets `cpu`, and where it fails; then a
    warning begins with `without`, what that means.
    """
    if not cpu_flags().issuperset(cpu):
        return None
    try:
        return compiled(sources, flags, headers=headers)
    except (OSError, subprocess.SubprocessError) as reason:
        logger.warning("%s: %s.", without, reason)
        return None


def _compile(sources: Sequence[Path], options: Sequence[str], library: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({', '.join(COMPILERS)}); install gcc")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build.") as name:
        objects = [Path(name) / f"{source.stem}.o" for source in sources]
        shared = Path(name) / "all.so"
        for source, made in zip(sources, objects, strict=True):
            _run([compiler, *options, "-c", str(source), "-o", str(made)], source.name)
        # Linked without a runtime of OpenMP: torch has brought one, and two would each keep threads.
        _run([compiler, "-shared", *map(str, objects), "-o", str(shared)], library.name)
        os.replace(shared, library)  # whoever compiles at the same time makes the same file


def _run(command: list[str], what: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        raise subprocess.SubprocessError(
            f"{command[0]} could not compile {what} ({lines[0] if lines else 'no reason'})"
        )
