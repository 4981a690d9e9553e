from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdepth.agents.ablate_table import (
    RATIO,
    TidyRow,
    as_csv,
    best_fixed,
    loads_of,
    score_matrix,
    tidy_rows,
)
from tests.agents.made_ablation import GRID, LOADS, done, made_ablation, speeds

GOLDEN = """\
variant,dimension,seed,load,metric,value,unit,baseline,baseline_value
off,reference,,1,throughput_tok_s,10.0,tok/s,fixed:2,16.0
off,reference,,1,ratio_to_best_fixed,0.625,x,fixed:2,1.0
off,reference,,1,speedup,1.0,x,off,1.0
fixed:2,reference,,1,throughput_tok_s,16.0,tok/s,fixed:2,16.0
fixed:2,reference,,1,ratio_to_best_fixed,1.0,x,fixed:2,1.0
fixed:2,reference,,1,speedup,1.6,x,off,1.0
base,base,0,1,throughput_tok_s,20.0,tok/s,fixed:2,16.0
base,base,0,1,ratio_to_best_fixed,1.25,x,fixed:2,1.0
base,base,0,1,speedup,2.0,x,off,1.0
base,base,0,training,timesteps,64.0,,,
base,base,0,training,updates,1.0,,,
base,base,0,training,rounds,16.0,,,
base,base,0,training,decisions,40.0,,,
"""


def test_the_table_is_tidy() -> None:
    ablation = replace(
        made_ablation(),
        grid=replace(GRID, variants=(), seeds=(0,)),
        references=done((speeds("off", (10.0, 0.0, 0.0))[0], speeds("fixed:2", (16.0, 0, 0))[0])),
        done={("base", 0): done(speeds("learned", (20.0, 0.0, 0.0))[:1])},
    )
    assert as_csv(tidy_rows(ablation)) == GOLDEN


def test_the_best_fixed_depth_is_one_for_each_load_and_no_rule() -> None:
    found = best_fixed(made_ablation().references.rows)
    assert found == {1: "fixed:2", 4: "fixed:1", "varying": "fixed:1"}


def test_loads_come_in_order_and_without_training() -> None:
    assert loads_of(tidy_rows(made_ablation())) == [1, 4, "varying"]


def test_scores_are_ratios_a_row_a_seed() -> None:
    rows = tidy_rows(made_ablation())
    scores = score_matrix(rows, "base", LOADS)
    assert scores == pytest.approx(np.array([[1.0, 1.0, 1.0], [1.1, 1.04, 1.04]]))
    assert score_matrix(rows, "rule:made", LOADS).shape == (1, 3)


def test_a_seed_that_lacks_a_load_is_refused() -> None:
    rows = [row for row in tidy_rows(made_ablation()) if (row.seed, row.load) != (1, 4)]
    with pytest.raises(ValueError, match=r"base, seed 1 was judged at \[1, 'varying'\]"):
        score_matrix(rows, "base", LOADS)


def test_runs_that_failed_are_left_out() -> None:
    ablation = made_ablation()
    cells = {cell: one for cell, one in ablation.done.items() if cell != ("worse", 1)}
    rows = tidy_rows(replace(ablation, done=cells))
    assert {row.seed for row in rows if row.variant == "worse"} == {0}


def test_what_a_search_found_is_a_variant_of_its_own() -> None:
    ablation = made_ablation()
    cell = ablation.done["better", 0]
    both = replace(cell, rows=(*cell.rows, *speeds("searched", (16.0, 50.0, 25.0))))
    rows = tidy_rows(replace(ablation, done={**ablation.done, ("better", 0): both}))
    own = [row for row in rows if row.variant == "better.searched"]
    assert {(row.dimension, row.seed) for row in own} == {("luck", 0)}
    assert score_matrix(rows, "better.searched", LOADS) == pytest.approx(np.ones((1, 3)))
    assert score_matrix(rows, "better", LOADS).shape == (2, 3)
    assert not [row for row in own if row.load == "training"], "counted once, with its run"


def test_every_metric_stands_beside_that_of_the_best_fixed_depth() -> None:
    ablation = made_ablation()
    depth = replace(speeds("fixed:2", (2.0, 0.0, 0.0))[0], metric="mean_depth")
    mine = replace(depth, policy="learned", value=3.0)
    references = done((*ablation.references.rows, depth))
    cells = {("base", 0): done((*ablation.done["base", 0].rows, mine))}
    rows = tidy_rows(replace(ablation, references=references, done=cells))
    (row,) = (row for row in rows if row.metric == "mean_depth" and row.variant == "base")
    assert (row.value, row.baseline, row.baseline_value) == (3.0, "fixed:2", 2.0)
    assert all(row.baseline_value == 1.0 for row in rows if row.metric == RATIO)
    assert isinstance(row, TidyRow)
