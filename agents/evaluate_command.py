"""`specdepth evaluate`: policies against each other, live or in replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .console import Console, Interrupted
from .options import FIXED_DEPTHS, LOADS, IntList, NameList, PromptOptions
from .track_config import TrackConfig

if TYPE_CHECKING:
    from .track_evaluation import EvaluationTracker

DEFAULT_MINUTES = 5.0
DEFAULT_POLICY = "heuristic"
"""In live runs; in replay every rule is."""
PROFILE_SECONDS = 15.0
FETCHED = "policies"
"""Folder in the output's for policies that were fetched from Weights & Biases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(PromptOptions):
    """Compare policies on the same prompts, at several loads, interleaved.

    A load is a number of requests that are always in the decoder. Decoding without speculation and
    fixed depths are always part of it, since they are what a policy has to beat. Writes results.json
    and report.html.

    In replay, a recorded trace stands in for the models and a cost model for time: no model is
    loaded, differences are exact, and a table tuned on the training split and oracles join in.

    specdepth evaluate --policies heuristic,policy:runs/train/policy --loads 1,8 --minutes 10
    specdepth evaluate --mode replay --policies heuristic --loads 1,2,4,8,16,32
    """

    mode: Literal["live", "replay"] = "live"
    """Decode with the models, or replay a trace."""
    policies: NameList = ()
    """Names, with commas: heuristic, fixed:3, table:1-4=4,5-=0, policy:FOLDER,
    policy:wandb:ENTITY/PROJECT/NAME:ALIAS; by default heuristic, and in replay every rule."""
    loads: IntList = LOADS
    """Concurrent requests, with commas."""
    fixed_depths: IntList = ()
    """Fixed depths to compare with, with commas; by default 1,2,4,8, and in replay all."""
    minutes: float | None = None
    """Time to spend; 5 if neither this nor --requests is given."""
    requests: int | None = None
    """Requests of each load; with it, --minutes is a limit."""
    repeats: int = 1
    """Times that each request is served, if --minutes is not given."""
    split: Literal["held-out", "train"] = "held-out"
    """Half of the prompts; rules and policies are made on "train"."""
    temperature: float = 0.0
    """0 takes the most likely token; above 0, --verification coupled keeps the work equal."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    tpot_limit_ms: float | None = None
    """Also report goodput: tokens a second of requests that stayed within this time per token."""
    track: bool = False
    """Log to Weights & Biases."""
    wandb: TrackConfig = field(default_factory=TrackConfig)

    trace: str = "default"
    """Replay: a trace file, or the name of a shipped one. --cost takes names too."""
    arrivals: NameList = ("constant",)
    """Replay: constant, varying (a day of all loads), ramp, poisson, bursty; with commas."""
    looping: Literal["all", "without", "only"] = "all"
    """Replay: which requests, by whether their text repeats itself, which flatters prompt lookup."""
    engine: str = "specdepth"
    """Replay: "specdepth", or "vllm-like": a round of lag, padded drafts."""
    charge_decisions: bool = False
    """Replay: let the policy's own computing time pass on the virtual clock."""


def run(options: Options, console: Console) -> None:
    """Compare and write.

    Raises:
        ValueError: bad options, unknown policies, a trace or cost model that does not fit.
        Interrupted: after Ctrl-C of a live run; complete blocks are kept.
    """
    from .session import new_folder
    from .track_evaluation import tracked

    if options.mode == "replay":
        from .evaluate_in_replay import run_in_replay as compare
    else:
        compare = _run_live
    folder = new_folder(options, "evaluate")
    with tracked(options, folder, console) as tracker:
        compare(options, console, folder, tracker)


def _run_live(
    options: Options, console: Console, folder: Path, tracker: EvaluationTracker | None
) -> None:
    if options.arrivals != ("constant",) or options.looping != "all":
        raise ValueError(
            "live runs keep constant loads and serve all prompts; --arrivals and --looping need "
            "--mode replay."
        )
    from specdepth.decoder.config import SamplingParams

    from .decision_log import acceptance_rows
    from .evaluate import evaluate
    from .profile_command import measure_cost
    from .report import write_report
    from .results import Results, command_line
    from .session import (
        check_names,
        config_of,
        find_prompts,
        load_decoder,
        make_policy,
        make_prompt_requests,
        with_fixed,
    )
    from .track_fetch import fetch_names
    from .tuning import implied_table, table_name
    from .verdicts import show_comparison, verdicts

    top = options.top
    asked = options.policies or (DEFAULT_POLICY,)
    compared = with_fixed(asked, options.fixed_depths or FIXED_DEPTHS, top)
    names = fetch_names(compared, folder / FETCHED)
    check_names(list(names.values()), top)
    prompts = find_prompts(options, options.split)
    sampling = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    minutes = options.minutes
    if minutes is None and options.requests is None:
        minutes = DEFAULT_MINUTES
    decoder = load_decoder(options, console)
    policies = {name: make_policy(decoder, local) for name, local in names.items()}
    requests = make_prompt_requests(decoder, prompts, sampling)
    if options.cost is None:
        with console.progress("Measuring passes") as update:
            seconds = PROFILE_SECONDS if minutes is None else min(PROFILE_SECONDS, 6 * minutes)
            measure_cost(decoder, seconds, options.seed, update)
    with console.progress("Comparing") as update:
        found = evaluate(
            decoder,
            policies,
            requests,
            options.loads,
            num_requests=options.requests,
            repeats=options.repeats,
            minutes=minutes,
            progress=update,
        )
    notes = list(found.notes)
    focus = next((name for name in asked if name in found.policies), None)
    if found.loads:
        table = implied_table(found, decoder.engine.cost, decoder.config.max_num_seqs)
        notes.append(
            "The table that the fixed depths of these runs imply, in hindsight: "
            f"{table_name(table)}"
        )
        for name in asked:
            notes += verdicts(found, name)
    cost = decoder.engine.cost
    config = config_of(options, minutes_used=minutes)
    rows = found.rows(tpot_limit_ms=options.tpot_limit_ms)
    rows += acceptance_rows(found, found.policies)
    results = Results.collect(
        command_line(),
        config,
        rows,
        device=str(decoder.target.device),
    )
    results.save(folder / "results.json")
    report = write_report(folder, results, cost, focus=focus, notes=notes)
    show_comparison(console, found, results)
    for note in notes:
        console.show(note)
    console.say(f"Wrote {report} and {folder / 'results.json'}.")
    if tracker is not None:
        tracker.log(results, [folder / "results.json", report], focus, names)
    console.finish({"results": results.as_mapping(), "notes": notes, "folder": str(folder)})
    if found.interrupted:
        raise Interrupted(f"interrupted; complete blocks are in {folder}.")
