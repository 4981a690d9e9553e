"""Compiles C sources of this package at first use and keeps them in the user cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("gcc", "cc", "clang")
"""Tried in this order; the environment variable CC goes first."""

_BASE_FLAGS = ("-O3", "-fPIC", "-fopenmp", "-w")  # a stranger's compiler may warn of anything
_TIMEOUT_S = 120


def cpu_flags() -> frozenset[str]:
    """Instruction sets that Linux names for this CPU, as in /proc/cpuinfo; empty elsewhere."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def compiled(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the shared library of one C file, compiled unless the very same was before.

    Args:
        source: the file.
        flags: for the compiler, besides optimisation and OpenMP.

    Raises:
        OSError: no compiler, a cache folder that cannot be written, or a library that cannot be loaded.
        subprocess.SubprocessError: the compiler failed.
    """
    # Here and not above: the GPU check runs where this package is not installed.
    import platformdirs

    options = (*_BASE_FLAGS, *flags)
    digest = hashlib.sha256(source.read_bytes() + " ".join(options).encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("specdepth", appauthor=False) / "native"
    library = folder / f"{source.stem}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(source, options, library)
    return ctypes.CDLL(str(library))


def _compile(source: Path, options: Sequence[str], library: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({', '.join(COMPILERS)}); install gcc")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build.") as name:
        made, shared = Path(name) / "one.o", Path(name) / "one.so"
        # Linked without a runtime of OpenMP: torch has brought one, and two would each keep threads.
        for command in (
            [compiler, *options, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(shared)],
        ):
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if run.returncode:
                lines = run.stderr.strip().splitlines()
                raise subprocess.SubprocessError(
                    f"{compiler} could not compile {source.name} ({lines[0] if lines else 'no reason'})"
                )
        os.replace(shared, library)  # whoever compiles at the same time makes the same file
