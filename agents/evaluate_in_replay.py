"""`specdepth evaluate --mode replay`: rules tuned on a trace's training split, judged on the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .comparison import OFF, fixed_depths
from .console import Console
from .depth_limit import depths_to_try
from .session import config_of, with_fixed

if TYPE_CHECKING:
    from specdepth.decoder.config import EngineConfig
    from specdepth.decoder.engine_profile import EngineProfile
    from specdepth.decoder.trace import Trace
    from specdepth.scheduler.cost import CostModel
    from specdepth.scheduler.depth import DepthScheduler

    from .evaluate_command import Options
    from .replay_evaluate import Progress
    from .replay_workloads import ArrivalKind
    from .track_evaluation import EvaluationTracker

DEFAULT_COST = "cpu-smollm2-bf16"
BEST_SINGLE = "best-single-fixed"
"""The fixed depth that was best over the loads of the training split."""
TABLE = "tuned-table"
"""The batch-size table that the training split calls for."""
TRAINING_REQUESTS = 96
"""Training requests that rules are compared on at each load, or as many as the load."""
LOOPING = {"all": None, "without": False, "only": True}


@dataclass(slots=True)
class Tuned:
    """What the training split says."""

    policies: dict[str, DepthScheduler]
    """The policies asked for, and the tuned table."""
    best_single: str | None = None
    """Name of a fixed depth."""
    strongest: str | None = None
    """Name of the best policy that is neither fixed nor the table."""
    notes: list[str] = field(default_factory=list)


def run_in_replay(
    options: Options, console: Console, folder: Path, tracker: EvaluationTracker | None
) -> None:
    """Compare and write into `folder`.

    Raises:
        ValueError: bad options, unknown names, or a trace, cost model and policies that do not fit.
    """
    from specdepth.decoder.config import EngineConfig
    from specdepth.decoder.engine_profile import EngineProfile
    from specdepth.decoder.trace_files import load_trace
    from specdepth.scheduler.baselines import make_scheduler
    from specdepth.scheduler.cost_files import load_cost

    from .decision_log import acceptance_rows, record_decisions
    from .default_rules import default_rules
    from .evaluate_command import FETCHED
    from .replay_evaluate import ORACLE, evaluate_replay
    from .replay_workloads import check_arrivals
    from .report import write_report
    from .results import Results, command_line
    from .track_fetch import fetch_names
    from .verdicts import show_comparison, verdicts

    trace, cost = load_trace(options.trace), load_cost(options.cost or DEFAULT_COST)
    top = trace.info.depth_limit(options.max_num_speculative_tokens)
    config = EngineConfig(
        max_num_seqs=max(options.max_num_seqs, *options.loads, 1), max_num_speculative_tokens=top
    )
    profile = EngineProfile.named(options.engine)
    depths = options.fixed_depths or depths_to_try(top)
    asked = options.policies or default_rules(trace.info)
    names = fetch_names(with_fixed(asked, depths, top), folder / FETCHED)
    policies = {
        name: make_scheduler(
            local,
            model_pair=trace.info.model_pair,
            drafter=trace.info.drafter,
            max_num_speculative_tokens=top,
        )
        for name, local in names.items()
    }
    rows = trace.rows(options.split, looping=LOOPING[options.looping])
    arrivals = cast("Sequence[ArrivalKind]", options.arrivals)
    check_arrivals(options.loads, len(rows), arrivals)  # before the tuning, which takes long
    with console.progress("Tuning on the training split") as update:
        tuned = _tune(options, trace, cost, config, profile, policies, update)
    with console.progress("Comparing") as update:
        found = evaluate_replay(
            trace,
            cost,
            tuned.policies,
            options.loads,
            arrivals=arrivals,
            rows=rows,
            seed=options.seed,
            config=config,
            profile=profile,
            charge_decisions=options.charge_decisions,
            progress=update,
        )
    if tuned.best_single is not None:
        for one in found.runs.values():
            one.add_alias(BEST_SINGLE, tuned.best_single)
    focus = _focus(asked, tuned)
    with console.progress("Watching") as update:
        update(0.0, focus)
        watched = [focus, *(name for name in (TABLE,) if name in tuned.policies)]
        seen = record_decisions(
            trace,
            cost,
            {name: tuned.policies[name] for name in watched},
            options.loads,
            arrivals=arrivals,
            rows=rows,
            seed=options.seed,
            config=config,
            profile=profile,
        )
    notes = [*found.notes, *tuned.notes]
    for name in options.policies or (focus,):
        notes += verdicts(found, name, TABLE)
    numbers = found.rows(
        best_single=tuned.best_single,
        table=TABLE,
        oracle=ORACLE,
        tpot_limit_ms=options.tpot_limit_ms,
    )
    numbers += [*acceptance_rows(found, found.policies), *seen.rows]
    results = Results.collect(
        command_line(), config_of(options, cost_model=cost.name), numbers, series=seen.series
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


def _focus(asked: Sequence[str], tuned: Tuned) -> str:
    """What the report is about: a learned policy, else what training says is the strongest rule."""
    from specdepth.scheduler.guard import GuardedScheduler
    from specdepth.scheduler.learned import LearnedScheduler

    def is_learned(policy: DepthScheduler) -> bool:
        inner = policy.inner if isinstance(policy, GuardedScheduler) else policy
        return isinstance(inner, LearnedScheduler)

    learned = [name for name in asked if is_learned(tuned.policies[name])]
    return next(iter(learned), tuned.strongest or asked[0])


def _tune(
    options: Options,
    trace: Trace,
    cost: CostModel,
    config: EngineConfig,
    profile: EngineProfile,
    policies: Mapping[str, DepthScheduler],
    update: Progress,
) -> Tuned:
    """Find the best single depth, the best table and the strongest policy on the training split."""
    from specdepth.scheduler.baselines.tuned_table import tuned_table

    from .rule_tuning import TrainingReplay, best_single_depth, strongest, tune
    from .tuning import table_name

    rows = trace.rows("train", looping=LOOPING[options.looping])
    most = max(options.loads, default=0)
    if len(rows) < most:
        note = (
            f"The training split has {len(rows)} such requests, too few for load {most}: no table was "
            "tuned on it."
        )
        return Tuned(dict(policies), notes=[note])
    training = TrainingReplay(
        trace,
        cost,
        options.loads,
        rows=rows,
        num_requests=TRAINING_REQUESTS,
        config=config,
        profile=profile,
        seed=options.seed,
    )
    depths = fixed_depths(policies)
    sweep: dict[int, dict[int, float]] = {load: {} for load in options.loads}
    for done, (name, depth) in enumerate(depths.items()):
        update(done / len(policies), name)
        for load, figure in training.sweep([depth]).items():
            sweep[load] |= figure
    table = tuned_table(sweep)
    rules = {name: policy for name, policy in policies.items() if name not in depths}
    tuned = tune(training, {TABLE: [table]})
    for done, (name, rule) in enumerate(rules.items(), len(depths)):
        update(done / len(policies), name)
        tuned |= tune(training, {name: [rule]})
    best = best_single_depth(sweep)
    best_name = strongest(tuned)
    notes = [
        f"On the training split the best single depth is {best}, the best table {table_name(table)}, "
        f"and the strongest policy {best_name}; all were chosen there, not on these requests."
    ]
    tuned.pop(TABLE)
    return Tuned(
        {**policies, TABLE: table},
        best_single=f"fixed:{best}" if best else OFF,
        strongest=strongest(tuned) if tuned else None,
        notes=notes,
    )
