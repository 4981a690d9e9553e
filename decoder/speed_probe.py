"""How fast the machine is right now: a fixed piece of work of the kind that passes do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .speculative_decoder import SpeculativeDecoder

PROBE_ROWS = 16


class SpeedProbe:
    """Times a decoder's output head over 16 rows, on the engine's clock; some milliseconds.

    On a shared machine the same pass takes up to twice as long a minute later. What two passes took can
    be compared if each is divided by the probe beside it.

    Args:
        decoder: whose target and clock are used; its state is not touched.
    """

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self._engine = decoder.engine
        target = decoder.target
        self._head = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        width = target.model.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(PROBE_ROWS, width, generator=generator)
        self._rows = rows.to(target.device, target.dtype)
        self._seconds: list[float] = []

    @property
    def median_s(self) -> float:
        """Median of all that it measured so far; NaN before the first."""
        return float(np.median(self._seconds)) if self._seconds else math.nan

    @torch.inference_mode()
    def __call__(self) -> float:
        """Seconds that it takes now."""
        clock, device = self._engine.clock, self._rows.device
        before = clock.now()
        self._head(self._rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._seconds.append(clock.now() - before)
        return self._seconds[-1]
