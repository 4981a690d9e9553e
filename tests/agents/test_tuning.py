from __future__ import annotations

import pytest

from specdepth.agents.comparison import Comparison
from specdepth.agents.evaluate import evaluate
from specdepth.agents.tuning import (
    best_single,
    fixed_runs,
    implied_table,
    predicted_tok_s,
    table_name,
)
from specdepth.scheduler.baselines import FixedDepth, Off, TableDepth, make_scheduler
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from tests.agents.tiny_target import COST, tiny_decoder, tiny_requests


@pytest.fixture(scope="module")
def found() -> Comparison:
    policies: dict[str, DepthScheduler] = {"off": Off(), "fixed:2": FixedDepth(2)}
    policies["fixed:8"] = FixedDepth(8)
    return evaluate(tiny_decoder(), policies, tiny_requests(18), [4], num_requests=18)


def test_acceptance_is_that_of_the_runs(found):
    for run, name in zip(fixed_runs(found), ("off", "fixed:2", "fixed:8"), strict=True):
        metrics = found.runs[4].metrics[name]
        assert run.acceptance_length == pytest.approx(metrics.acceptance_length)
        assert run.mean_depth == pytest.approx(metrics.mean_depth)
    off, two, eight = fixed_runs(found)
    assert off.acceptance_length == 1
    assert 1 < two.acceptance_length < eight.acceptance_length


def test_where_tokens_are_free_the_table_is_deep_throughout(found):
    free = CostModel.linear(base_s=0.05, token_s=1e-9)
    assert implied_table(found, free, 16).ranges == TableDepth([(1, 2**31 - 1, 8)]).ranges
    assert best_single(found, free, [1, 16]) == "fixed:8"


def test_where_tokens_cost_as_much_as_passes_nothing_is_drafted(found):
    dear = CostModel.linear(base_s=0.001, token_s=0.05)
    assert implied_table(found, dear, 16).ranges == TableDepth([(1, 2**31 - 1, 0)]).ranges
    assert best_single(found, dear, [1, 16]) == "off"


def test_beyond_the_knee_the_table_gets_shallower(found):
    table = implied_table(found, COST, 64)
    depths = [table.depth_at(n) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert depths[0] == 8
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < 8


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_at_powers_of_two_the_depth_is_the_best_by_exhaustion(found, size):
    best = max(fixed_runs(found), key=lambda run: predicted_tok_s(run, COST, size))
    assert implied_table(found, COST, 16).depth_at(size) == best.depth


def test_predictions_meet_the_runs_on_the_cost_model_that_timed_them():
    chosen: dict[str, DepthScheduler] = {"fixed:2": FixedDepth(2)}
    alone = evaluate(tiny_decoder(), chosen, tiny_requests(4), [1], num_requests=4)
    (run,) = fixed_runs(alone)
    measured = alone.runs[1].throughput("fixed:2").value
    # Only prompts, which ride in first rounds, are not in the prediction.
    assert predicted_tok_s(run, COST, 1) == pytest.approx(measured, rel=0.05)


def test_draft_passes_are_paid_for():
    runs = fixed_runs_of_a_draft_model()
    cheap = CostModel.linear(base_s=0.05, token_s=1e-6, draft_base_s=0.0001)
    dear = CostModel.linear(base_s=0.05, token_s=1e-6, draft_base_s=0.05)
    for run in runs:
        if run.depth:
            assert predicted_tok_s(run, dear, 1) < predicted_tok_s(run, cheap, 1)


def fixed_runs_of_a_draft_model():
    from specdepth.agents.tuning import FixedRun

    return [FixedRun(0, 1.0, 0.0, 0.0), FixedRun(4, 2.0, 4.0, 4.0)]


@pytest.mark.parametrize("text", ["table:1-=4", "table:1-2=4,3-8=2,9-=0", "table:1-1=8,2-=0"])
def test_table_names_are_what_commands_take(text):
    table = make_scheduler(text)
    assert isinstance(table, TableDepth)
    assert table_name(table) == text


def test_without_fixed_depths_there_is_no_table():
    with pytest.raises(ValueError, match="no fixed depth was run"):
        fixed_runs(Comparison(runs={}))
