"""Kernels in bfloat16 for CPUs with AMX or AVX-512: which there are, and how they are called."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from . import native

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / f"bf16_{name}.c" for name in ("attention", "linear", "layer", "rows"))
_HEADERS = tuple(sorted(_FOLDER.glob("bf16_*.h")))
_ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Number of the system call on x86-64, and what asks Linux for the tile registers."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that the kernels can be compiled for."""

    name: str
    needed: tuple[str, ...]
    """Flags of the CPU, as Linux names them."""
    options: tuple[str, ...]
    """For the compiler."""
    limits: tuple[str, ...]
    """Beginnings of the values of oneDNN's limit that allow it."""


_AVX512 = ("avx512f", "avx512bw", "avx512vl")
_AVX512_OPTIONS = tuple(f"-m{flag}" for flag in _AVX512)
INSTRUCTION_SETS = (
    InstructionSet(
        "amx",
        (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
        (*_AVX512_OPTIONS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        ("ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX10_1_512_AMX"),
    ),
    InstructionSet(
        "avx512", _AVX512, _AVX512_OPTIONS, ("ALL", "DEFAULT", "AVX512_CORE", "AVX10_1_512")
    ),
)
"""The fastest first."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, with a line in the log that says why."""
    # oneDNN's own variable, with which one looks at a machine with less.
    limit = os.environ.get(_ISA_LIMIT, "ALL").upper()
    for instructions in INSTRUCTION_SETS:
        if limit.startswith(instructions.limits) and _has(instructions):
            kernels = compiled_with(instructions)
            if kernels is not None:
                return kernels
    return None


def compiled_with(
    instructions: InstructionSet, *, options: tuple[str, ...] = (), headers: tuple[Path, ...] = ()
) -> ctypes.CDLL | None:
    """The kernels for one instruction set.

    Args:
        instructions: which.
        options: more for the compiler.
        headers: that those options include.

    Returns:
        None where they cannot be compiled, with a warning.
    """
    kernels = native.compiled_for(
        (),
        _SOURCES,
        (*instructions.options, *options),
        headers=(*_HEADERS, *headers),
        without=f"bfloat16 runs without the kernels for {instructions.name}",
    )
    if kernels is None:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    kernels.specdepth_bf16_attention.argtypes = (address, number)
    kernels.specdepth_bf16_pack.argtypes = (address, number, number, address)
    kernels.specdepth_bf16_linear.argtypes = (
        *(address, number, address, address),
        *(number, number, number, address, number),
    )
    kernels.specdepth_bf16_layer.argtypes = (
        *(address, address, address, address, number, address, address),
        *(address, address, address, number),
    )
    kernels.specdepth_bf16_norm.argtypes = (
        *(address, number, address, ctypes.c_float),
        *(number, number, address, number, number),
    )
    for name in ("argmax", "signals"):
        getattr(kernels, f"specdepth_bf16_{name}").argtypes = (
            *(address, number, number, number),
            *(address, number),
        )
    for name in ("pack", "norm", "argmax", "signals"):
        getattr(kernels, f"specdepth_bf16_{name}").restype = None
    return kernels


def _has(instructions: InstructionSet) -> bool:
    """Whether this CPU has them, and the system lets this process use them."""
    if not native.cpu_flags().issuperset(instructions.needed):
        return False
    return instructions.name != "amx" or _tiles_are_granted()


def _tiles_are_granted() -> bool:
    refused = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if refused:
        logger.warning("bfloat16 runs without AMX: the system grants no tile registers.")
    return not refused
