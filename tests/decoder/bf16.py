"""Kernels in bfloat16 for tests: each instruction set for which this machine can run them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from specdepth.decoder import bf16_kernels
from specdepth.decoder.bf16_kernels import INSTRUCTION_SETS

_EMULATED_AMX = Path(__file__).parent / "emulated_amx.h"

on_each_kernel = pytest.mark.usefixtures("each_kernel")
"""Runs tests with the fixture of conftest.py."""

needs_kernels = pytest.mark.skipif(
    bf16_kernels.load() is None, reason="needs AVX-512, Linux and a C compiler"
)


@functools.cache
def kernels_for(name: str) -> ctypes.CDLL | None:
    """The kernels for "amx" or "avx512"; where there is no AMX, its sources with tiles in plain C."""
    amx, avx512 = INSTRUCTION_SETS
    if not bf16_kernels._has(avx512):
        return None
    if name == "avx512":
        return bf16_kernels.compiled_with(avx512)
    if bf16_kernels._has(amx):
        return bf16_kernels.compiled_with(amx)
    options = ("-include", str(_EMULATED_AMX))
    return bf16_kernels.compiled_with(amx, options=options, headers=(_EMULATED_AMX,))
