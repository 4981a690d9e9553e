"""Kernels for Intel AMX: whether they are there, and how to call them."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from .native import compiled_for

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = tuple(_FOLDER / name for name in ("amx_attention.c", "amx_linear.c", "amx_layer.c"))
_HEADERS = (_FOLDER / "amx_common.h",)
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16")
_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Number of the system call on x86-64, and what asks Linux for the tile registers."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had, with a line in the log that says why."""
    # oneDNN's own variable, with which one looks at a machine without AMX.
    limit = os.environ.get(_ISA_LIMIT, "ALL").upper()
    if not any(isa in limit for isa in ("ALL", "DEFAULT", "AMX")):
        return None
    kernels = compiled_for(
        _NEEDED,
        _SOURCES,
        _FLAGS,
        headers=_HEADERS,
        without="bfloat16 runs without the AMX kernels, at half the speed",
    )
    if kernels is None:
        return None
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        logger.warning(
            "bfloat16 runs without the AMX kernels: the system grants no tile registers."
        )
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    kernels.specdepth_amx_attention.argtypes = (address, number)
    kernels.specdepth_amx_pack.argtypes = (address, number, number, address)
    kernels.specdepth_amx_linear.argtypes = (
        *(address, number, address, address),
        *(number, number, number, address, number),
    )
    kernels.specdepth_amx_norm.argtypes = (
        *(address, number, address, ctypes.c_float),
        *(number, number, address, number),
    )
    kernels.specdepth_amx_rotate.argtypes = (
        *(address, number, address, address, number, number),
        *(number, number, address, address, number, number),
    )
    kernels.specdepth_amx_gate.argtypes = (address, number, number, address, number)
    for name in ("pack", "norm", "rotate", "gate"):
        getattr(kernels, f"specdepth_amx_{name}").restype = None
    return kernels
