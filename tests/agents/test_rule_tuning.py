from __future__ import annotations

import itertools

import pytest

from specdepth.agents.intervals import geometric_mean
from specdepth.agents.replay_evaluate import evaluate_replay
from specdepth.agents.rule_tuning import (
    Scalars,
    TrainingReplay,
    best_single_depth,
    coordinate_search,
    strongest,
    tune,
)
from specdepth.scheduler.baselines import FixedDepth, Off, TableDepth
from specdepth.scheduler.baselines.tuned_table import tuned_table
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints, RoundState
from tests.agents.made_trace import make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.012, knee=3)
TRACE = make_trace(30, num_tokens=16)
LOADS = (1, 6)


@pytest.fixture(scope="module")
def training() -> TrainingReplay:
    return TrainingReplay(TRACE, COST, LOADS)


def test_scores_are_those_of_an_evaluation_of_the_training_split(training):
    found = evaluate_replay(
        TRACE, COST, {"fixed:2": FixedDepth(2)}, LOADS, rows=TRACE.rows("train"), oracles=False
    )
    for load in LOADS:
        expected = found.runs[load].throughput("fixed:2").value
        # Other requests run together, since the order is another.
        assert training.throughput(FixedDepth(2), load) == pytest.approx(expected, rel=0.02)
    assert training.throughput(FixedDepth(2), 6) == training.throughput(FixedDepth(2), 6)


def test_held_out_requests_change_nothing(training):
    alone = TrainingReplay(TRACE.select(TRACE.rows("train")), COST, LOADS)
    assert alone.throughput(FixedDepth(1), 6) == training.throughput(FixedDepth(1), 6)


def test_fewer_requests_are_enough_but_never_fewer_than_the_load():
    few = TrainingReplay(TRACE, COST, LOADS, num_requests=2)
    assert [len({r.recording for r in w.requests}) for w in few._workloads.values()] == [2, 6]


def test_a_sweep_gives_the_table_and_the_best_single_depth(training):
    sweep = training.sweep([0, 1, 4])
    assert list(sweep) == [1, 6]
    assert sweep[6][0] == training.throughput(Off(), 6)
    best = {load: max(row, key=row.__getitem__) for load, row in sweep.items()}
    assert best[1] > best[6]
    table = tuned_table(sweep)
    assert [table.depth_at(load) for load in LOADS] == [best[1], best[6]]
    means = {depth: geometric_mean([sweep[load][depth] for load in LOADS]) for depth in (0, 1, 4)}
    assert best_single_depth(sweep) == max(means, key=means.__getitem__)


def test_the_best_setting_is_found_overall_and_for_each_load(training):
    fixed = [FixedDepth(depth) for depth in (0, 1, 2, 4)]
    both = TableDepth([(1, 3, 4), (4, 100, 0)])
    found = tune(training, {"fixed": fixed, "table": [both]})
    sweep = training.sweep([0, 1, 2, 4])
    for load in LOADS:
        depth = max(sweep[load], key=sweep[load].__getitem__)
        assert repr(found["fixed"].best_at[load]) == repr(FixedDepth(depth))
        assert found["fixed"].best_tok_s[load] == sweep[load][depth]
    single = best_single_depth(sweep)
    assert repr(found["fixed"].scheduler) == repr(FixedDepth(single))
    assert found["fixed"].throughput_tok_s == {load: sweep[load][single] for load in LOADS}
    assert found["fixed"].score == pytest.approx(
        geometric_mean([sweep[load][single] for load in LOADS])
    )
    assert strongest(found) == max(found, key=lambda name: found[name].score) == "table"


class TwoDepths(FixedDepth):
    """One depth for sequences with a long match, one for the others."""

    def __init__(self, values: Scalars) -> None:
        super().__init__(0)
        self.values = values

    def choose(self, state: RoundState) -> Ints:
        is_long = state.match_length > 2
        return (is_long * int(self.values["long"]) + ~is_long * int(self.values["short"])) * 1


GRID = {"long": (0.0, 1.0, 2.0, 4.0), "short": (0.0, 1.0)}


@pytest.mark.parametrize("loads", [(6,), (1, 6)])
def test_a_coordinate_search_finds_what_the_whole_grid_holds(training, loads):
    def score(values: Scalars) -> float:
        rule = TwoDepths(values)
        return geometric_mean([training.throughput(rule, load) for load in loads])

    every = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    chosen, figure = coordinate_search(training, TwoDepths, GRID, loads=loads)
    assert figure == pytest.approx(max(score(values) for values in every))
    assert score(chosen) == figure


def test_a_search_replays_each_setting_once(training):
    made: list[Scalars] = []

    def make(values: Scalars) -> DepthScheduler:
        made.append(values)
        return TwoDepths(values)

    coordinate_search(training, make, GRID, loads=[1])
    keys = [tuple(values.values()) for values in made]
    assert len(keys) == len(set(keys)) <= 8


def test_without_candidates_or_requests_there_is_nothing_to_choose(training):
    with pytest.raises(ValueError, match="rule 'empty' has no candidate"):
        tune(training, {"empty": []})
    with pytest.raises(ValueError, match="no rule was tuned"):
        strongest({})
    with pytest.raises(ValueError, match="load 64 needs at least 64 different requests"):
        TrainingReplay(TRACE, COST, [64])
