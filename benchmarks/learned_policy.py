"""The shipped learned policies against every causal rule, in replay on held-out requests.

For each pair its shipped trace, cost model and policy. At each load the strongest causal rule is the one
that was fastest there on the training split, out of all rules of the lab with their tuned numbers; for the
varying day, the one that was fastest on a day of training requests. A day goes through the loads up and
down again, at equal work. Everything is served in several orders, which are counted together.

Keys: `pairs`, for each pair: `varying_vs_best_single`, `varying_vs_table` and `varying_vs_strongest` (with
`ci_low`), throughput of the policy over the day divided by that of the best single fixed depth, of the
batch table (both from the training split), and of the strongest rule; `varying_vs_hand_made`, the same over
the strongest rule that has no fitted network, a few tuned numbers at most; `varying_vs_rules`, over each rule
that was the strongest somewhere, which shows what the choice on training requests is worth;
`worst_constant_vs_strongest`, `worst_constant_vs_off`, `worst_constant_vs_best_fixed`, the least such ratio
over constant loads;
`oracle_gap_closed` and `oracle_gap_closed_by_rule`, share of the way from the best fixed depth to hindsight,
mean over loads, by the policy and by the strongest rules; `universal_vs_local`, the least ratio of the
universal policy, which never saw this cost model, to the policy; `microseconds`, mean of a decision at the
highest load; `without_looping`, the first ratios for the time of requests whose text did not fall into
repetition; digests of trace and policy.

With --seeds FOLDER... the same policy trained with other seeds is compared too: `seeds`, ratio to the
strongest rule over the day for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _measure import Printer, bounds, parse, result_line
from causal_rules import TRAINING_REQUESTS, all_fixed, make_all

if TYPE_CHECKING:
    from specdepth.agents.comparison import Comparison
    from specdepth.agents.load_runs import LoadRuns
    from specdepth.decoder.trace import Trace
    from specdepth.decoder.trace_info import TraceInfo
    from specdepth.scheduler.cost import CostModel
    from specdepth.scheduler.depth import DepthScheduler

LOADS = (1, 2, 4, 8, 16, 32)
QUICK_LOADS = (1, 4)
DAY: Final = "varying"
POLICY, UNIVERSAL = "learned", "universal"
SINGLE, TABLE = "best-single-fixed", "tuned-table"


@dataclass(frozen=True, slots=True)
class Pair:
    """What is shipped for one pair."""

    trace: str
    cost: str
    policy: str


PAIRS = {
    "prompt-lookup": Pair(
        "smollm2-prompt-lookup-greedy", "cpu-smollm2-bf16", "smollm2-prompt-lookup-cpu-bf16"
    ),
    "eagle3": Pair("smollm2-eagle3-greedy", "cpu-smollm2-eagle3-bf16", "smollm2-eagle3-cpu-bf16"),
}
UNIVERSAL_NAME = "universal-1"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options, has_target=False)
    printer = Printer(arguments.json_only)
    unknown = sorted(set(arguments.pairs) - set(PAIRS))
    if unknown:
        raise SystemExit(f"no pair {unknown[0]!r}; there are {', '.join(PAIRS)}.")
    pairs = {name: measured(printer, name, arguments) for name in arguments.pairs}
    count = len(QUICK_LOADS if arguments.quick else LOADS) * len(pairs)
    printer.result(result_line("learned_policy", arguments, count, {"pairs": pairs}))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS), help="by name")
    parser.add_argument("--policy", help="policy, name or folder; the shipped one by default")
    parser.add_argument("--universal", default=UNIVERSAL_NAME, help="policy, name or folder")
    parser.add_argument("--orders", type=int, default=4, help="orders of the requests")
    parser.add_argument("--seeds", nargs="*", default=[], help="folders of policies of other seeds")


def measured(printer: Printer, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one pair."""
    from specdepth.agents.replay_engines import content_sha256
    from specdepth.agents.replay_evaluate import ORACLE, evaluate_replay
    from specdepth.decoder.trace_files import load_trace
    from specdepth.scheduler.cost_files import load_cost
    from specdepth.scheduler.learned import LearnedScheduler

    pair = PAIRS[name]
    trace, cost = load_trace(pair.trace), load_cost(pair.cost)
    loads = QUICK_LOADS if arguments.quick else LOADS
    orders = 1 if arguments.quick else arguments.orders
    folder = arguments.policy or pair.policy
    learned = make_all([f"policy:{folder}", f"policy:{arguments.universal}"], trace.info)
    policy, universal = learned.values()
    seeds = make_all([f"policy:{one}" for one in arguments.seeds], trace.info)
    assert isinstance(policy, LearnedScheduler)
    rules = all_rules(trace, cost, loads, arguments.seed)
    tried = on_training(trace, cost, rules, loads, arguments.seed)
    strongest = fastest(tried, rules)
    printer.line(f"{name}: strongest on the training split {strongest}.")
    fixed = all_fixed(trace.info)
    plain = fastest(tried, hand_made(rules, trace.info))[DAY]
    wanted = dict.fromkeys([*strongest.values(), plain, SINGLE, TABLE])
    chosen = {one: rules[one] for one in wanted}
    found = evaluate_replay(
        trace,
        cost,
        {POLICY: policy, UNIVERSAL: universal, **seeds, **fixed, **chosen},
        loads,
        arrivals=("constant", DAY),
        seed=arguments.seed,
        orders=orders,
    )
    day, over = found.runs[DAY], strongest[DAY]
    to_rule = day.ratio(POLICY, over)
    by_load = {load: at_load(found, load, strongest[load]) for load in loads}
    show(printer, f"{name}, held out, ratios of the policy", by_load)
    kept = trace.rows("held-out", looping=False).tolist()
    to_universal = {load: found.runs[load].ratio(UNIVERSAL, POLICY).value for load in loads}
    values = {
        "varying_vs_best_single": round(day.ratio(POLICY, SINGLE).value, 4),
        "varying_vs_table": round(day.ratio(POLICY, TABLE).value, 4),
        "varying_vs_strongest": round(to_rule.value, 4),
        "ci_low": round(to_rule.low, 4),
        "ci": bounds(to_rule),
        "varying_vs_rules": {rule: round(day.ratio(POLICY, rule).value, 4) for rule in chosen},
        "varying_vs_hand_made": round(day.ratio(POLICY, plain).value, 4),
        "hand_made": plain,
        "varying_vs_off": round(day.ratio(POLICY, "off").value, 4),
        "varying_oracle": round(day.ratio(ORACLE, POLICY).value, 4),
        **{
            f"worst_constant_vs_{other}": min(row[f"vs_{other}"] for row in by_load.values())
            for other in ("strongest", "off", "best_fixed")
        },
        "oracle_gap_closed": mean(by_load, "gap_closed"),
        "oracle_gap_closed_by_rule": mean(by_load, "gap_closed_by_rule"),
        "universal_vs_local": round(min(to_universal.values()), 4),
        "universal_by_load": {load: round(value, 4) for load, value in to_universal.items()},
        "universal_varying": round(day.ratio(UNIVERSAL, POLICY).value, 4),
        "microseconds": round(1e3 * found.runs[max(loads)].policy_ms(POLICY), 1),
        "strongest": strongest,
        "loads": by_load,
        "without_looping": {
            "varying_vs_strongest": without(day, kept, POLICY, over),
            "constant_vs_strongest": {
                load: without(found.runs[load], kept, POLICY, strongest[load]) for load in loads
            },
        },
        "seeds": {one: round(day.ratio(one, over).value, 4) for one in seeds},
        "num_requests": len(trace.rows("held-out")),
        "orders": orders,
        "cost_model": cost.name,
        "trace_sha256": content_sha256(trace),
        "policy": folder,
        "policy_sha256": digest(policy),
    }
    printer.line(
        f"{name}, a day: {to_rule.value:.4f} {bounds(to_rule)} of {over}, "
        f"{values['varying_vs_table']} of the table, {values['varying_vs_best_single']} of the best "
        f"single depth; {values['microseconds']} microseconds a decision."
    )
    return values


def all_rules(
    trace: Trace, cost: CostModel, loads: Sequence[int], seed: int
) -> dict[str, DepthScheduler]:
    """All causal rules of the lab, with tuned numbers where they have some."""
    from specdepth.agents.default_rules import default_rules
    from specdepth.agents.depth_limit import depths_to_try
    from specdepth.agents.rule_tuning import TrainingReplay, best_single_depth
    from specdepth.scheduler.baselines import FixedDepth
    from specdepth.scheduler.baselines.tuned_table import tuned_table

    top = trace.info.max_num_speculative_tokens
    counting = "confidence" if trace.info.drafter == "draft-model" else "match"
    training = TrainingReplay(trace, cost, loads, num_requests=TRAINING_REQUESTS, seed=seed)
    sweep = training.sweep((0, *depths_to_try(top)))
    return {
        SINGLE: FixedDepth(best_single_depth(sweep)),
        TABLE: tuned_table(sweep),
        **make_all((f"greedy:{counting}", *default_rules(trace.info)), trace.info),
    }


def hand_made(rules: Iterable[str], info: TraceInfo) -> list[str]:
    """Those of the rules that do without a fitted survival model."""
    from specdepth.agents.default_rules import fitting_rules
    from specdepth.scheduler.baselines.survival_names import shipped_survival_models

    fitted = {*fitting_rules(info)}
    models = shipped_survival_models()
    return [name for name in rules if name not in fitted and name.rpartition(":")[2] not in models]


def on_training(
    trace: Trace,
    cost: CostModel,
    rules: Mapping[str, DepthScheduler],
    loads: Sequence[int],
    seed: int,
) -> Comparison:
    """Rules on all training requests, at each load and over the day."""
    from specdepth.agents.replay_evaluate import evaluate_replay

    rows = trace.rows("train")
    return evaluate_replay(
        trace, cost, rules, loads, arrivals=("constant", DAY), rows=rows, seed=seed, oracles=False
    )


def fastest(found: Comparison, rules: Iterable[str]) -> dict[int | str, str]:
    """Name of the fastest of some rules, by load."""
    names = list(rules)
    return {
        load: max(names, key=lambda name: run.throughput(name).value)
        for load, run in found.runs.items()
    }


def at_load(found: Comparison, load: int, rule: str) -> dict[str, float]:
    """The policy at one constant load."""
    from specdepth.agents.replay_evaluate import ORACLE

    run, best = found.runs[load], found.best_fixed(load)
    return {
        "vs_strongest": round(run.ratio(POLICY, rule).value, 4),
        "vs_off": round(run.ratio(POLICY, "off").value, 4),
        "vs_best_fixed": round(run.ratio(POLICY, best).value, 4),
        "oracle_vs_best_fixed": round(run.ratio(ORACLE, best).value, 4),
        "gap_closed": round(run.gap_closed(POLICY, best, ORACLE).value, 4),
        "gap_closed_by_rule": round(run.gap_closed(rule, best, ORACLE).value, 4),
    }


def without(run: LoadRuns, requests: Sequence[int], policy: str, rule: str) -> float:
    """Ratio of throughput over the time of some requests; a round's time is split among those in it."""
    rates = []
    for name in (policy, rule):
        sums = run.sums(name)
        tokens, seconds = np.sum([sums[one] for one in requests], axis=0)
        rates.append(tokens / seconds)
    return round(float(rates[0] / rates[1]), 4)


def mean(rows: Mapping[int, Mapping[str, float]], key: str) -> float:
    """Mean of a value over loads."""
    return round(float(np.mean([row[key] for row in rows.values()])), 4)


def digest(policy: Any) -> str:
    """SHA-256 of a policy's weights, whatever their file."""
    import hashlib

    sha = hashlib.sha256()
    for array in (*policy.weights.weights, *policy.weights.biases):
        sha.update(array.tobytes())
    return sha.hexdigest()


def show(printer: Printer, title: str, rows: Mapping[int, Mapping[str, float]]) -> None:
    """Print a table, a load a line."""
    columns = list(next(iter(rows.values())))
    table = [(load, *(row[column] for column in columns)) for load, row in rows.items()]
    printer.table((title, *columns), table)


if __name__ == "__main__":
    main()
