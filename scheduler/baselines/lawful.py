"""The rules that a scheduler is lossless under if it looks at earlier rounds only."""

from __future__ import annotations

from typing import Final

EVERY_RULE: Final = frozenset({"greedy", "coupled", "prompt-lookup", "rejection"})
