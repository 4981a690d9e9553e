"""`specdepth demo`: the whole job on a real model, from pass times to a report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console, Interrupted
from .options import FIXED_DEPTHS, LOADS, IntList, PromptOptions

if TYPE_CHECKING:
    from specdepth.decoder.prompts import Split
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.decoder.workload import WorkloadRequest
    from specdepth.scheduler.cost import CostModel

    from .callbacks import TrainProgress
    from .comparison import Comparison
    from .train import TrainResult

LEARNED, TABLE = "learned", "table"
PROFILE_SHARE, TABLE_SHARE, TRAIN_SHARE = 0.1, 0.1, 0.4
"""Of the time; the comparison gets the rest."""
COMPARE_SHARE = 0.35
"""Kept for the comparison when others take longer, at the cost of training."""
LEAST_S = 3.0
"""That any part gets."""
END_SHARE = 0.01
"""Kept for writing the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(PromptOptions):
    """Profile, train, export and compare on a real model.

    Measures what passes cost here; decodes training prompts at fixed depths, which gives a table of the
    best depth by load; trains a policy on the running decoder from there; exports it and loads it back;
    and decodes held-out prompts at several loads with no speculation, fixed depths, the table and the
    policy, interleaved. Prints the result, whatever it is, and writes report.html and results.json.

    specdepth demo --minutes 10 --out runs/demo
    """

    minutes: float = 10.0
    """Time for everything after the model is fetched; all parts scale with it."""
    loads: IntList = LOADS
    """Concurrent requests to compare at, with commas."""
    fixed_depths: IntList = FIXED_DEPTHS
    """Fixed depths to compare with, with commas."""
    max_num_seqs: int = 16
    """Sequences that run at once."""


@dataclass(slots=True)
class _Demo:
    """What is known so far."""

    options: Options
    console: Console
    folder: Path
    decoder: SpeculativeDecoder
    start_s: float
    cost: CostModel | None = None
    tuning: Comparison | None = None
    table: str | None = None
    best_single: str | None = None
    trained: TrainResult | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)
    compared: Comparison | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def budget_s(self) -> float:
        return 60 * self.options.minutes

    @property
    def left_s(self) -> float:
        return self.start_s + self.budget_s * (1 - END_SHARE) - time.monotonic()

    def minutes(self, share: float, kept: float = 0.0) -> float:
        """A share of the whole in minutes; less where otherwise the share `kept` would not be left."""
        left_s = self.left_s - kept * self.budget_s
        return max(min(share * self.budget_s, left_s), LEAST_S) / 60


def run(options: Options, console: Console) -> None:
    """Do it all.

    Raises:
        ValueError: bad options.
        OSError, ModelFetchError, MemoryError: no model.
        Interrupted: after Ctrl-C; what there is has been written.
    """
    from .session import load_decoder, make_folder, new_folder

    _check(options)
    folder = new_folder(options, "demo")
    from specdepth.decoder.default_model import default_model_path

    if options.target == "default":
        default_model_path(progress=console.say)
    start_s = time.monotonic()
    console.say(f"Loading {options.target} ...")
    decoder = load_decoder(options, console)
    demo = _Demo(options, console, make_folder(folder), decoder, start_s)
    try:
        for step in (_profile, _tune, _train, _compare):
            step(demo)
    except KeyboardInterrupt:
        demo.notes.insert(0, "Interrupted: this is what there was.")
        _conclude(demo)
        raise Interrupted(f"interrupted; what there was is in {folder}.") from None
    _conclude(demo)


def _check(options: Options) -> None:
    if not 0 < options.minutes < float("inf"):
        raise ValueError(f"minutes must be above 0, got {options.minutes}.")
    if not options.loads or not 1 <= min(options.loads) <= max(options.loads):
        raise ValueError(f"loads must be whole numbers of at least 1, got {options.loads}.")
    if max(options.loads) > options.max_num_seqs:
        raise ValueError(
            f"load {max(options.loads)} is above --max-num-seqs {options.max_num_seqs}; raise that."
        )


def _profile(demo: _Demo) -> None:
    """What passes cost, which tells policies the price of depth."""
    from .profile_command import COST_FILE, measure_cost, show_cost

    if demo.options.cost is not None:
        demo.cost = demo.decoder.engine.cost
    else:
        with demo.console.progress("1/4 Measuring passes") as update:
            seconds = 60 * demo.minutes(PROFILE_SHARE)
            demo.cost = measure_cost(demo.decoder, seconds, demo.options.seed, update)
    demo.cost.save(demo.folder / COST_FILE)
    show_cost(demo.console, demo.cost)


def _tune(demo: _Demo) -> None:
    """Fixed depths on training prompts: the best table and the best single depth, chosen there."""
    from .evaluate import evaluate
    from .session import make_policies
    from .tuning import best_single, implied_table, table_name

    options = demo.options
    policies = make_policies(demo.decoder, _fixed(options))
    with demo.console.progress("2/4 Fixed depths on training prompts") as update:
        demo.tuning = evaluate(
            demo.decoder,
            policies,
            _requests(demo, "train"),
            [max(options.loads)],  # acceptance is the same at any load, and comes fastest here
            minutes=demo.minutes(TABLE_SHARE),
            progress=update,
        )
    if demo.tuning.interrupted:
        raise KeyboardInterrupt
    assert demo.cost is not None
    table = implied_table(demo.tuning, demo.cost, options.max_num_seqs)
    demo.table = table_name(table)
    demo.best_single = best_single(demo.tuning, demo.cost, options.loads)
    demo.console.show(
        f"Best fixed depths on training prompts: {demo.table}; for all loads alike: "
        f"{demo.best_single}."
    )


def _train(demo: _Demo) -> None:
    """PPO on the running decoder, from an imitation of the table on."""
    from specdepth.envs.workload_config import WorkloadConfig

    from .profile_command import COST_FILE
    from .session import find_prompts, fitting_prompts
    from .train import train
    from .train_command import describe
    from .train_config import DecoderConfig, TrainConfig, WarmStartConfig

    options = demo.options
    assert demo.table is not None
    between = {2**power for power in range(10) if 2**power <= max(options.loads)}
    config = TrainConfig(
        out=demo.folder / "train",
        seed=options.seed,
        minutes=demo.minutes(TRAIN_SHARE, kept=COMPARE_SHARE),
        prompts=None if options.prompts == "default" else Path(options.prompts),
        decoder=DecoderConfig(
            target=options.target,
            draft=options.draft,
            max_num_speculative_tokens=options.max_num_speculative_tokens,
            max_num_seqs=options.max_num_seqs,
            dtype=options.dtype,
            device=options.device,
            verification=options.verification,
            cost=demo.folder / COST_FILE,
        ),
        workload=WorkloadConfig(
            arrivals="varying",
            concurrencies=tuple(sorted(between | set(options.loads))),
            max_new_tokens=options.max_new_tokens,
        ),
        warm_start=WarmStartConfig(scheduler=demo.table),
    )
    prompts = fitting_prompts(demo.decoder, find_prompts(options, "train"), options.max_new_tokens)
    with demo.console.progress("3/4 Training") as update:

        def report(at: TrainProgress) -> None:
            update(at.fraction, describe(at))
            reward = at.metrics.get("reward")
            if reward is not None and (not demo.curve or demo.curve[-1][0] < at.num_updates):
                demo.curve.append((at.num_updates, 1e3 * reward))

        demo.trained = train(config, demo.decoder, progress=report, prompts=prompts)
    demo.console.show(
        f"Trained for {demo.trained.elapsed_s:.0f} s: {demo.trained.num_updates} updates on "
        f"{demo.trained.num_decisions} decisions in {demo.trained.num_rounds} rounds."
    )
    if demo.trained.interrupted:
        raise KeyboardInterrupt


def _compare(demo: _Demo) -> None:
    """Everything on held-out prompts, with the policy as it was exported."""
    from .evaluate import evaluate
    from .session import make_policies, make_policy

    assert demo.trained is not None
    assert demo.table is not None
    policies = make_policies(demo.decoder, _fixed(demo.options))
    policies[TABLE] = make_policy(demo.decoder, demo.table)
    policies[LEARNED] = make_policy(demo.decoder, f"policy:{demo.trained.policy_folder}")
    with demo.console.progress("4/4 Comparing on held-out prompts") as update:
        demo.compared = evaluate(
            demo.decoder,
            policies,
            _requests(demo, "held-out"),
            demo.options.loads,
            minutes=demo.minutes(1.0),
            progress=update,
        )
    if demo.compared.interrupted:
        raise KeyboardInterrupt


def _conclude(demo: _Demo) -> None:
    """Print and write whatever there is."""
    from .report import write_report
    from .results import Results, Series, command_line
    from .session import config_of
    from .verdicts import claim, fastest, show_arithmetic, show_comparison, verdicts

    console, found = demo.console, demo.compared
    notes, series = demo.notes, dict[str, Series]()
    if demo.curve:
        updates, rewards = zip(*demo.curve, strict=True)
        labels = ("updates", "reward a decision (ms saved)")
        series["learning_curve"] = Series(
            x=updates, y=rewards, x_label=labels[0], y_label=labels[1]
        )
    rows = []
    if found is not None and found.loads:
        rows = found.rows(best_single=demo.best_single, table=TABLE)
        notes += found.notes
        notes.append(
            f"The table and the best single depth were chosen on training prompts: "
            f"{demo.table}, {demo.best_single}."
        )
    config = config_of(
        demo.options,
        out=demo.folder,
        table=demo.table,
        best_single_fixed=demo.best_single,
        seconds_used=round(time.monotonic() - demo.start_s, 1),
    )
    device = str(demo.decoder.target.device)
    results = Results.collect(command_line(), config, rows, device=device, series=series)
    lines: list[str] = []
    if found is not None and found.loads:
        show_comparison(console, found, results)
        lines = verdicts(found, LEARNED, TABLE)
        if demo.cost is not None:
            names = list(dict.fromkeys([LEARNED, fastest(found)]))
            show_arithmetic(console, results, demo.cost, names)
            lines += [text for name in names if (text := claim(found, demo.cost, name)) is not None]
    results.save(demo.folder / "results.json")
    report = write_report(
        demo.folder,
        results,
        demo.cost,
        title="How deep to draft: a demo",
        focus=LEARNED if rows else None,
        notes=[*lines, " ".join(notes)],
    )
    for line in [*lines, *notes]:
        console.show(line)
    if demo.trained is not None:
        console.show(f"Policy: {demo.trained.policy_folder}")
    console.show(f"Report: {report}")
    console.finish(
        {
            "results": results.as_mapping(),
            "cost": None if demo.cost is None else demo.cost.to_dict(),
            "table": demo.table,
            "best_single_fixed": demo.best_single,
            "policy": None if demo.trained is None else str(demo.trained.policy_folder),
            "verdicts": lines,
            "notes": notes,
            "folder": str(demo.folder),
        }
    )


def _fixed(options: Options) -> list[str]:
    from .session import with_fixed

    return with_fixed((), options.fixed_depths, options.max_num_speculative_tokens)


def _requests(demo: _Demo, split: Split) -> list[WorkloadRequest]:
    from specdepth.decoder.config import SamplingParams

    from .session import find_prompts, make_prompt_requests

    options = demo.options
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, seed=options.seed)
    return make_prompt_requests(demo.decoder, find_prompts(options, split), sampling)
