"""Cost models by name or path: those that the package ships, and a user's own."""

from __future__ import annotations

import os
from pathlib import Path

from specdepth.checkpoints import shipped_names, shipped_path

from .cost import CostModel


def shipped_costs() -> tuple[str, ...]:
    """Names of the cost models that the package ships, sorted."""
    return shipped_names("costs", ".json")


def load_cost(name_or_path: str | os.PathLike[str]) -> CostModel:
    """Load a shipped cost model by its name, or a file: JSON, or step times as CSV.

    A word that is neither a shipped name nor an existing file, and does not look like a path, is taken
    as a misspelt name.

    Args:
        name_or_path: such as "cpu-smollm2-bf16", "runs/profile/cost.json" or "times.csv".

    Raises:
        ValueError: an unknown name (the sentence lists the known ones), or a file that cannot be used.
    """
    text = os.fspath(name_or_path)
    names = shipped_costs()
    if text in names:
        with shipped_path("costs", text, ".json") as path:
            return CostModel.load(path)
    path = Path(text)
    if path.suffix.lower() == ".csv":
        return CostModel.from_step_times(path)
    if path.suffix.lower() == ".json" or len(path.parts) > 1 or path.exists():
        return CostModel.load(path)
    raise ValueError(
        f"unknown cost model {text!r}; name a file (.json, or .csv with step times) or one of "
        f"{', '.join(names)}."
    )
