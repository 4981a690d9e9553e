"""A grid of training runs: planned and checked as a whole, done where it is not done yet, collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.trace_files import load_trace
from specdepth.decoder.trace_info import TraceInfo
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.cost_files import load_cost

from .ablate_evaluation import Evaluation
from .ablate_grid import Grid
from .ablate_jobs import execute_all
from .ablate_run import TRAIN_FOLDER, Done, ReferenceRun, Run, TrainingRun, read_done
from .default_rules import default_rules, fitting_rules
from .depth_limit import depths_to_try
from .replay_engines import content_sha256
from .replay_workloads import check_loads
from .session import with_fixed
from .track_ablation import ABLATE
from .train_config import DecoderConfig, ReplayConfig, TrainConfig, WarmStartConfig

RUNS_FOLDER = "runs"
REFERENCE_FOLDER = "references"

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationPlan:
    """All runs of a grid."""

    grid: Grid
    references: ReferenceRun
    runs: tuple[TrainingRun, ...]
    """Seed by seed, so that whatever is done first covers all variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What is known of a grid."""

    grid: Grid
    references: Done
    done: Mapping[tuple[str, int], Done]
    """By variant and seed; those that failed are not in it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What went wrong, by run."""


def plan_ablation(
    grid: Grid,
    folder: Path,
    trace: str,
    cost: Path,
    *,
    start: TrainConfig | None = None,
    references: Sequence[str] = (),
    seed: int = 0,
    device: str | None = None,
    track: bool = False,
) -> AblationPlan:
    """Say what there is to run, and refuse what cannot be.

    Args:
        grid: variants, seeds and bounds.
        folder: for all that is written.
        trace: file or shipped name; its training split is trained on, the held-out one judges.
        cost: file or shipped name of a cost model, the prices of both.
        start: settings that the grid starts from; by default those of `specdepth train`, with the warm
            start from a shipped tuned rule, if one fits the trace.
        references: schedulers to judge besides no speculation and every fixed depth; by default the
            shipped rules that fit the trace.
        seed: of the order of the held-out requests.
        device: of the models in runs on the live decoder; None keeps what `start` says.
        track: log the runs to Weights & Biases, a group for each variant.

    Raises:
        ValueError: settings that do not exist or do not fit, files that cannot be used, names of no
            scheduler, or too few requests.
    """
    recorded, prices = load_trace(trace), load_cost(cost)
    start = replace(
        start or _default_start(recorded.info),
        env="replay",
        prompts=None,
        track=track,
    )
    start = replace(
        start,
        decoder=replace(start.decoder, cost=cost, device=device or start.decoder.device),
        replay=replace(
            start.replay,
            trace=trace,
            trace_sha256=content_sha256(recorded),
            cost_sha256=content_sha256(prices),
        ),
    )
    base, configs = grid.base_config(start), grid.configs(start)
    top = recorded.info.depth_limit(base.decoder.max_num_speculative_tokens)
    evaluation = Evaluation(
        trace=trace,
        cost=cost,
        loads=grid.loads,
        num_requests=grid.num_requests,
        seed=seed,
        engine=_engine(base.decoder, base.replay, grid.loads, top),
    )
    check_loads(grid.loads, len(evaluation.requests(recorded)))
    judged_by = evaluation.settings(recorded, prices)
    names = _references(references, recorded.info, top)
    runs = []
    for one in grid.seeds:
        for variant in grid.all_variants:
            place = folder / RUNS_FOLDER / variant.name / f"seed-{one}"
            config = replace(
                configs[variant.name],
                seed=one,
                out=place / TRAIN_FOLDER,
                wandb=replace(configs[variant.name].wandb, group=variant.name, job_type=ABLATE),
            )
            runs.append(
                TrainingRun(
                    folder=place,
                    variant=variant.name,
                    config=config,
                    evaluation=evaluation,
                    settings={"config": _settings(config), "evaluation": judged_by},
                )
            )
    return AblationPlan(
        grid=grid,
        references=ReferenceRun(
            folder=folder / REFERENCE_FOLDER,
            names=names,
            evaluation=evaluation,
            settings={"names": list(names), "evaluation": judged_by},
        ),
        runs=tuple(runs),
    )


def ablate(
    plan: AblationPlan, jobs: int = 1, progress: Progress = lambda share, detail: None
) -> Ablation:
    """Do what is not done yet, and collect everything.

    Args:
        plan: of `plan_ablation`.
        jobs: processes at once.
        progress: told the share of runs that are done, and the last of them.

    Raises:
        ValueError: a run in the folder that is not of this plan, references that cannot be judged, or
            no run that was done.
        KeyboardInterrupt: Ctrl-C; what was done is kept.
    """
    everything: tuple[Run, ...] = (plan.references, *plan.runs)
    missing = [run for run in everything if read_done(run) is None]
    failures: dict[str, str] = {}
    num_done = len(everything) - len(missing)

    def finished(run: Run, error: str | None) -> None:
        nonlocal num_done
        num_done += 1
        if error is not None:
            if run is plan.references:  # without them nothing can be said of the others
                raise ValueError(f"the references failed: {error}")
            failures[run.title] = error
        progress(
            num_done / len(everything), run.title if error is None else f"{run.title}: {error}"
        )

    progress(num_done / len(everything), f"{len(missing)} of {len(everything)} runs to do")
    execute_all(missing, jobs, finished)
    references = read_done(plan.references)
    assert references is not None
    found = {(run.variant, run.config.seed): read_done(run) for run in plan.runs}
    done = {cell: one for cell, one in found.items() if one is not None}
    if not done:
        raise ValueError(f"all runs failed; the first: {next(iter(failures.values()))}")
    return Ablation(grid=plan.grid, references=references, done=done, failures=failures)


def _default_start(info: TraceInfo) -> TrainConfig:
    rules = fitting_rules(info)
    return TrainConfig(
        warm_start=WarmStartConfig(scheduler=rules[0]) if rules else WarmStartConfig(),
    )


def _engine(
    decoder: DecoderConfig, replay: ReplayConfig, loads: Sequence[int], top: int
) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=max(decoder.max_num_seqs, *loads),
        max_num_speculative_tokens=top,
        num_kv_blocks=replay.num_kv_blocks,
        lookahead=replay.lookahead,
    )


def _references(names: Sequence[str], info: TraceInfo, top: int) -> tuple[str, ...]:
    rules = names or [name for name in default_rules(info) if name.startswith("rule:")]
    for name in rules:
        make_scheduler(
            name,
            model_pair=info.model_pair,
            drafter=info.drafter,
            max_num_speculative_tokens=top,
        )
    return tuple(with_fixed(rules, depths_to_try(top), top))


def _settings(config: TrainConfig) -> dict[str, object]:
    """What training depends on, not where it is written and logged."""
    settings = config.to_dict()
    for name in ("out", "track", "wandb", "checkpoint_minutes"):
        del settings[name]
    # Files are told apart by content, which the digests beside them stand for.
    settings["decoder"] = settings["decoder"] | {"cost": None}
    settings["replay"] = settings["replay"] | {"trace": None}
    return settings
