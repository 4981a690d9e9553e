"""Fixtures of the decoder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdepth.decoder import bf16_kernels
from specdepth.decoder.bf16_kernels import INSTRUCTION_SETS
from tests.decoder.bf16 import kernels_for


@pytest.fixture(scope="module", params=[instructions.name for instructions in INSTRUCTION_SETS])
def each_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a module's tests on the kernels for one instruction set after the other."""
    kernels = kernels_for(request.param)
    if kernels is None:
        pytest.skip("needs AVX-512, Linux and a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16_kernels, "load", lambda: kernels)
        yield request.param
