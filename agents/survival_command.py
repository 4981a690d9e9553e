"""`specdepth fit-survival`: a calibrated survival model from traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .console import Console
from .options import CommonOptions

if TYPE_CHECKING:
    from .survival_study import SurvivalStudy

DEFAULT_FOLDER = Path("survival")
"""Where the model goes without --out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(CommonOptions):
    """Fit a model of how likely drafted tokens are to survive verification.

    Learns on the training split of one or more traces, scores itself on the held-out split, and writes
    survival.safetensors, config.json and a card. Traces of one model pair, drafter and depth limit give
    one model; one without held-out requests is only learned from.

    specdepth fit-survival greedy.npz sampled.npz --cost runs/profile/cost.json --out survival/mine
    """

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
    """Files that "specdepth record" wrote, or names of shipped traces."""
    cost: Annotated[str, tyro.conf.arg(aliases=["--cost-from"])]
    """Pass times: a cost.json of "specdepth profile", or a shipped one by name; the rules that the model is
    tried under weigh them."""
    figure: Path | None = None
    """File for the reliability diagram, SVG."""
    hidden_units: int = 24
    """Width of the network."""
    num_steps: int = 2000
    """Gradient steps of each of its fits."""
    monotone: bool = True
    """Survival never falls as match length, agreement or past acceptance rise."""


def run(options: Options, console: Console) -> None:
    """Fit, score and write.

    Raises:
        ValueError: bad options, traces that cannot be read or do not go together, a place that cannot
            be written to.
    """
    from specdepth.decoder.trace_files import load_traces
    from specdepth.scheduler.cost_files import load_cost
    from specdepth.scheduler.survival_model import save_survival

    from .results import check_output_folder, check_writable, command_line, write_atomically
    from .session import set_up_torch
    from .survival_card import CARD_FILE, render_survival_card
    from .survival_fit import SurvivalFitConfig
    from .survival_study import study_survival

    out = options.out or DEFAULT_FOLDER
    check_output_folder(out)
    if options.figure is not None:
        check_writable(options.figure)
    config = SurvivalFitConfig(
        hidden_units=options.hidden_units,
        num_steps=options.num_steps,
        monotone=options.monotone,
        seed=options.seed,
    )
    cost, traces = load_cost(options.cost), load_traces(options.traces)
    set_up_torch(options.threads, options.seed)
    with console.progress("Fitting survival") as update:
        study = study_survival(traces, cost, config, command=command_line(), progress=update)
    save_survival(out, study.model.weights, study.model.card)
    write_atomically(out / CARD_FILE, render_survival_card(study, out))
    if options.figure is not None:
        write_atomically(options.figure, reliability_figure(study))
    _conclude(console, study, out)


def reliability_figure(study: SurvivalStudy) -> str:
    """Reliability of the model over all depths, a line a trace, as SVG."""
    from .calibration import reliability_plot
    from .survival_study import MODEL

    lines = {
        score.trace: score.scores[-1]
        for score in study.held_out
        if score.estimator == MODEL and score.looping
    }
    return reliability_plot(lines, "Predicted and observed survival on held-out requests")


def _conclude(console: Console, study: SurvivalStudy, folder: Path) -> None:
    from .survival_card import score_cells, score_header
    from .tables import Grid

    console.table(
        Grid(
            title="Cumulative survival on held-out requests",
            header=score_header(study.held_out[0]),
            rows=tuple(score_cells(score) for score in study.held_out),
        )
    )
    console.show(f"Survival model: {folder}")
    console.finish({"folder": str(folder), **study.model.card.training})
