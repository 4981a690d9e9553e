"""The shipped draft model: what it gains live at batch 1, and what depth rules gain with it in replay.

SmolLM2-135M-Instruct in bf16, one thread, held-out prompts. Live, the best fixed depth (found on training
prompts) alternates with depth 0, prompt by prompt, greedy, end tokens ignored by both. Replay takes the
shipped trace and cost model of the pair; rules and their scalars are chosen on the training split.

Keys: `batch1_best_fixed`, tokens a second of the best fixed depth over those of depth 0, live at batch 1;
`acceptance_first`, share of first drafted tokens that stand, mean over kinds of prompts (trace, held
out); `draft_cost`, seconds of a draft pass over those of a target pass, one sequence each;
`causal_load1`, `causal_load4`, throughput of the strongest causal rule over that of the best fixed depth
there; `worst_vs_off`, the least of its throughput over that of depth 0 at loads 16 and 32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _comparison import Comparison, best_depth, ours
from _measure import Printer, bounds, median_ratio, parse, result_line
from _workload import load_decoder, mixed_prompts
from causal_rules import CHOICE_REQUESTS, TRAINING_REQUESTS, all_fixed, causal_rules

if TYPE_CHECKING:
    from specdepth.agents.intervals import Interval
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.decoder.trace import Trace
    from specdepth.scheduler.cost import CostModel

DRAFT = "smollm2-eagle3"
TRACE = "smollm2-eagle3-greedy"
COST = "cpu-smollm2-eagle3-bf16"
DEPTHS = (1, 2, 3, 4, 5, 6, 8)
LOADS = (1, 4, 16, 32)
NUM_PROMPTS = 18
CONTEXT = 150
"""Tokens in the cache when passes are timed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    from specdepth.decoder.trace_files import load_trace
    from specdepth.scheduler.cost_files import load_cost

    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    decoder = load_decoder(arguments.target, arguments.draft, max_num_seqs=1, dtype=arguments.dtype)
    cost_ratio = draft_cost(decoder, 10 if arguments.quick else 60, arguments.seed)
    printer.line(f"A draft pass takes {cost_ratio.value:.3f} of a target pass.")
    depth = best_depth(printer, decoder, DEPTHS, arguments)
    live = live_gain(decoder, depth, arguments)
    printer.line(
        f"Live at batch 1: depth {depth} over depth 0: {live.speedup:.3f} {live.bounds}, wall "
        f"{live.wall_speedup:.3f}."
    )
    trace, cost = load_trace(arguments.trace), load_cost(arguments.cost)
    values: dict[str, Any] = {
        "batch1_best_fixed": round(live.speedup, 4),
        "batch1_interval": live.bounds,
        "batch1_wall": round(live.wall_speedup, 4),
        "batch1_depth": depth,
        "acceptance_first": round(float(np.mean(list(first_acceptance(trace).values()))), 4),
        "acceptance_by_kind": first_acceptance(trace),
        "draft_cost": round(cost_ratio.value, 4),
        "draft_cost_interval": bounds(cost_ratio),
        **replayed(printer, trace, cost, arguments),
    }
    printer.result(result_line("draft_model", arguments, len(live.pairs), values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", default=DRAFT, help="draft model, name or folder")
    parser.add_argument("--trace", default=TRACE, help="its trace, name or file")
    parser.add_argument("--cost", default=COST, help="its cost model, name or file")
    parser.add_argument(
        "--survival", help="estimator of the greedy rules; the shipped one by default"
    )
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)


def draft_cost(decoder: SpeculativeDecoder, repeats: int, seed: int) -> Interval:
    """Median ratio of neighbouring passes of one token, draft over target."""
    runner = decoder.runner
    times: dict[str, list[float]] = {"target": [], "draft": []}
    for _ in range(repeats + 2):
        for model in ("target", "draft"):
            times[model].append(runner.time_pass([1], [CONTEXT], 1, model))
    return median_ratio(times["draft"][2:], times["target"][2:], seed)


def live_gain(decoder: SpeculativeDecoder, depth: int, arguments: argparse.Namespace) -> Comparison:
    """Depth `depth` and depth 0 on held-out prompts, in turn."""
    size, count = arguments.new_tokens, 4 if arguments.quick else arguments.prompts
    prompts = mixed_prompts(decoder, count, arguments.seed)
    batches = [[prompt] for prompt in prompts]
    return Comparison(ours(decoder, size, depth), ours(decoder, size, 0), batches, arguments.seed)


def first_acceptance(trace: Trace) -> dict[str, float]:
    """Share of held-out positions where the first drafted token stands, by kind of prompt."""
    rows = trace.rows("held-out")
    shares = {}
    for kind in sorted(set(trace.kinds)):
        places = [
            np.arange(trace.starts[row], trace.starts[row] + trace.num_tokens[row])
            for row in rows
            if trace.kinds[row] == kind
        ]
        if places:
            shares[kind] = round(float((trace.accepted[np.concatenate(places)] > 0).mean()), 4)
    return shares


def replayed(
    printer: Printer, trace: Trace, cost: CostModel, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The strongest causal rule, chosen on the training split, on held-out requests."""
    from specdepth.agents.replay_evaluate import evaluate_replay
    from specdepth.agents.rule_tuning import TrainingReplay, strongest, tune

    loads, seed, info = LOADS, arguments.seed, trace.info
    training = TrainingReplay(trace, cost, loads, num_requests=TRAINING_REQUESTS, seed=seed)
    choice = TrainingReplay(trace, cost, loads, num_requests=CHOICE_REQUESTS, seed=seed)
    rules = causal_rules(training, info, arguments.survival)
    best = strongest(tune(choice, {name: [rule] for name, rule in rules.items()}))
    fixed = all_fixed(info)
    found = evaluate_replay(trace, cost, fixed | rules, loads, seed=seed)
    by_load: dict[int, dict[str, Any]] = {}
    for load, run in found.runs.items():
        over_fixed, over_off = run.ratio(best, found.best_fixed(load)), run.ratio(best, "off")
        by_load[int(load)] = {
            "best_fixed": found.best_fixed(load),
            "best_fixed_over_off": round(run.ratio(found.best_fixed(load), "off").value, 4),
            "over_best_fixed": round(over_fixed.value, 4),
            "over_best_fixed_interval": bounds(over_fixed),
            "over_off": round(over_off.value, 4),
            "oracle_over_best_fixed": round(
                run.ratio("oracle:hindsight", found.best_fixed(load)).value, 4
            ),
        }
    printer.line(f"Strongest on the training split: {best}, {rules[best]!r}.")
    columns = ("best_fixed", "best_fixed_over_off", "over_best_fixed", "over_off")
    printer.table(
        ("load", *columns, "oracle_over_best_fixed"),
        [
            (load, *(row[column] for column in (*columns, "oracle_over_best_fixed")))
            for load, row in by_load.items()
        ],
    )
    return {
        "causal_load1": by_load[1]["over_best_fixed"],
        "causal_load4": by_load[4]["over_best_fixed"],
        "worst_vs_off": min(by_load[16]["over_off"], by_load[32]["over_off"]),
        "strongest": best,
        "loads": by_load,
    }


if __name__ == "__main__":
    main()
