"""What an ablation writes: the tidy table, results, figures and a page with all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .ablate import RUNS_FOLDER, Ablation
from .ablate_grid import grid_to_dict
from .ablate_plots import iqm_plot, learning_plot, read_curve
from .ablate_run import TRAIN_FOLDER
from .ablate_summary import (
    VariantSummary,
    load_grid,
    notes_of,
    result_rows,
    summarise,
    summary_grid,
)
from .ablate_table import as_csv, tidy_rows
from .results import Results, write_atomically
from .tables import Grid

CSV_FILE = "ablation.csv"
RESULTS_FILE = "results.json"
REPORT_FILE = "report.html"
GRID_FILE = "grid.json"
IQM_FILE, LEARNING_FILE = "iqm.svg", "learning.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationReport:
    """What was written."""

    results: Results
    summaries: tuple[VariantSummary, ...]
    notes: tuple[str, ...]
    page: Path


def write_ablation(ablation: Ablation, folder: Path, command: str, seed: int = 0) -> AblationReport:
    """Write `ablation.csv`, `results.json`, `grid.json`, `iqm.svg`, `learning.svg` and `report.html`.

    Args:
        ablation: of `ablate`.
        folder: that its runs are in; the learning curves are read from there.
        command: that led here.
        seed: of the resampling.

    Raises:
        ValueError: the folder cannot be written to.
    """
    rows = tidy_rows(ablation)
    summaries, notes = summarise(rows, seed), notes_of(ablation)
    grid = grid_to_dict(ablation.grid)
    results = Results.collect(command, {"grid": grid}, result_rows(summaries))
    figures = {IQM_FILE: iqm_plot(summaries)}
    learning = _learning(ablation, folder)
    if learning is not None:
        figures[LEARNING_FILE] = learning
    write_atomically(folder / CSV_FILE, as_csv(rows))
    results.save(folder / RESULTS_FILE)
    write_atomically(folder / GRID_FILE, json.dumps(grid, indent=1) + "\n")
    for name, svg in figures.items():
        write_atomically(folder / name, svg)
    page = folder / REPORT_FILE
    write_atomically(page, render(ablation, results, summaries, notes, figures[IQM_FILE], learning))
    return AblationReport(
        results=results, summaries=tuple(summaries), notes=tuple(notes), page=page
    )


def render(
    ablation: Ablation,
    results: Results,
    summaries: Sequence[VariantSummary],
    notes: Sequence[str],
    iqm: str,
    learning: str | None,
) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    template = resources.files("specdepth.agents").joinpath("templates/ablation.html.j2")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=f"What matters: grid {ablation.grid.name}",
        notes=notes,
        results=results,
        summary=summary_grid(summaries),
        loads=load_grid(summaries),
        changes=_changes(ablation),
        machine=_machine(results),
        iqm=iqm,
        learning=learning,
        drawing=Markup,  # our own; the text in them is escaped
    )


def _learning(ablation: Ablation, folder: Path) -> str | None:
    dimensions = {one.name: one.dimension for one in ablation.grid.all_variants}
    curves = {
        name: [
            read_curve(folder / RUNS_FOLDER / name / f"seed-{seed}" / TRAIN_FOLDER / "progress.csv")
            for variant, seed in ablation.done
            if variant == name
        ]
        for name in dimensions
    }
    return learning_plot(curves, dimensions)


def _changes(ablation: Ablation) -> Grid:
    grid = ablation.grid
    everywhere = {"timesteps": grid.timesteps, "minutes": grid.minutes, **grid.base}
    rows = [("all", "", _text(everywhere))]
    rows += [(one.name, one.dimension, _text(one.overrides)) for one in grid.variants]
    header = ("variant", "dimension", "what differs from the base")
    return Grid(title="Settings", header=header, rows=tuple(rows))


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in settings.items())


def _machine(results: Results) -> Grid:
    rows = [(name, str(value)) for name, value in {**results.device, **results.versions}.items()]
    return Grid(title="Machine and versions", header=("what", "value"), rows=tuple(rows))
