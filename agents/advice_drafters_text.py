"""What a `DrafterComparison` says: sentences and a table for people, JSON values for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from .advice_drafters import DrafterComparison, DrafterVerdict, Judged
from .advice_text import as_mapping, ratio_cell, ratio_values
from .tables import Grid

PRICE_TOLERANCE = 0.02
"""Passes without drafts whose prices are further apart are mentioned."""
_LEAD: dict[Judged, str] = {"table": "By their tables", "rule": "With a depth for each sequence"}


def drafter_sentences(found: DrafterComparison) -> list[str]:
    """Which drafter for which load, and which one the settings are for."""
    return [*(_sentence(found, judged) for judged in found.by), _choice(found)]


def drafter_caveats(found: DrafterComparison) -> list[str]:
    """What the comparison rests on."""
    notes = [
        "Each drafter is compared with decoding without speculation at its own pass times; drafters are "
        "compared by these ratios, on the same requests."
    ]
    loads = [one.load for one in next(iter(found.advice.values())).loads]
    prices = [[one.cost.pass_s(load) for load in loads] for one in found.advice.values()]
    apart = max(max(at) / min(at) for at in zip(*prices, strict=True)) - 1
    if apart > PRICE_TOLERANCE:
        notes.append(
            f"Their pass times without drafts are up to {apart:.0%} apart: other machines, the noise of "
            "one, or a drafter that makes the target's passes slower; only the last would be a loss that "
            "the ratios do not show."
        )
    if found.share_of_other_lengths:
        notes.append(
            f"{found.share_of_other_lengths:.1%} of the texts have another length in another trace: in "
            "low precision, rounding decides near ties."
        )
    if (means := _means_without_looping(found)) is not None:
        notes.append(
            "Without requests that end in verbatim repetition, which flatters prompt lookup, the tables "
            f"give over no speculation: {means} (geometric means)."
        )
    return notes


def drafter_grid(found: DrafterComparison) -> Grid:
    """Throughput over off with each drafter, by load, on the half that nothing was chosen on."""
    header = ["load"]
    for name in found.advice:
        header += [f"{name}: table / off", "per-sequence / off"]
    header += ["best table", "best per sequence"]
    rows = []
    for place, verdicts in enumerate(zip(found.by["table"], found.by["rule"], strict=True)):
        row = [str(verdicts[0].load)]
        for advice in found.advice.values():
            one = advice.loads[place]
            row += [ratio_cell(one.table), ratio_cell(one.rule)]
        rows.append((*row, *map(_short, verdicts)))
    title = "Drafters, throughput over off on other requests"
    return Grid(title=title, header=tuple(header), rows=tuple(rows))


def drafters_mapping(found: DrafterComparison, traces: dict[str, str]) -> dict[str, Any]:
    """All numbers, as JSON values.

    Args:
        found: the comparison.
        traces: file or name of each drafter's trace, by the drafter's name.
    """
    return {
        "best": found.best,
        "share_of_other_lengths": found.share_of_other_lengths,
        "by": {
            judged: [_verdict_mapping(one) for one in verdicts]
            for judged, verdicts in found.by.items()
        },
        "compared": [
            {"name": name, "trace": traces[name]} | as_mapping(advice)
            for name, advice in found.advice.items()
        ],
        "sentences": drafter_sentences(found),
        "caveats": drafter_caveats(found),
    }


def _verdict_mapping(one: DrafterVerdict) -> dict[str, Any]:
    return {
        "load": one.load,
        "best": one.best,
        "pays": one.pays,
        "no_clear_difference": list(one.level),
        "best_over": {name: ratio_values(ratio) for name, ratio in one.over.items()},
    }


def _sentence(found: DrafterComparison, judged: Judged) -> str:
    spans = [list(group) for _, group in groupby(found.by[judged], key=_key)]
    said = [
        f"{_where(number, spans)} {_what(found, judged, span)}" for number, span in enumerate(spans)
    ]
    return f"{_LEAD[judged]}: {'; '.join(said)}."


def _key(one: DrafterVerdict) -> tuple[str, frozenset[str]]:
    """What neighbouring loads must have in common to be spoken of together."""
    names = (one.best, *one.level) if one.pays == "yes" else ()
    return one.pays, frozenset(names)


def _where(number: int, spans: Sequence[Sequence[DrafterVerdict]]) -> str:
    low, high = spans[number][0].load, spans[number][-1].load
    if len(spans) == 1:
        return f"at load {low}" if low == high else f"at all loads from {low} to {high}"
    if number == 0:
        return f"up to {high} request{'s' if high > 1 else ''}"
    if number == len(spans) - 1:
        return f"from {low} on"
    return f"at {low}" if low == high else f"from {low} to {high}"


def _what(found: DrafterComparison, judged: Judged, span: Sequence[DrafterVerdict]) -> str:
    one, count = span[0], len(found.advice)
    none = "neither" if count == 2 else "none"
    if one.pays == "no":
        return f"{none} pays"
    if one.pays == "unclear":
        return f"{none} clearly pays"
    loads = {verdict.load for verdict in span}
    figures = ", ".join(
        f"{name} {_mean([getattr(at, judged).value for at in advice.loads if at.load in loads]):.2f}"
        for name, advice in found.advice.items()
    )
    if one.level:
        names = [name for name in found.advice if name in (one.best, *one.level)]
        said = f"there is no clear difference between {' and '.join(map(_the, names))}"
    else:
        said = f"{_the(one.best)} is {'faster' if count == 2 else 'fastest'}"
    return f"{said} (over no speculation: {figures})"


def _means_without_looping(found: DrafterComparison) -> str | None:
    """Of the tables, over the loads that have such figures with all drafters; None without any."""
    ratios = {
        name: [one.table_without_looping for one in advice.loads]
        for name, advice in found.advice.items()
    }
    places = [at for at, some in enumerate(zip(*ratios.values(), strict=True)) if None not in some]
    if not places:
        return None
    means = {
        name: _mean([ratio.value for at in places if (ratio := one[at]) is not None])
        for name, one in ratios.items()
    }
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def _choice(found: DrafterComparison) -> str:
    means = ", ".join(f"{name} {one.mean('table'):.2f}" for name, one in found.advice.items())
    return (
        f"What follows, settings included, is for {_the(found.best)}, whose table is the best over these "
        f"loads (geometric mean over no speculation: {means})."
    )


def _the(name: str) -> str:
    """A drafter's name as part of a sentence."""
    return f"the {name}" if name.startswith("draft model") else name


def _short(one: DrafterVerdict) -> str:
    if one.pays != "yes":
        return "none" if one.pays == "no" else "none clearly"
    return "no clear difference" if one.level else one.best


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
