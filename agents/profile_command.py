"""`specdepth profile`: what passes cost on this machine, and what speculation does to the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .console import Console, Interrupted
from .options import PromptOptions

if TYPE_CHECKING:
    from specdepth.decoder.cost_error import CostError
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.cost import CostModel

    from .comparison import Comparison

COST_FILE = "cost.json"
OVERHEAD_ROUNDS = 16
DECODE_SHARE = 0.4
"""Share of the time that goes into decoding, for FLOPs and bytes a token as they really are."""
CHECK_SECONDS, NOISE_SECONDS = 60.0, 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(PromptOptions):
    """Measure what passes of the models cost on this machine.

    Prints pass times by size with the knee (where time doubles), achieved arithmetic and bandwidth, and
    the work a token takes with and without speculation, measured on a few prompts. Writes cost.json,
    which other commands take as --cost, knee.svg and report.html. With --check it also says how far its
    predictions are off live rounds of mixed depths, loads and contexts.

    specdepth profile --minutes 2 --check --out runs/profile
    """

    minutes: float = 1.5
    """Time to spend; a slow model gets a shorter grid."""
    depth: int = 4
    """Fixed depth that is compared with none."""
    check: bool = False
    """Compare predicted with measured round times on held-out prompts; takes another 80 s."""


def run(options: Options, console: Console) -> None:
    """Measure and write.

    Raises:
        ValueError: bad options.
        Interrupted: after Ctrl-C; the pass times are kept if they were complete.
    """
    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.speed_probe import SpeedProbe

    from . import plots
    from .cost_check import (
        check_cost,
        check_noise,
        describe_error,
        error_grid,
        error_values,
    )
    from .evaluate import evaluate
    from .report import write_report
    from .results import Results, command_line, write_atomically
    from .session import (
        check_names,
        config_of,
        find_prompts,
        load_decoder,
        make_folder,
        make_policies,
        make_prompt_requests,
        new_folder,
    )
    from .verdicts import show_arithmetic

    if not 0 < options.minutes < float("inf"):
        raise ValueError(f"minutes must be above 0, got {options.minutes}.")
    names = ["off", f"fixed:{options.depth}"]
    check_names(names, options.top)
    folder = new_folder(options, "profile")
    prompts = find_prompts(options, "train")
    held_out = find_prompts(options, "held-out") if options.check else ()
    decoder = load_decoder(options, console)
    policies = make_policies(decoder, names)
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, seed=options.seed)
    requests = (
        make_prompt_requests(decoder, prompts, sampling) if decoder.tokenizer is not None else []
    )
    # Found before anything is measured, so that what cannot be checked fails at once.
    checked = make_prompt_requests(decoder, held_out, sampling) if options.check else []
    probe = SpeedProbe(decoder)
    with console.progress("Measuring passes") as update:
        seconds = 60 * options.minutes * (1 - DECODE_SHARE)
        cost = measure_cost(decoder, seconds, options.seed, update, probe)
        probe_s = probe.median_s
    cost.save(make_folder(folder) / COST_FILE)
    write_atomically(folder / "knee.svg", plots.knee_plot(cost))
    found: Comparison | None = None
    if requests:
        with console.progress("Decoding with and without speculation") as progress:
            minutes = options.minutes * DECODE_SHARE
            found = evaluate(decoder, policies, requests, [1], minutes=minutes, progress=progress)
    checks: tuple[CostError, CostError] | None = None
    if checked and not (found is not None and found.interrupted):
        token_lists = [request.prompt_token_ids for request in checked]
        with console.progress("Comparing predicted with live rounds") as update:
            error = check_cost(
                decoder,
                cost,
                token_lists,
                CHECK_SECONDS,
                options.seed,
                progress=update,
                probe=probe,
            ).at_speed(probe_s)
        with console.progress("Timing the same passes again and again") as update:
            noise = check_noise(decoder, NOISE_SECONDS, options.seed, probe, progress=update)
        checks = error, noise
    rows = found.rows() if found is not None else []
    results = Results.collect(command_line(), config_of(options), rows, device=cost.device)
    results.save(folder / "results.json")
    notes = [] if found is None else list(found.notes)
    notes += [] if checks is None else [describe_error(*checks)]
    report = write_report(folder, results, cost, title="What a pass costs", notes=notes)
    show_cost(console, cost)
    show_arithmetic(console, results, cost, names[1:])
    if checks is not None:
        console.table(error_grid(checks[0]))
        console.show(describe_error(*checks))
    console.say(f"Wrote {report} and {folder / COST_FILE}.")
    console.finish(
        {
            "cost": cost.to_dict(),
            "knee_tokens": cost.knee_tokens(),
            "free_tokens": cost.free_tokens(),
            "check": None if checks is None else error_values(*checks),
            "results": results.as_mapping(),
            "folder": str(folder),
        }
    )
    if found is not None and found.interrupted:
        raise Interrupted(f"interrupted; the pass times are in {folder / COST_FILE}.")


def measure_cost(
    decoder: SpeculativeDecoder,
    seconds: float,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
) -> CostModel:
    """Profile the decoder's passes and the rest of its rounds, and let its schedulers see the prices.

    On the CPU with one thread, passes are priced in CPU time, which is their wall time on a quiet
    machine and does not move much on a busy one.

    Args:
        decoder: idle.
        seconds: wall time to spend.
        seed: of the order of passes.
        progress: called with the share that is done.
        probe: tells the machine's speed; a `SpeedProbe` of the decoder by default.
    """
    from specdepth.decoder.loading import dtype_name
    from specdepth.decoder.profiler import profile
    from specdepth.decoder.speed_probe import SpeedProbe

    from .evaluate import timed_by_work

    target, runner = decoder.target, decoder.runner
    with timed_by_work(decoder):
        cost = profile(
            runner,
            name=decoder.model_pair,
            device=str(target.device),
            dtype=dtype_name(target.dtype),
            size=target.size,
            time_budget_s=seconds,
            seed=seed,
            progress=progress,
            probe=probe or SpeedProbe(decoder),
        )
        cost = replace(cost, overhead_s=_overhead_s(decoder))
    decoder.engine.cost = cost
    return cost


def show_cost(console: Console, cost: CostModel) -> None:
    """Print the pass times, the knee and what is free below it."""
    from .tables import draft_grid, pass_grid

    console.table(pass_grid(cost))
    drafts = draft_grid(cost)
    if drafts is not None:
        console.table(drafts)
    knee, last = cost.knee_tokens(), cost.tokens[-1]
    where = f"at {knee}" if knee <= last else f"beyond the {last} measured"
    free = cost.free_tokens()
    joined = f"{free} more token fits" if free == 1 else f"{free} more tokens fit"
    console.show(
        f"Knee: a pass takes twice the time of one token {where} packed tokens; {joined} into a "
        "one-token pass for at most 10 % more time."
    )


def _overhead_s(decoder: SpeculativeDecoder) -> float:
    """Seconds of a round outside its passes, from a few real rounds of a few sequences."""
    from specdepth.decoder.config import SamplingParams
    from specdepth.decoder.profiler import round_overhead_s
    from specdepth.decoder.serving import serve
    from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
    from specdepth.scheduler.baselines import FixedDepth

    load = min(4, decoder.config.max_num_seqs)
    request = WorkloadRequest(
        prompt_token_ids=(1, 2, 3, 4) * 2,
        sampling=SamplingParams(max_new_tokens=OVERHEAD_ROUNDS, ignore_eos=True),
    )
    workload = Workload(requests=(request,) * load, process=ClosedLoop.constant(load))
    metrics = serve(decoder.engine, workload, FixedDepth(0)).metrics
    return round_overhead_s(metrics.schedule_s, metrics.other_s, metrics.num_rounds)
