"""Sequence-rounds per second of replay, on one thread, at 16 sequences.

The shipped trace is served in a closed loop under each policy, the policies in turn. Key
`sequence_rounds_per_second`: median over repeats in CPU time of this thread, with a fixed depth of 4, which
thinks no more than a number; `by_policy` has the others, whose own time counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from _measure import Printer, parse, result_line

NUM_SEQS = 16
HEADLINE = "fixed:4"
POLICIES = ("off", HEADLINE, "heuristic", "random:0")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options, has_target=False)
    from specdepth.decoder.config import EngineConfig
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.serving import serve
    from specdepth.decoder.trace_files import load_trace
    from specdepth.decoder.workload import ClosedLoop, Workload
    from specdepth.scheduler.baselines import make_scheduler
    from specdepth.scheduler.cost import CostModel

    printer = Printer(arguments.json_only)
    num_repeats = 3 if arguments.quick else 9
    trace = load_trace(arguments.trace)
    top = trace.info.max_num_speculative_tokens
    config = EngineConfig(max_num_seqs=NUM_SEQS, max_num_speculative_tokens=top)
    decoder = ReplayDecoder(trace, CostModel.linear(), config)
    requests = decoder.requests()[: 100 if arguments.quick else None]
    workload = Workload(requests=requests, process=ClosedLoop.constant(NUM_SEQS))
    policies = {name: make_scheduler(name) for name in (*POLICIES, *arguments.policies)}
    rates: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(num_repeats):
        for name, scheduler in policies.items():
            before = time.thread_time()
            served = serve(decoder.engine, workload, scheduler)
            took_s = time.thread_time() - before
            num_rounds = sum(result.metrics.num_rounds for result in served.results)
            rates[name].append(num_rounds / took_s)
    medians = {name: round(float(np.median(found))) for name, found in rates.items()}
    printer.table(
        ("replay at 16 sequences", "sequence-rounds/s", "slowest", "fastest"),
        [(name, medians[name], round(min(r)), round(max(r))) for name, r in rates.items()],
    )
    values = {
        "sequence_rounds_per_second": medians[HEADLINE],
        "by_policy": medians,
        "num_seqs": NUM_SEQS,
        "num_requests": len(requests),
        "trace": arguments.trace,
    }
    printer.result(result_line("replay_speed", arguments, num_repeats, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="default", help="a shipped trace or a file")
    parser.add_argument("--policies", nargs="*", default=[], help="more policies, by name")


if __name__ == "__main__":
    main()
