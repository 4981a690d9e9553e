"""`specdepth ablate`: what matters in training, as a grid of runs over seeds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console, Interrupted
from .options import IntList, NameList

if TYPE_CHECKING:
    from .ablate import AblationPlan
    from .ablate_grid import Grid
    from .ablate_report import AblationReport

DEFAULT_FOLDER = Path("runs/ablate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Train variants that differ in one thing each on several seeds, and say what made a difference.

    Every run goes through the same code as "specdepth train --env replay", with the same number of
    time steps, and its policy is judged on held-out requests at constant loads and over a varying day.
    The same command goes on where it was interrupted, and does only what is missing: more seeds, or
    more variants in a grid of your own, add runs to those that are there.

    Writes ablation.csv (a line for each variant, seed, load and metric), results.json, report.html
    and its figures into --out.

    specdepth ablate --grid quick --out runs/try

    specdepth ablate --grid full --jobs 2 --out runs/ablate

    specdepth ablate --grid mine.json --base runs/best --trace my.npz --cost cost.json
    """

    grid: str = "full"
    """"full" (what each part of the recipe is worth), "search", "live", "quick" (seconds, to see that it
    works), or a JSON file; the grid.json in --out is one to start from."""
    seeds: IntList = ()
    """Training seeds, with commas; by default the grid's own."""
    timesteps: int | None = None
    """Time steps of each run, as in "specdepth train"; by default the grid's own."""
    minutes: float | None = None
    """Wall limit of each training; the report names runs that it ended. By default the grid's own."""
    loads: IntList = ()
    """Concurrent requests that policies are judged at, with commas; by default the grid's own."""
    jobs: int = 1
    """Runs at once, each in a process with one thread."""
    trace: str = "default"
    """Trace file, or the name of a shipped one."""
    cost: str = "cpu-smollm2-bf16"
    """Cost model that "specdepth profile" wrote, or the name of a shipped one."""
    base: Path | None = None
    """Start from the settings of this training run, a folder with config.json; what the grid sets for
    all runs comes on top."""
    references: NameList = ()
    """Rules to judge beside the variants, with commas, by the names of "specdepth evaluate"; by default the
    shipped ones that fit. No speculation and every fixed depth always are."""
    track: bool = False
    """Log the runs to Weights & Biases, a group for each variant."""
    seed: int = 0
    """Of the order of the held-out requests, and of the resampling behind the intervals."""
    device: str | None = None
    """Of the models in runs on the live decoder: "cpu", "cuda" or "cuda:1"; by default a GPU if there is
    one."""
    out: Path = DEFAULT_FOLDER
    """Folder for runs, tables, figures and report."""
    json: bool = False
    """Print the result as one JSON document on stdout, and everything else on stderr."""
    quiet: bool = False
    """No progress, results only."""
    debug: bool = False
    """Show where an error came from."""


def run(options: Options, console: Console) -> None:
    """Train what is missing, and write tables, figures and report.

    Raises:
        ValueError: bad options, a folder with other runs, runs that failed (what was done is written).
        Interrupted: after Ctrl-C; runs that were done are kept.
    """
    from .ablate import ablate, plan_ablation
    from .ablate_report import write_ablation
    from .results import check_output_folder, command_line
    from .train_config import TrainConfig

    folder = options.out
    check_output_folder(folder, "results.json")
    plan = plan_ablation(
        chosen_grid(options),
        folder,
        options.trace,
        Path(options.cost),
        start=None if options.base is None else TrainConfig.load(options.base),
        references=options.references,
        seed=options.seed,
        device=options.device,
        track=options.track,
    )
    try:
        with console.progress("Training") as update:
            found = ablate(plan, options.jobs, update)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {count_done(plan)} of {len(plan.runs)} runs are done in {folder}, and the same "
            "command goes on."
        ) from None
    written = write_ablation(found, folder, command_line(), options.seed)
    _conclude(console, written, folder)
    if options.track:
        from .track_ablation import track_ablation

        to = plan.runs[0].config.wandb
        sync = track_ablation(written, folder, plan.grid.name, asdict(options), to)
        if sync is not None:
            console.show(f"To send the offline W&B run: {sync}")
    if found.failures:
        title, sentence = next(iter(found.failures.items()))
        raise ValueError(
            f"{len(found.failures)} runs failed, the first {title}: {sentence} The same command tries them "
            "again."
        )


def chosen_grid(options: Options) -> Grid:
    """The grid of the options, with what they change in it.

    Raises:
        ValueError: no such grid, or numbers out of range.
    """
    from .ablate_grids import find_grid

    changes: dict[str, Any] = {
        "seeds": options.seeds or None,
        "timesteps": options.timesteps,
        "minutes": options.minutes,
        "loads": options.loads or None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(find_grid(options.grid), **given)


def count_done(plan: AblationPlan) -> int:
    """Training runs of the plan that are done."""
    from .ablate_run import read_done

    return sum(read_done(run) is not None for run in plan.runs)


def _conclude(console: Console, written: AblationReport, folder: Path) -> None:
    from .ablate_summary import load_grid, summary_grid

    console.table(summary_grid(written.summaries))
    console.table(load_grid(written.summaries))
    for note in written.notes:
        console.show(note)
    console.say(f"Wrote {written.page}, ablation.csv and results.json in {folder}.")
    console.finish(
        {
            "results": written.results.as_mapping(),
            "notes": list(written.notes),
            "folder": str(folder),
        }
    )
