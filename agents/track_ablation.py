"""What a grid of runs came to, as one Weights & Biases run beside those of its trainings."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .track_config import TrackConfig
from .track_run import finish_run, start_run

if TYPE_CHECKING:
    from .ablate_report import AblationReport

ABLATE = "ablate"
"""Kind of all runs of an ablation."""
NUMBERS = ("value", "baseline_value")
"""Columns of the tidy table that hold numbers; seeds and loads are kept as text, for some are names."""


def track_ablation(
    written: AblationReport, folder: Path, name: str, config: Mapping[str, Any], to: TrackConfig
) -> str | None:
    """Log the tables and figures of an ablation, and its files as an artifact.

    Args:
        written: what `write_ablation` wrote.
        folder: into which.
        name: of the grid.
        config: settings of the command.
        to: where the run goes; its group is left out, for it belongs to none of the variants.

    Returns:
        The command that sends an offline run later, to be shown to the user; None otherwise.

    Raises:
        ValueError: wandb cannot be imported, or cannot start.
    """
    from .ablate_report import CSV_FILE, GRID_FILE, IQM_FILE, LEARNING_FILE, RESULTS_FILE
    from .track_media import row_table

    run = start_run(
        replace(to, group=None), ABLATE, f"ablate__{name}__{folder.name}", config, folder
    )
    done = False
    try:
        import wandb

        with (folder / CSV_FILE).open(newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        cells = [
            [
                _number(cell) if name in NUMBERS else cell
                for name, cell in zip(header, line, strict=True)
            ]
            for line in lines
        ]
        shown: dict[str, Any] = {
            "ablation/rows": wandb.Table(columns=[*header], data=cells),
            "ablation/summary": row_table(written.results.rows),
        }
        for figure in (IQM_FILE, LEARNING_FILE):
            if (folder / figure).is_file():
                key = f"ablation/{figure.removesuffix('.svg')}"
                shown[key] = wandb.Html((folder / figure).read_text(encoding="utf-8"))
        run.log(shown)
        artifact = wandb.Artifact(f"ablation-{run.id}", type="evaluation", metadata={"grid": name})
        for path in (*(folder / n for n in (CSV_FILE, RESULTS_FILE, GRID_FILE)), written.page):
            artifact.add_file(str(path), name=path.name)
        run.log_artifact(artifact, aliases=["latest"])
        done = True
    finally:
        command = finish_run(run, failed=not done)
    return command


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
