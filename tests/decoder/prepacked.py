"""Number formats that weights are prepacked in, as values of a test's parameter."""

from __future__ import annotations

import pytest
import torch

from specdepth.decoder.prepack import can_prepack

PREPACKED = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not can_prepack(dtype, torch.device("cpu")), reason="not prepacked on this CPU"
        ),
    )
    for dtype in (torch.bfloat16, torch.float32)
]
