"""K where models run and nobody said, and the fixed depths that stand for all up to K."""

from __future__ import annotations

EVERY_DEPTH = 16
STEP = 4
"""Apart, beyond `EVERY_DEPTH`: throughput changes slowly with a deep depth."""


def deepest_depth(draft: str, asked: int | None) -> int:
    """K of an engine: what was asked for, or what suits the drafter."""
    if asked is not None:
        return asked
    return 32 if draft == "prompt-lookup" else 8


def depths_to_try(top: int) -> tuple[int, ...]:
    """Fixed depths among which the best one is looked for: 1 to 16, every fourth one above, and `top`."""
    dense = range(1, min(top, EVERY_DEPTH) + 1)
    return (*dense, *range(EVERY_DEPTH + STEP, top, STEP), *((top,) if top > EVERY_DEPTH else ()))
