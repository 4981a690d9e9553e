from __future__ import annotations

import pytest

from specdepth.agents.highlights import (
    best_fixed,
    choose_highlights,
    is_fixed,
    is_learned,
    strongest_first,
)
from specdepth.agents.results import ResultRow, Results

FIXED = ["off", *(f"fixed:{depth}" for depth in range(1, 9))]
RULES = [f"rule-{number}" for number in range(12)]
ORACLES = ["oracle:hindsight", "oracle:one-depth", "oracle:best-fixed"]


def results_of(throughput: dict[str, float]) -> Results:
    rows = [
        ResultRow(policy=policy, load=load, metric="throughput_tok_s", value=value, unit="tok/s")
        for load in (1, 4, "varying")
        for policy, value in throughput.items()
    ]
    return Results(command="x", rows=tuple(rows))


def many() -> Results:
    throughput = dict.fromkeys(FIXED, 10.0)
    throughput |= {name: 20.0 + number for number, name in enumerate(RULES)}
    throughput |= dict.fromkeys(
        ["tuned-table", "best-single-fixed", "policy:runs/a", *ORACLES], 12.0
    )
    return results_of(throughput)


def test_few_policies_all_stand_out() -> None:
    shown = choose_highlights(results_of(dict.fromkeys(FIXED, 1.0)), "fixed:3")
    assert list(shown.names) == FIXED
    assert shown.rest == ()


def test_of_many_the_subject_references_learned_policies_and_the_strongest_stand_out() -> None:
    shown = choose_highlights(many(), "rule-2")
    picked = ["off", "rule-2", "rule-9", "rule-10", "rule-11"]
    assert list(shown.names) == [*picked, "tuned-table", "policy:runs/a", *ORACLES]
    assert {*shown.names, *shown.rest} == set(many().policies)
    assert not set(shown.names) & set(shown.rest)


def test_the_best_fixed_depth_is_an_alias_where_there_is_one() -> None:
    assert best_fixed(many()) == "oracle:best-fixed"
    assert best_fixed(results_of({"off": 9.0, "fixed:1": 2.0, "fixed:2": 3.0})) == "fixed:2"
    assert best_fixed(results_of({"heuristic": 1.0})) is None


def test_strength_is_the_geometric_mean_over_all_loads() -> None:
    rows = [
        ResultRow(policy=policy, load=load, metric="throughput_tok_s", value=value, unit="tok/s")
        for policy, values in {"a": (1.0, 16.0), "b": (5.0, 5.0), "c": (9.0,)}.items()
        for load, value in zip((1, 2), values, strict=False)
    ]
    # Geometric means 4 and 5; the arithmetic ones are 8.5 and 5. "c" was not run at load 2.
    assert strongest_first(Results(command="x", rows=tuple(rows)), ["a", "b", "c"]) == ["b", "a"]


@pytest.mark.parametrize("name", ["learned", "learned-2", "policy:runs/a", "runs/a/policy"])
def test_a_learned_policy_is_known_by_its_name(name: str) -> None:
    assert is_learned(name)


@pytest.mark.parametrize("name", ["table:runs/t.json", "rule:runs/r.json", "heuristic", "fixed:4"])
def test_rules_from_files_are_not_learned(name: str) -> None:
    assert not is_learned(name)


def test_constant_depths_are_fixed() -> None:
    assert [is_fixed(x) for x in ("off", "fixed:2", "best-single-fixed")] == [True] * 3
    assert not is_fixed("tuned-table")
