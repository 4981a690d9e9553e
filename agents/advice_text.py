"""What an `Advice` says: sentences and tables for people, JSON values for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .advice import Advice, LoadAdvice, Verdict
from .intervals import Interval
from .tables import Grid
from .tuning import table_name

FEW_REQUESTS = 50
"""Judged on fewer, advice says so."""


def sentences(advice: Advice) -> list[str]:
    """The answers, in the order in which an operator asks."""
    return [_knee(advice), _pays(advice), _switch(advice), _table(advice), _finer(advice)]


def caveats(advice: Advice) -> list[str]:
    """What the answers rest on, and what they leave out."""
    info, cost = advice.info, advice.cost
    found = [
        f"Depths were chosen on {advice.num_training} requests and judged on {advice.num_judged} "
        "others; a load replays as many of them as it needs. Intervals are over requests; for these "
        "very ones replayed times are exact, as far as the pass times are right."
    ]
    if advice.num_judged < FEW_REQUESTS:
        found.append(f"{advice.num_judged} requests are few: record more before you rely on this.")
    share = advice.looping_share
    if share:
        found.append(
            f"{share:.1%} of the requests end in verbatim repetition, which flatters prompt lookup; "
            "the columns without looping leave them out."
        )
    if not cost.measured:
        found.append(f"The pass times of {cost.name} are modelled, not measured.")
    if advice.extrapolation is not None:
        found.append(advice.extrapolation + _extrapolated_loads(advice.loads))
    if info.drafter == "draft-model" and cost.drafter_is_free:
        found.append(
            f"The pass times of {cost.name} hold no draft passes, so drafting is free here; a draft "
            "model's is not (specdepth profile --draft)."
        )
    if info.source == "outputs":
        found.append(
            "The texts are from a log: of greedy decoding they are what an engine would do again; "
            "sampled ones are one draw of many, and others would have other runs."
        )
    elif info.temperature:
        found.append(
            f"The texts were sampled at temperature {info.temperature:g}, one draw a request; replay is "
            "exact under coupled sampling, where text does not depend on depths."
        )
    if info.drafter == "draft-model" and info.temperature:
        found.append(
            "Rejection sampling, which engines use, accepts a little more of a draft model than the "
            "coupled sampling of this trace."
        )
    found.append("The computing time of a per-sequence policy is not in these figures.")
    return found


def sweep_grid(advice: Advice) -> Grid:
    """Throughput of fixed depths over none, on the training half."""
    depths = list(advice.loads[0].sweep)
    rows, best = [], []
    for number, one in enumerate(advice.loads):
        figures = list(one.sweep.values())
        rows.append((str(one.load), *(f"{figure:.2f}" for figure in figures)))
        best.append((number, 1 + figures.index(max(figures))))
    header = ("load", *("off" if not depth else f"depth {depth}" for depth in depths))
    title = "Fixed depths, throughput over off (requests that depths are chosen on)"
    return Grid(title=title, header=header, rows=tuple(rows), best=tuple(best))


def judged_grid(advice: Advice) -> Grid:
    """What the table and finer control are worth on the other half."""
    header = [
        "load",
        "table's depth",
        "pays",
        "table / off",
        "per-sequence / off",
        "per-sequence / table",
        "hindsight / off",
    ]
    with_others = any(one.table_without_looping is not None for one in advice.loads)
    if with_others:
        header += ["without looping: table / off", "per-sequence / off"]
    rows = []
    for one in advice.loads:
        row = [
            str(one.load),
            f"{one.depth}{'*' if one.extrapolated else ''}",
            one.pays,
            ratio_cell(one.table),
            f"{one.rule.value:.2f}",
            ratio_cell(one.rule_gain),
            f"{one.oracle:.2f}",
        ]
        if with_others:
            others = (one.table_without_looping, one.rule_without_looping)
            row += ["" if ratio is None else f"{ratio.value:.2f}" for ratio in others]
        rows.append(tuple(row))
    title = "Throughput on other requests"
    return Grid(title=title, header=tuple(header), rows=tuple(rows))


def as_mapping(advice: Advice) -> dict[str, Any]:
    """All numbers, as JSON values."""
    cost = advice.cost
    return {
        "model_pair": advice.info.model_pair,
        "drafter": advice.info.drafter,
        "cost": cost.name,
        "cost_is_measured": cost.measured,
        "knee_tokens": cost.knee_tokens(),
        "free_tokens": cost.free_tokens(),
        "largest_priced_pass_tokens": cost.tokens[-1],
        "extrapolation": advice.extrapolation,
        "num_training_requests": advice.num_training,
        "num_judged_requests": advice.num_judged,
        "looping_share": advice.looping_share,
        "table": [list(entry) for entry in advice.table.ranges],
        "off_above": advice.off_above,
        "max_load": advice.max_load,
        "best_single_depth": advice.best_single,
        "rule": repr(advice.rule),
        "means": {
            "table_over_off": advice.mean("table"),
            "rule_over_off": advice.mean("rule"),
            "rule_over_table": advice.mean("rule_gain"),
            "oracle_over_off": advice.mean("oracle"),
        },
        "loads": [_load_mapping(one) for one in advice.loads],
        "sentences": sentences(advice),
        "caveats": caveats(advice),
    }


def _load_mapping(one: LoadAdvice) -> dict[str, Any]:
    return {
        "load": one.load,
        "depth": one.depth,
        "pays": one.pays,
        "sweep_over_off": {str(depth): ratio for depth, ratio in one.sweep.items()},
        "table_over_off": ratio_values(one.table),
        "rule_over_off": ratio_values(one.rule),
        "rule_over_table": ratio_values(one.rule_gain),
        "oracle_over_off": one.oracle,
        "table_over_off_without_looping": ratio_values(one.table_without_looping),
        "rule_over_off_without_looping": ratio_values(one.rule_without_looping),
        "extrapolated": one.extrapolated,
    }


def ratio_values(ratio: Interval | None) -> dict[str, float | None] | None:
    """A ratio with its interval, as JSON values."""
    if ratio is None:
        return None
    low, high = ratio.bounds
    return {"value": ratio.value, "ci_low": low, "ci_high": high}


def _knee(advice: Advice) -> str:
    cost, last = advice.cost, advice.cost.tokens[-1]
    knee, free = cost.knee_tokens(), cost.free_tokens()
    if knee > last and free >= last:
        return (
            f"Knee: none up to {last} packed tokens, the largest pass priced: all take about the time "
            "of one."
        )
    where = f"{knee} packed tokens" if knee <= last else f"more than the {last} tokens priced"
    joined = {0: "no other token rides", 1: "1 more token rides"}.get(
        free, f"{free} more tokens ride"
    )
    return (
        f"Knee: a pass of {where} takes twice the time of one token; {joined} along for at most 10 % "
        "more time. A batch of B at depth k is B x (1 + k) tokens."
    )


def _pays(advice: Advice) -> str:
    by: dict[Verdict, list[str]] = {"yes": [], "unclear": [], "no": []}
    for one in advice.loads:
        by[one.pays].append(str(one.load))
    words = {"yes": "pays at load", "unclear": "is not clear at load", "no": "does not pay at load"}
    parts = [f"{words[verdict]} {', '.join(loads)}" for verdict, loads in by.items() if loads]
    return f"Speculation {'; it '.join(parts)}."


def _switch(advice: Advice) -> str:
    above = advice.off_above
    if above is None:
        return (
            f"Switch it off: at no batch size replayed, which were up to {advice.max_load}; higher "
            "--loads look further."
        )
    if not above:
        return "Switch it off: at every batch size."
    return f"Switch it off: above {above} running sequences."


def _table(advice: Advice) -> str:
    single = f"depth {advice.best_single}" if advice.best_single else "off"
    return (
        f"Best table: {table_name(advice.table)}; over these loads its throughput is "
        f"{advice.mean('table'):.2f}x that without speculation (geometric mean). If there must be one "
        f"depth for all of them: {single}."
    )


def _finer(advice: Advice) -> str:
    gains = {one.load: one.rule_gain.value - 1 for one in advice.loads}
    least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    span = f", from {gains[least]:+.1%} at load {least} to {gains[most]:+.1%} at load {most}"
    mean = advice.mean("rule_gain") - 1
    verdict = (
        f"adds {mean:+.1%} to the table" if mean > 0 else f"does not beat the table ({mean:+.1%})"
    )
    return (
        f"A policy with a depth for each sequence {verdict} on average"
        f"{span if least != most else ''}. It reaches {advice.mean('rule'):.2f}x; the best depths of "
        f"each round in hindsight, which nobody can know, {advice.mean('oracle'):.2f}x."
    )


def _extrapolated_loads(loads: Sequence[LoadAdvice]) -> str:
    found = [str(one.load) for one in loads if one.extrapolated]
    if not found:
        return " The table's own depths are within what was priced."
    return f" That includes the table's depth at load {', '.join(found)} (*)."


def ratio_cell(ratio: Interval) -> str:
    """A ratio with its interval, for a table."""
    low, high = ratio.bounds
    bounds = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{ratio.value:.2f}{bounds}"
