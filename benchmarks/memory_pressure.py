"""What a policy gains by seeing memory pressure, in replay, by the size of the KV pool.

The same policy of offsets with sight of free KV and without (it is shown a pool with room for all), and
the blind one in an engine that cuts depths to free blocks (lookahead "clip"), on held-out requests in
several orders. A pool is named by its share of what the load's requests fill at their full length. A
policy that does not look at memory yet gets a unit that does, searched on the training split in pools of
0.3 and 0.5.

Keys: `pools`, by workload and share ("1" holds all requests): `num_kv_blocks`, `ratio` (throughput with
sight over that without) with `interval`, `clip_ratio` (lookahead "clip" over "reserve", both blind) with
`clip_interval`, `off_ratio` (no speculation over the blind policy), and by side `preemptions` a request,
`tpot_p99_ms`, `mean_depth` and `throughput_tok_s`; `searched`, whether sight was searched here;
`sees_memory`, whether the policy has it, False if the search found nothing to gain; `spans`, deepest less
shallowest mean depth by each signal alone, with sight and without.

--figure FILE writes the sensitivity of the chosen depth to each signal as SVG.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Printer, bounds, parse, result_line
from causal_rules import make_all

if TYPE_CHECKING:
    from specdepth.agents.load_runs import LoadRuns
    from specdepth.agents.replay_workloads import ArrivalKind, ReplayWorkload
    from specdepth.agents.sensitivity import Sensitivity
    from specdepth.decoder.config import EngineConfig
    from specdepth.decoder.trace import Trace
    from specdepth.scheduler.cost import CostModel
    from specdepth.scheduler.depth import DepthScheduler
    from specdepth.scheduler.learned import LearnedScheduler

LOADS = (8, 16, 32)
QUICK_LOADS = (8,)
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3)
QUICK_SHARES = (1.0, 0.5)
SEARCH_SHARES = (0.3, 0.5)
ARRIVALS: tuple[ArrivalKind, ...] = ("constant", "bursty")
QUICK_ARRIVALS: tuple[ArrivalKind, ...] = ("constant",)
SEEING, BLIND, CLIP, OFF = "seeing", "blind", "clip", "off"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    from specdepth.agents.pressure_weights import sees_memory
    from specdepth.decoder.trace_files import load_trace
    from specdepth.scheduler.cost_files import load_cost

    arguments = parse(__doc__, argv, options=_options, has_target=False)
    printer = Printer(arguments.json_only)
    trace, cost = load_trace(arguments.trace), load_cost(arguments.cost)
    loads = arguments.loads or (QUICK_LOADS if arguments.quick else LOADS)
    policy, searched = policy_with_sight(printer, trace, cost, loads, arguments)
    pools: dict[str, Any] = {}
    for kind in QUICK_ARRIVALS if arguments.quick else ARRIVALS:
        for load in loads:
            measured = by_share(printer, trace, cost, policy, load, kind, arguments)
            if measured:
                pools[f"{kind} {load}"] = measured
    studies = study(trace, cost, policy, loads[len(loads) // 2], arguments)
    if arguments.figure is not None:
        from specdepth.agents.sensitivity_plot import plot_sensitivity

        figure = Path(arguments.figure)
        figure.parent.mkdir(parents=True, exist_ok=True)
        figure.write_text(plot_sensitivity(studies), encoding="utf-8")
    spans = {
        name: {curve.signal: round(curve.span, 3) for curve in curves}
        for name, curves in studies.items()
    }
    for name, each in spans.items():
        printer.line(f"{name}: depth moves by {each}.")
    values = {
        "pools": pools,
        "sees_memory": sees_memory(policy.weights),
        "searched": searched,
        "spans": spans,
        "trace": trace.info.model_pair,
        "cost_model": cost.name,
    }
    count = sum(len(each) for each in pools.values())
    printer.result(result_line("memory_pressure", arguments, count, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="default", help="trace file or name")
    parser.add_argument("--cost", default="cpu-smollm2-bf16", help="cost model, file or name")
    parser.add_argument(
        "--policy",
        default="rule:smollm2-prompt-lookup-cpu-bf16",
        help="policy:FOLDER of offsets, or a greedy rule over a fitted survival model",
    )
    parser.add_argument("--loads", type=int, nargs="*", help="concurrent requests")
    parser.add_argument("--orders", type=int, default=4, help="orders of the requests")
    parser.add_argument("--iterations", type=int, default=14, help="steps of a search")
    parser.add_argument("--save", help="folder for the policy with sight")
    parser.add_argument("--figure", help="SVG file for the sensitivity of depth")


def policy_with_sight(
    printer: Printer,
    trace: Trace,
    cost: CostModel,
    loads: Sequence[int],
    arguments: argparse.Namespace,
) -> tuple[LearnedScheduler, bool]:
    """Return the policy, and whether what it does about memory was searched here."""
    from specdepth.agents.offset_policy import starting_weights
    from specdepth.agents.offset_search import SearchConfig
    from specdepth.agents.pressure_search import search_pressure
    from specdepth.agents.pressure_weights import sees_memory
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.policy_file import PolicyCard, save_policy

    info = trace.info
    scheduler = make_all([arguments.policy], info)[arguments.policy]
    card = PolicyCard(
        model_pair=info.model_pair,
        drafter=info.drafter,
        max_num_speculative_tokens=info.max_num_speculative_tokens,
    )
    policy = LearnedScheduler(starting_weights(scheduler), card)
    searched = not sees_memory(policy.weights)
    if searched:
        printer.line("This policy is blind to memory; searching what it should do about it.")
        config = SearchConfig(iterations=arguments.iterations, seed=arguments.seed)
        if arguments.quick:
            config = replace(config, iterations=1, pairs=1, num_replays=1)
        weights = search_pressure(
            trace,
            cost,
            policy,
            loads,
            SEARCH_SHARES,
            config,
            lambda share: printer.line(f"{share:.0%}"),
        )
        policy = LearnedScheduler(weights, card)
    if arguments.save is not None:
        save_policy(Path(arguments.save), policy.weights, card)
    return policy, searched


def by_share(
    printer: Printer,
    trace: Trace,
    cost: CostModel,
    policy: LearnedScheduler,
    load: int,
    kind: ArrivalKind,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of each pool that holds the longest request."""
    from specdepth.agents.replay_workloads import make_workloads
    from specdepth.agents.scarce_pool import scarce_pool

    rows = trace.rows("held-out")
    orders = range(arguments.seed, arguments.seed + (1 if arguments.quick else arguments.orders))
    workloads = [make_workloads(trace, cost, rows, [load], [kind], order)[0] for order in orders]
    found: dict[str, Any] = {}
    table = []
    for share in QUICK_SHARES if arguments.quick else SHARES:
        pool = scarce_pool(trace, load, share)
        if pool is None:
            continue
        run = served(trace, cost, policy, pool, workloads)
        ratio, clip = run.ratio(SEEING, BLIND), run.ratio(CLIP, BLIND)
        engines = {name: engine_figures(run, name) for name in (SEEING, BLIND, CLIP)}
        found[f"{share:g}"] = {
            "num_kv_blocks": pool.num_kv_blocks,
            "ratio": round(ratio.value, 4),
            "interval": bounds(ratio),
            "clip_ratio": round(clip.value, 4),
            "clip_interval": bounds(clip),
            "off_ratio": round(run.ratio(OFF, BLIND).value, 4),
            **engines,
        }
        preempted = (engines[name]["preemptions"] for name in engines)
        latest = (engines[name]["tpot_p99_ms"] for name in engines)
        table.append(
            (f"{share:g}", pool.num_kv_blocks, ratio.value, clip.value, *preempted, *latest)
        )
    if table:
        header = (f"{kind} {load}", "blocks", "seeing/blind", "clip/blind")
        counts = (f"preempted, {name}" for name in (SEEING, BLIND, CLIP))
        times = (f"TPOT p99 ms, {name}" for name in (SEEING, BLIND, CLIP))
        printer.table((*header, *counts, *times), table)
    return found


def served(
    trace: Trace,
    cost: CostModel,
    policy: LearnedScheduler,
    pool: EngineConfig,
    workloads: Sequence[ReplayWorkload],
) -> LoadRuns:
    """The policy with and without sight, the blind one with "clip", and none, over all orders."""
    import numpy as np

    from specdepth.agents.load_runs import LoadRuns
    from specdepth.agents.sensitivity import MemoryBlind
    from specdepth.decoder.metrics import EngineMetrics
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.serving import serve
    from specdepth.decoder.workload import Workload
    from specdepth.scheduler.baselines import Off

    reserve = ReplayDecoder(trace, cost, pool)
    clip = ReplayDecoder(trace, cost, replace(pool, lookahead="clip"))
    sides: Mapping[str, tuple[ReplayDecoder, DepthScheduler]] = {
        SEEING: (reserve, policy),
        BLIND: (reserve, MemoryBlind(policy)),
        CLIP: (clip, MemoryBlind(policy)),
        OFF: (reserve, Off()),
    }
    run = LoadRuns(tuple(sides))
    metrics = {name: EngineMetrics(pool.max_num_speculative_tokens) for name in sides}
    for workload in workloads:
        results = {}
        for name, (decoder, scheduler) in sides.items():
            requests = decoder.requests(np.array(workload.order))
            work = Workload(requests=requests, process=workload.process)
            results[name] = serve(decoder.engine, work, scheduler, metrics=metrics[name])
        run.add(workload.order, workload.num_repeats - 1, results)
    return run


def engine_figures(run: LoadRuns, name: str) -> dict[str, float]:
    """What one side did, over all orders."""
    metrics = run.metrics[name]
    return {
        "throughput_tok_s": round(run.throughput(name).value, 3),
        "preemptions": round(metrics.num_preemptions / len(metrics.requests), 4),
        "tpot_p99_ms": round(1e3 * metrics.tpot_s[99], 2),
        "mean_depth": round(metrics.mean_depth, 3),
    }


def study(
    trace: Trace,
    cost: CostModel,
    policy: LearnedScheduler,
    load: int,
    arguments: argparse.Namespace,
) -> dict[str, list[Sensitivity]]:
    """How depth moves with each signal alone, over rounds of training requests in a small pool."""
    import numpy as np

    from specdepth.agents.replay_workloads import make_workloads
    from specdepth.agents.scarce_pool import scarce_pool
    from specdepth.agents.sensitivity import SIGNALS, MemoryBlind, record_states, sensitivity
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.workload import Workload

    decoder = ReplayDecoder(trace, cost, scarce_pool(trace, load, SEARCH_SHARES[1]))
    workload = make_workloads(
        trace, cost, trace.rows("train"), [load], ["constant"], arguments.seed
    )[0]
    work = Workload(requests=decoder.requests(np.array(workload.order)), process=workload.process)
    states = record_states(decoder, work, policy, num_states=50 if arguments.quick else 400)
    sides: Mapping[str, DepthScheduler] = {
        "with sight of memory": policy,
        "without": MemoryBlind(policy),
    }
    return {
        name: [sensitivity(scheduler, states, signal) for signal in SIGNALS]
        for name, scheduler in sides.items()
    }


if __name__ == "__main__":
    main()
