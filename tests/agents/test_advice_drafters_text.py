from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdepth.agents.advice import Advice, LoadAdvice, pays
from specdepth.agents.advice_drafters import DrafterComparison, DrafterVerdict
from specdepth.agents.advice_drafters_text import (
    drafter_caveats,
    drafter_grid,
    drafter_sentences,
    drafters_mapping,
)
from specdepth.agents.advice_text import as_mapping
from specdepth.agents.intervals import Interval
from specdepth.agents.load_runs import LoadRuns
from specdepth.decoder.trace import TraceInfo
from specdepth.scheduler.baselines import TableDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.survival_estimators import MatchLengthSurvival

LOADS = (1, 4, 16, 32)
LOOKUP, DRAFT, OTHER = "prompt lookup", "draft model org/x", "draft model y"
COST = CostModel.linear(base_s=0.05, token_s=0.001, name="linear")


def interval(value: float, half_width: float = 0.01) -> Interval:
    return Interval(value, value - half_width, value + half_width)


def advice_of(
    ratios: Sequence[float], drafter: str = "prompt lookup", cost: CostModel = COST
) -> Advice:
    """With a table, and a rule, of these ratios at `LOADS`; at exactly 1 the table is off."""
    loads = tuple(
        LoadAdvice(
            load=load,
            sweep={0: 1.0, 2: ratio},
            depth=0 if ratio == 1 else 2,
            table=interval(ratio),
            rule=interval(ratio),
            rule_gain=interval(1.0),
            oracle=ratio,
            table_without_looping=None,
            rule_without_looping=None,
            extrapolated=False,
            runs=LoadRuns(()),
        )
        for load, ratio in zip(LOADS, ratios, strict=False)
    )
    is_lookup = drafter == LOOKUP
    return Advice(
        info=TraceInfo(
            model_pair=f"big+{drafter}",
            drafter="prompt-lookup" if is_lookup else "draft-model",
            max_num_speculative_tokens=4,
        ),
        cost=cost,
        num_training=60,
        num_judged=70,
        looping_share=0.0,
        loads=loads,
        table=TableDepth.parse("1-8=2,9-=0"),
        best_single=2,
        rule=CappedGreedyDepth(MatchLengthSurvival()),
        extrapolation=None,
    )


def comparison(
    advice: dict[str, Advice], clear: float = 0.05, others: float = 0.0
) -> DrafterComparison:
    """Drafters whose ratios are nearer to each other than `clear` are level."""
    verdicts = []
    for place, load in enumerate(LOADS[: len(next(iter(advice.values())).loads)]):
        at = {name: one.loads[place] for name, one in advice.items()}
        best = max(at, key=lambda name: at[name].table.value)
        over = {
            name: interval(at[best].table.value / one.table.value, clear)
            for name, one in at.items()
            if name != best
        }
        verdicts.append(DrafterVerdict(load=load, best=best, pays=pays(at[best].table), over=over))
    by = tuple(verdicts)
    return DrafterComparison(
        advice=advice, by={"table": by, "rule": by}, share_of_other_lengths=others
    )


def table_sentence(lookup: Sequence[float], draft: Sequence[float]) -> str:
    found = comparison({LOOKUP: advice_of(lookup), DRAFT: advice_of(draft, DRAFT)})
    first, second, _ = drafter_sentences(found)
    lead, _, said = first.partition(": ")
    assert lead == "By their tables"
    assert second == f"With a depth for each sequence: {said}"
    return said


def test_the_draft_model_below_prompt_lookup_above_then_neither() -> None:
    assert table_sentence([1.18, 1.18, 1.10, 0.98], [1.31, 1.31, 1.02, 0.97]) == (
        "up to 4 requests the draft model org/x is faster (over no speculation: prompt lookup 1.18, "
        "draft model org/x 1.31); at 16 prompt lookup is faster (over no speculation: prompt lookup "
        "1.10, draft model org/x 1.02); from 32 on neither pays."
    )


def test_figures_of_several_loads_are_geometric_means() -> None:
    mean = math.sqrt(1.2 * 1.8)
    text = table_sentence([1.1, 1.1, 1.0, 1.0], [1.2, 1.8, 1.0, 1.0])
    assert f"draft model org/x {mean:.2f}" in text


def test_a_tie_is_said_to_be_one() -> None:
    assert table_sentence([1.21, 1.2], [1.2, 1.21]) == (
        "at all loads from 1 to 4 there is no clear difference between prompt lookup and the draft "
        "model org/x (over no speculation: prompt lookup 1.20, draft model org/x 1.20)."
    )


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([0.98], "at load 1 neither pays."),
        ([0.9, 0.8], "at all loads from 1 to 4 neither pays."),
        ([1.005], "at load 1 neither clearly pays."),
        ([1.005, 0.9], "up to 1 request neither clearly pays; from 4 on neither pays."),
    ],
)
def test_where_neither_pays_no_winner_is_named(ratios: list[float], said: str) -> None:
    assert table_sentence([ratio - 0.02 for ratio in ratios], ratios) == said


def test_more_than_two_drafters_are_compared_in_one_sentence() -> None:
    found = comparison(
        {
            LOOKUP: advice_of([1.1, 1.1, 0.9]),
            DRAFT: advice_of([1.3, 1.3, 0.9], DRAFT),
            OTHER: advice_of([1.2, 1.31, 0.8], OTHER),
        }
    )
    assert drafter_sentences(found)[0] == (
        "By their tables: up to 1 request the draft model org/x is fastest (over no speculation: "
        "prompt lookup 1.10, draft model org/x 1.30, draft model y 1.20); at 4 there is no clear "
        "difference between the draft model org/x and the draft model y (over no speculation: prompt "
        "lookup 1.10, draft model org/x 1.30, draft model y 1.31); from 16 on none pays."
    )


def test_the_last_sentence_says_whose_settings_follow() -> None:
    found = comparison({LOOKUP: advice_of([1.1, 1.1]), DRAFT: advice_of([1.4, 1.0], DRAFT)})
    assert drafter_sentences(found)[-1] == (
        "What follows, settings included, is for the draft model org/x, whose table is the best over "
        "these loads (geometric mean over no speculation: prompt lookup 1.10, draft model org/x 1.18)."
    )


def test_the_grid_has_a_row_for_each_load() -> None:
    found = comparison(
        {LOOKUP: advice_of([1.1, 1.2, 0.9]), DRAFT: advice_of([1.3, 1.21, 0.8], DRAFT)}
    )
    grid = drafter_grid(found)
    assert grid.header == (
        "load",
        "prompt lookup: table / off",
        "per-sequence / off",
        "draft model org/x: table / off",
        "per-sequence / off",
        "best table",
        "best per sequence",
    )
    cell = "1.10 [1.09, 1.11]"
    assert grid.rows[0] == ("1", cell, cell, *["1.30 [1.29, 1.31]"] * 2, DRAFT, DRAFT)
    assert [row[-1] for row in grid.rows] == [DRAFT, "no clear difference", "none"]


def test_caveats_name_prices_and_texts_that_differ() -> None:
    same = {LOOKUP: advice_of([1.1]), DRAFT: advice_of([1.2], DRAFT)}
    assert len(drafter_caveats(comparison(same))) == 1
    slower = CostModel.linear(base_s=0.06, token_s=0.001, name="slower")
    other = comparison({**same, DRAFT: advice_of([1.2], DRAFT, slower)}, others=0.125)
    _, prices, texts = drafter_caveats(other)
    assert "up to 20% apart" in prices
    assert texts.startswith("12.5% of the texts have another length")


def test_figures_without_looping_requests_stand_beside_each_other() -> None:
    def without(advice: Advice, *ratios: float | None) -> Advice:
        loads = tuple(
            replace(one, table_without_looping=None if ratio is None else interval(ratio))
            for one, ratio in zip(advice.loads, ratios, strict=True)
        )
        return replace(advice, loads=loads)

    lookup, draft = advice_of([1.5, 1.5, 1.5]), advice_of([1.2, 1.2, 1.2], DRAFT)
    found = comparison(
        {LOOKUP: without(lookup, 1.1, 1.1, 1.3), DRAFT: without(draft, 1.2, 1.2, None)}
    )
    assert drafter_caveats(found)[-1] == (
        "Without requests that end in verbatim repetition, which flatters prompt lookup, the tables "
        "give over no speculation: prompt lookup 1.10, draft model org/x 1.20 (geometric means)."
    )
    none = comparison({LOOKUP: without(lookup, 1.1, None, None), DRAFT: draft})
    assert "repetition" not in " ".join(drafter_caveats(none))


def test_json_has_all_numbers() -> None:
    found = comparison(
        {LOOKUP: advice_of([1.1, 0.9]), DRAFT: advice_of([1.375, 0.9], DRAFT)}, others=0.25
    )
    values = drafters_mapping(found, {LOOKUP: "lookup.npz", DRAFT: "draft.npz"})
    compared = values.pop("compared")
    over = {LOOKUP: {"value": 1.25, "ci_low": 1.2, "ci_high": 1.3}}
    rows = [
        {"load": 1, "best": DRAFT, "pays": "yes", "no_clear_difference": [], "best_over": over},
        {
            "load": 4,
            "best": LOOKUP,
            "pays": "no",
            "no_clear_difference": [DRAFT],
            "best_over": {DRAFT: {"value": 1.0, "ci_low": 0.95, "ci_high": 1.05}},
        },
    ]
    assert json.loads(json.dumps(values, allow_nan=False)) == {
        "best": DRAFT,
        "share_of_other_lengths": 0.25,
        "by": {"table": rows, "rule": rows},
        "sentences": drafter_sentences(found),
        "caveats": drafter_caveats(found),
    }
    assert [(one.pop("name"), one.pop("trace")) for one in compared] == [
        (LOOKUP, "lookup.npz"),
        (DRAFT, "draft.npz"),
    ]
    assert compared == [as_mapping(one) for one in found.advice.values()]
