"""Do live runs confirm replay? The same held-out requests under the same policies, live and replayed.

Blocks of requests are served by the real decoder, the policies in rotating order, and then by replay of
the shipped trace under the cost model. Ratios are of throughput to decoding without speculation, at equal
work, with intervals over requests as in `specdepth evaluate`. Text is sampled as it was recorded, with the
drafter of the trace; `--verification rejection` decodes under that rule what was recorded under coupled
noise: texts then differ from policy to policy, and requests may end elsewhere.

Keys: `ratios`, load to policy to its speedup `live` with its `interval`, in `replay`, and whether that lies
inside; `agree`, share of all that do; `bias`, load to replay's predicted over the measured seconds, all
policies together. A bias that is the same for all policies cancels in ratios. `noise`, load to the standard
deviation of the logarithm of a run's time, policy and block apart: the requests of a block meet the machine
in one state, so intervals over requests alone would be too narrow, and it is added to them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import Printer, bounds, parse, result_line
from _workload import load_decoder, rendered

if TYPE_CHECKING:
    from specdepth.decoder.workload import WorkloadRequest

POLICIES = ("fixed:2", "fixed:4", "fixed:8", "ema-greedy", "greedy:smollm2-prompt-lookup")
OFF = "off"
BLOCKS = {1: 2, 4: 8, 16: 32}
"""Load to requests in a block."""
NUM_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    from specdepth.agents.comparison import paired_noise
    from specdepth.agents.load_runs import LoadRuns
    from specdepth.decoder.clock import ThreadClock
    from specdepth.decoder.config import EngineConfig, SamplingParams
    from specdepth.decoder.prompts import load_prompts
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.serving import serve
    from specdepth.decoder.trace_files import load_trace
    from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
    from specdepth.scheduler.baselines import make_scheduler
    from specdepth.scheduler.cost_files import load_cost

    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    trace = load_trace(arguments.trace)
    blocks = {1: 2} if arguments.quick else BLOCKS
    info, top = trace.info, trace.info.max_num_speculative_tokens
    live = load_decoder(
        arguments.target,
        "prompt-lookup" if info.drafter == "prompt-lookup" else info.model_pair.partition("+")[2],
        top,
        max_num_seqs=max(blocks),
        dtype=arguments.dtype,
        verification=arguments.verification or info.verification,
    )
    live.engine.clock = live.runner.clock = ThreadClock()
    config = EngineConfig(max_num_seqs=max(blocks), max_num_speculative_tokens=top)
    cost = load_cost(arguments.cost)
    if info.temperature > 0:  # at the prices of the rule that is asked for, not of the recording's
        cost = cost.sampled(live.config.verification)
    replay = ReplayDecoder(trace, cost, config)
    live.engine.cost = cost
    policies = {name: make_scheduler(name) for name in (OFF, *arguments.policies)}
    by_id = {prompt.id: prompt for prompt in load_prompts()}
    rows = np.random.default_rng(arguments.seed).permutation(trace.rows("held-out"))
    prompts = [by_id[trace.ids[row]] for row in rows]
    sampling = SamplingParams(
        max_new_tokens=arguments.new_tokens,
        temperature=info.temperature,
        top_k=info.top_k,
        top_p=info.top_p,
    )
    requests = [
        WorkloadRequest(prompt_token_ids=tuple(tokens), sampling=replace(sampling, seed=int(row)))
        for row, tokens in zip(rows, rendered(live, prompts), strict=True)
    ]
    replayed = replay.requests(rows, arguments.new_tokens)

    def run(decoder: Any, name: str, load: int, block: Sequence[WorkloadRequest]) -> Any:
        workload = Workload(requests=tuple(block), process=ClosedLoop.constant(load))
        getattr(policies[name], "reset", lambda: None)()
        return serve(decoder.engine, workload, policies[name])

    for load in blocks:  # warm up
        run(live, [*policies][-1], load, requests[-2 * load :])
    deadline = time.monotonic() + 60 * arguments.minutes
    misses: dict[int, list[list[float]]] = {load: [] for load in blocks}
    runs = {load: (LoadRuns(tuple(policies)), LoadRuns(tuple(policies))) for load in blocks}
    at = dict.fromkeys(blocks, 0)
    spent = dict.fromkeys(blocks, 0.0)
    while True:
        load = min(spent, key=lambda one: spent[one])
        size = blocks[load]
        chosen = slice(at[load], at[load] + size)
        if (time.monotonic() > deadline and all(at.values())) or chosen.stop > len(rows):
            break
        started = time.monotonic()
        first = at[load] // size % len(policies)
        order = [*policies][first:] + [*policies][:first]
        block = range(chosen.start, chosen.stop)
        served = []
        for one, decoder, texts in zip(
            runs[load], (live, replay), (requests, replayed), strict=True
        ):
            served.append({name: run(decoder, name, load, texts[chosen]) for name in order})
            one.add(block, 0, served[-1])
        # A token and not a run: under rejection texts, and so their lengths, are not those of replay.
        rates = np.array([[one[name].throughput_tok_s for name in policies] for one in served])
        misses[load].append(np.log(rates[1] / rates[0]).tolist())
        at[load] += size
        spent[load] += time.monotonic() - started
    ratios: dict[int, dict[str, dict[str, Any]]] = {}
    table = []
    for load, (measured, modelled) in runs.items():
        ratios[load] = {}
        measured.noise = paired_noise(misses[load])
        for name in arguments.policies:
            ratio, other = measured.ratio(name, OFF), modelled.ratio(name, OFF).value
            inside = bool(ratio.low <= other <= ratio.high)
            ratios[load][name] = {
                "live": round(ratio.value, 4),
                "interval": bounds(ratio),
                "replay": round(other, 4),
                "inside": inside,
            }
            table.append((f"{load}: {name}", ratio.value, str(bounds(ratio)), other, str(inside)))
    printer.table(("speedup over off", "live", "95 %", "replay", "inside"), table)
    bias = {
        load: round(sum(modelled.makespan_s.values()) / sum(measured.makespan_s.values()), 4)
        for load, (measured, modelled) in runs.items()
    }
    printer.line(f"Replay's seconds over measured ones, by load: {bias}.")
    cells = [cell for row in ratios.values() for cell in row.values()]
    values = {
        "agree": round(sum(cell["inside"] for cell in cells) / len(cells), 4),
        "ratios": ratios,
        "bias": bias,
        "noise": {load: round(one.noise, 4) for load, (one, _) in runs.items()},
        "num_requests": at,
        "new_tokens": arguments.new_tokens,
        "verification": live.config.verification,
        "cost_model": replay.engine.cost.name,
    }
    printer.result(result_line("live_confirmation", arguments, sum(at.values()), values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="default", help="trace of the target, file or name")
    parser.add_argument("--cost", default="cpu-smollm2-bf16", help="cost model, file or name")
    parser.add_argument("--verification", choices=("greedy", "coupled", "rejection"))
    parser.add_argument("--minutes", type=float, default=10.0, help="wall time, about")
    parser.add_argument("--new-tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), help="by name")


if __name__ == "__main__":
    main()
