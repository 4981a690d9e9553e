"""K where models run and nobody said."""

from __future__ import annotations


def deepest_depth(draft: str, asked: int | None) -> int:
    """K of an engine: what was asked for, or what suits the drafter."""
    if asked is not None:
        return asked
    return 16 if draft == "prompt-lookup" else 8
