from __future__ import annotations

import re

import pytest

from specdepth.agents.decision_log import QUANTITIES, timeline_name
from specdepth.agents.lab_plots import decision_map, ranking_plot, timeline_plot
from specdepth.agents.plots import line_styles
from specdepth.agents.results import ResultRow, Results, Series


def row(policy: str, load: int | str, metric: str, value: float, margin: float = 0.0) -> ResultRow:
    bounds = {"ci_low": value - margin, "ci_high": value + margin} if margin else {}
    return ResultRow(policy=policy, load=load, metric=metric, value=value, unit="x", **bounds)


def text_of(svg: str) -> str:
    found = re.match(r'<svg role="img" aria-label="([^"]*)"', svg)
    assert found is not None
    return found.group(1)


def mapped(signal: str, second: int) -> Results:
    rows = [
        row("mine", load, f"{kind}_at_{signal}_{at}", value)
        for kind, values in {"depth": (0.5, 3.25), "rounds": (30.0, 10.0)}.items()
        for load in (1, "varying")
        for at, value in zip((0, second), values, strict=True)
    ]
    return Results(command="x", rows=(*rows, row("other", 1, f"depth_at_{signal}_7", 1.0)))


def test_a_decision_map_tells_mean_depths_by_match_length() -> None:
    svg = decision_map(mapped("match", 4), "mine")
    assert svg is not None
    expected = "load 1: 0.50 at 0, 3.25 at 4; load varying: 0.50 at 0, 3.25 at 4."
    assert expected in text_of(svg)


def test_with_a_draft_model_the_map_goes_by_survival_in_percent() -> None:
    svg = decision_map(mapped("survival", 60), "mine")
    assert svg is not None
    assert "estimated survival of the first token (%)" in text_of(svg)
    assert "load 1: 0.50 at 0-20, 3.25 at 60-80" in text_of(svg)


def test_a_cell_that_never_occurred_stays_empty() -> None:
    rows = mapped("match", 4).rows
    gap = [one for one in rows if not (one.load == 1 and one.metric.endswith("_4"))]
    svg = decision_map(Results(command="x", rows=tuple(gap)), "mine")
    assert svg is not None
    assert "load 1: 0.50 at 0; load varying: 0.50 at 0, 3.25 at 4." in text_of(svg)
    assert "nan" not in svg.lower()


def test_a_policy_that_was_not_watched_has_no_map() -> None:
    assert decision_map(mapped("match", 4), "absent") is None


def days(*policies: str) -> dict[str, Series]:
    return {
        timeline_name("varying", quantity, name): Series(
            x=(1.0, 3.0), y=(2.0, 4.0), x_label="time (s)", y_label=label
        )
        for name in policies
        for quantity, label in QUANTITIES.items()
    }


def test_a_timeline_has_a_panel_for_each_quantity_and_says_who_is_in_it() -> None:
    rows = tuple(row(name, 1, "speedup", 1.0) for name in ("mine", "table", "other"))
    results = Results(command="x", rows=rows, series=days("mine", "table"))
    found = timeline_plot(results, "varying", line_styles(results.policies, "mine"))
    assert found is not None
    svg, policies = found
    assert policies == ["mine", "table"]
    assert svg.count("-axes_") == 3
    for label in QUANTITIES.values():
        assert f"mine, {label}: 3.00 on average" in text_of(svg)


def test_an_incomplete_timeline_is_left_out() -> None:
    series = days("mine")
    series.pop(timeline_name("varying", "kv", "mine"))
    results = Results(command="x", rows=(row("mine", 1, "speedup", 1.0),), series=series)
    assert timeline_plot(results, "varying", line_styles(["mine"], "mine")) is None


def test_a_ranking_lists_the_best_first_and_skips_whom_it_does_not_know() -> None:
    rows = (row("a", "ramp", "speedup", 1.1, 0.2), row("b", "ramp", "speedup", 1.4))
    results = Results(command="x", rows=rows)
    svg = ranking_plot(results, "ramp", "speedup", "x of off", {}, ["a", "b", "c"], 1.0)
    assert svg is not None
    assert text_of(svg) == "Dot plot: x of off, load ramp. b 1.400, a 1.100."


@pytest.mark.parametrize("load", [1, "absent"])
def test_a_ranking_without_rows_is_left_out(load: int | str) -> None:
    results = Results(command="x", rows=(row("a", "ramp", "speedup", 1.1),))
    assert ranking_plot(results, load, "speedup", "x", {}, ["a"]) is None
