from __future__ import annotations

from dataclasses import replace

import pytest

from specdepth.agents.ablate_summary import (
    ALL_LOADS,
    load_grid,
    notes_of,
    result_rows,
    summarise,
    summary_grid,
)
from specdepth.agents.ablate_table import RATIO, tidy_rows
from specdepth.agents.results import Results
from tests.agents.made_ablation import LOADS, done, made_ablation

ROWS = tidy_rows(made_ablation())
FOUND = {one.variant: one for one in summarise(ROWS)}


def test_rules_and_variants_are_summed_up_and_fixed_depths_are_not() -> None:
    assert list(FOUND) == ["rule:made", "base", "better", "worse"]
    assert [one.num_seeds for one in FOUND.values()] == [1, 2, 2, 2]


def test_the_interquartile_mean_is_over_seeds_and_loads() -> None:
    # Of 1, 1, 1, 1.1, 1.04, 1.04 one is cut off at each end.
    assert FOUND["base"].iqm.value == pytest.approx((1.0 + 1.0 + 1.04 + 1.04) / 4)
    assert FOUND["base"].iqm.low <= FOUND["base"].iqm.value <= FOUND["base"].iqm.high


def test_improvement_is_against_the_base() -> None:
    assert FOUND["base"].improvement is None
    better, worse = FOUND["better"].improvement, FOUND["worse"].improvement
    assert better is not None
    assert worse is not None
    # Load 1: 1.1 and 1.2 against 1.0 and 1.1: three pairs and a tie; elsewhere all.
    assert better.value == pytest.approx((3.5 / 4 + 1 + 1) / 3)
    assert worse.value == 0.0


def test_the_lowest_load_shows_what_the_interquartile_mean_cuts_off() -> None:
    assert FOUND["worse"].worst_load == 1
    assert FOUND["worse"].by_load[1].value == pytest.approx(0.5)
    assert FOUND["worse"].worst_vs_off == pytest.approx(0.8)


def test_without_a_base_there_is_nothing_to_improve_on() -> None:
    cells = {cell: one for cell, one in made_ablation().done.items() if cell[0] != "base"}
    rows = tidy_rows(replace(made_ablation(), done=cells))
    assert all(one.improvement is None for one in summarise(rows))


def test_results_are_in_the_house_format() -> None:
    results = Results(command="x", rows=tuple(result_rows(list(FOUND.values()))))
    assert results.policies == list(FOUND)
    assert results.loads == [*LOADS, ALL_LOADS]
    row = results.find("better", ALL_LOADS, "probability_of_improvement")
    assert row is not None
    assert row.ci_low is not None
    assert row.unit == "share"
    assert results.find("rule:made", 1, RATIO).ci_low is None  # type: ignore[union-attr]
    assert results.find("base", ALL_LOADS, "probability_of_improvement") is None


def test_tables_have_a_line_a_variant() -> None:
    found = list(FOUND.values())
    summary = {row[0]: row for row in summary_grid(found).rows}
    assert summary["base"][1:4] == ("base", "2", "1.020 [1.000, 1.055]")
    assert summary["worse"][6:] == ("0.500 at load 1", "0.800")
    loads = load_grid(found)
    assert loads.header == ("variant", "load 1 (x)", "load 4 (x)", "varying (x)")
    assert loads.rows[0] == ("rule:made", "1.050", "1.020", "1.040")
    assert (2, 1) in loads.best
    assert len(loads.best) == 3


def test_notes_say_how_much_was_run() -> None:
    (note,) = notes_of(made_ablation())
    assert note.startswith("6 of 6 runs, 1.0 to 1.0 minutes of training each.")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"short": 1.0}, "1 runs of worse were cut by the wall limit"),
        ({"timesteps": 32.0}, "Not all runs had the same number of timesteps: 32 to 64"),
    ],
)
def test_notes_say_what_does_not_compare(change: dict[str, float], sentence: str) -> None:
    ablation = made_ablation()
    cells = {
        **ablation.done,
        ("worse", 1): done(ablation.done["worse", 1].rows, sha="abc", **change),
    }
    notes = notes_of(replace(ablation, done=cells))
    assert any(sentence in note for note in notes)


def test_notes_name_failures_and_different_code() -> None:
    ablation = made_ablation()
    cells = {**ablation.done, ("worse", 1): done(ablation.done["worse", 1].rows, sha="other")}
    notes = notes_of(replace(ablation, done=cells, failures={"base, seed 3": "it broke."}))
    assert "Failed: base, seed 3: it broke." in notes
    assert "Runs come from different commits of the code." in notes
