"""Every causal rule against the best fixed depth, in replay, with oracles: which rule is the strongest.

The shipped trace's held-out requests under the cost model of a CPU in bf16, constant loads. What has
scalars gets them on the training split: the batch-size table and the best single depth from a sweep
of fixed depths, the threshold of SpecDec++, and shrinkage and price of the capped greedy rule by load.
The strongest rule is named there too.

Keys: `loads`, load to rule to its throughput over that of the best fixed depth there (oracles have
"oracle" in their names); `loads_without_looping`, the same for the time shares of the requests whose
text did not fall into repetition (a round's time is split evenly among those in it, and `specdepth
evaluate --looping without` replays them alone); `strongest`, the rule with the best geometric mean of
throughput over the loads on the training split, with its ratios to the best fixed depth and to no
speculation.

Stops between draft passes do not exist with prompt lookup: rules that are nothing else draft what is on
offer, and have the figures of the deepest fixed depth. Nor does draft time, so the greedy rule that is
blind to it has those of the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from _measure import Printer, parse, result_line

if TYPE_CHECKING:
    from specdepth.agents.comparison import Comparison
    from specdepth.agents.load_runs import LoadRuns
    from specdepth.agents.rule_tuning import TrainingReplay, TunedRule
    from specdepth.decoder.trace import TraceInfo
    from specdepth.scheduler.depth import DepthScheduler

LOADS = (1, 2, 4, 8, 16, 32)
QUICK_LOADS = (4, 16)
TRAINING_REQUESTS = 96
"""That scalars are chosen on; or as many as the load."""
CHOICE_REQUESTS = 48
"""Of these, that name the strongest rule: differences between rules are larger than those of scalars."""
GRID = {"price": (1.0, 0.8, 1.25, 1.6, 2.0), "exponent": (1.0, 0.85, 1.2), "pull": (0.0, 0.2, 0.4)}
THRESHOLDS = {"threshold": (0.5, 0.3, 0.7, 0.85)}
TUNED = "shrunk:tuned-by-load"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    from specdepth.agents.default_rules import STOPS
    from specdepth.agents.replay_evaluate import evaluate_replay
    from specdepth.agents.rule_tuning import TrainingReplay, strongest, tune
    from specdepth.decoder.trace_files import load_trace
    from specdepth.scheduler.cost_files import load_cost

    arguments = parse(__doc__, argv, options=_options, has_target=False)
    printer = Printer(arguments.json_only)
    start_s = time.process_time()
    trace, cost = load_trace(arguments.trace), load_cost(arguments.cost)
    loads = QUICK_LOADS if arguments.quick else LOADS
    training = TrainingReplay(
        trace, cost, loads, num_requests=TRAINING_REQUESTS, seed=arguments.seed
    )
    fixed = all_fixed(trace.info)
    rules = causal_rules(training, trace.info, arguments.survival)
    choice = TrainingReplay(trace, cost, loads, num_requests=CHOICE_REQUESTS, seed=arguments.seed)
    tuned = tune(choice, {name: [rule] for name, rule in rules.items()})
    best = strongest(tuned)
    printer.line(f"Strongest on the training split: {best}, {rules[best]!r}.")
    found = evaluate_replay(trace, cost, fixed | rules, loads, seed=arguments.seed)
    kept = trace.rows("held-out", looping=False)
    without = {load: ratios_of(found.runs[load], kept.tolist()) for load in loads}
    ratios = {load: ratios_of(found.runs[load]) for load in loads}
    if trace.info.drafter == "prompt-lookup":
        for table in (*ratios.values(), *without.values()):
            table |= {f"blind-{rule}": table[rule] for rule in rules if rule.startswith("greedy:")}
            table |= {
                stop: table[f"fixed:{trace.info.max_num_speculative_tokens}"]
                for stop in STOPS
                if stop not in table
            }
    show(printer, "ratio to the best fixed depth, held out", ratios)
    show(printer, "the same for requests that do not loop", without)
    seconds = time.process_time() - start_s
    printer.line(f"{seconds:.0f} s of CPU time.")
    values = {
        "loads": ratios,
        "loads_without_looping": without,
        "best_fixed": {load: found.best_fixed(load) for load in loads},
        "strongest": strongest_of(found, best, rules, tuned, without),
        "cpu_seconds": round(seconds, 1),
        "trace": trace.info.model_pair,
        "cost_model": cost.name,
        "num_requests": len(trace.rows("held-out")),
    }
    printer.result(result_line("causal_rules", arguments, len(loads), values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="default", help="trace file or name")
    parser.add_argument("--cost", default="cpu-smollm2-bf16", help="cost model, file or name")
    parser.add_argument(
        "--survival", help="estimator of the greedy rules; the first shipped model by default"
    )


def make_all(names: Iterable[str], info: TraceInfo) -> dict[str, DepthScheduler]:
    """Schedulers by name, which must fit the trace."""
    from specdepth.scheduler.baselines import make_scheduler

    fits: dict[str, Any] = {
        "model_pair": info.model_pair,
        "drafter": info.drafter,
        "max_num_speculative_tokens": info.max_num_speculative_tokens,
    }
    return {name: make_scheduler(name, **fits) for name in names}


def all_fixed(info: TraceInfo) -> dict[str, DepthScheduler]:
    """No speculation, and the fixed depths that stand for all up to the trace's K."""
    from specdepth.agents.depth_limit import depths_to_try
    from specdepth.agents.session import with_fixed

    top = info.max_num_speculative_tokens
    return make_all(with_fixed((), depths_to_try(top), top), info)


def causal_rules(
    training: TrainingReplay, info: TraceInfo, survival: str | None
) -> dict[str, DepthScheduler]:
    """All rules that a deployment could run, with scalars from the training split."""
    from specdepth.agents.default_rules import (
        PRICED,
        RULES,
        STOPS,
        WITH_SURVIVAL,
        fitting_rules,
    )
    from specdepth.agents.depth_limit import depths_to_try
    from specdepth.agents.rule_tuning import best_single_depth, coordinate_search
    from specdepth.scheduler.baselines import FixedDepth
    from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
    from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
    from specdepth.scheduler.baselines.survival_names import make_survival, shipped_survival_for
    from specdepth.scheduler.baselines.tuned_table import tuned_table

    is_free = info.drafter == "prompt-lookup"
    name = survival or shipped_survival_for(info.model_pair, info.drafter)
    name = name or ("match" if is_free else "confidence")
    estimator = make_survival(name, model_pair=info.model_pair, drafter=info.drafter)
    sweep = training.sweep((0, *depths_to_try(info.max_num_speculative_tokens)))
    by_load = {}
    for load in training.loads:
        # One sequence is its own mean.
        grid = GRID if load > 1 else {key: GRID[key] for key in ("price", "exponent")}
        values, _ = coordinate_search(
            training,
            lambda values: CappedGreedyDepth(estimator, Shrinkage(**values)),
            grid,
            loads=[load],
        )
        by_load[load] = Shrinkage(**values)
    chosen, _ = coordinate_search(
        training, lambda values: SpecDecPlusPlus(values["threshold"], estimator), THRESHOLDS
    )
    shipped = fitting_rules(info) if survival is None else ()
    estimating = [rule for rule in WITH_SURVIVAL if not (is_free and rule == "blind-greedy")]
    simple = "match" if is_free else "confidence"
    # With prompt lookup stops between draft passes are the deepest fixed depth.
    stops = () if is_free else (*STOPS, f"{PRICED}:{name}")
    names = [
        f"greedy:{simple}",
        *RULES,
        *stops,
        *(f"{rule}:{name}" for rule in estimating),
        *shipped,
    ]
    return {
        "best-single-fixed": FixedDepth(best_single_depth(sweep)),
        "tuned-table": tuned_table(sweep),
        **make_all(dict.fromkeys(names), info),
        "specdec++": SpecDecPlusPlus(chosen["threshold"], estimator),
        TUNED: CappedGreedyDepth(estimator, by_load),
    }


def ratios_of(run: LoadRuns, requests: Sequence[int] | None = None) -> dict[str, float]:
    """Throughput of each policy over that of the best fixed depth, over all or some requests."""
    rates = {}
    for policy in run.policies:
        sums = run.sums(policy)
        kept = [sums[index] for index in (sums if requests is None else requests)]
        rates[policy] = sum(tokens for tokens, _ in kept) / sum(seconds for _, seconds in kept)
    best = max(rate for name, rate in rates.items() if name == "off" or name.startswith("fixed:"))
    return {name: round(rate / best, 4) for name, rate in rates.items()}


def strongest_of(
    found: Comparison,
    best: str,
    rules: Mapping[str, DepthScheduler],
    tuned: Mapping[str, TunedRule],
    without: Mapping[int, Mapping[str, float]],
) -> dict[str, Any]:
    """What the JSON line says of the strongest rule."""
    by_load = {}
    for load, run in found.runs.items():
        ratio = run.ratio(best, found.best_fixed(load))
        by_load[load] = {
            "ratio_to_best_fixed": round(ratio.value, 4),
            "interval": [round(ratio.low, 4), round(ratio.high, 4)],
            "ratio_to_off": round(run.ratio(best, "off").value, 4),
            "ratio_without_looping": without[int(load)][best],
            "policy_ms": round(run.policy_ms(best), 4),
        }
    scores = {name: round(rule.score, 3) for name, rule in tuned.items()}
    return {"name": best, "rule": repr(rules[best]), "loads": by_load, "training_tok_s": scores}


def show(printer: Printer, title: str, ratios: Mapping[int, Mapping[str, float]]) -> None:
    """Print a table, a rule a line."""
    loads = sorted(ratios)
    rows = [(name, *(ratios[load][name] for load in loads)) for name in ratios[loads[0]]]
    printer.table((title, *(f"load {load}" for load in loads)), rows)


if __name__ == "__main__":
    main()
