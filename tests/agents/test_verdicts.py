from __future__ import annotations

import io

import pytest

from specdepth.agents.comparison import Comparison, LoadRuns
from specdepth.agents.console import Console
from specdepth.agents.evaluate import evaluate
from specdepth.agents.intervals import Interval
from specdepth.agents.results import Results
from specdepth.agents.verdicts import claim, fastest, inverse, show_comparison, verdicts
from specdepth.scheduler.baselines import FixedDepth, Off
from specdepth.scheduler.cost import CostModel
from tests.agents.test_comparison import runs, served
from tests.agents.tiny_target import tiny_decoder, tiny_requests


@pytest.mark.parametrize(
    ("off", "fast", "word"),
    [
        ([1.0] * 5, [0.5, 0.6, 0.5, 0.6, 0.5], "(faster)"),
        ([1.0] * 5, [1.5, 1.6, 1.5, 1.6, 1.5], "(slower)"),
        ([1.0] * 5, [0.5, 1.6, 0.5, 1.6, 0.9], "(no clear difference)"),
        ([1.0] * 3, [0.5] * 3, "(too few requests for an interval)"),
        ([1.0] * 5, [1.0] * 5, "(the same)"),
    ],
)
def test_verdicts_say_no_more_than_the_interval_does(off, fast, word):
    (sentence,) = verdicts(Comparison(runs={1: runs(off, fast)}), "fixed:2")
    assert sentence.startswith("Load 1, fixed:2: ")
    assert word in sentence


def test_a_rival_that_is_off_and_best_fixed_at_once_is_named_once():
    (sentence,) = verdicts(Comparison(runs={1: runs([1.0] * 5, [2.0] * 5)}), "fixed:2")
    assert sentence.count("off") == 1
    assert "in hindsight" in sentence


def test_loads_that_vary_are_named_and_claims_are_about_constant_ones():
    one = runs([1.0] * 5, [0.5] * 5)
    (sentence,) = verdicts(Comparison(runs={"varying": one}), "fixed:2")
    assert sentence.startswith("Varying, fixed:2: ")
    cost = CostModel(name="x", tokens=(1,), verify_s=(1.0,), flops_per_token=1e9, weight_bytes=8)
    assert claim(Comparison(runs={"varying": one}), cost, "fixed:2") is None
    both = claim(Comparison(runs={"varying": one, 4: one}), cost, "fixed:2")
    assert both is not None
    assert both.startswith("Load 4, fixed:2")


@pytest.mark.parametrize(("loads", "bounds"), [([1, 4], True), ([1, 2, 4, 8], False)])
def test_a_console_shows_intervals_where_there_is_room(loads, bounds):
    found = Comparison(runs={load: runs([1.0] * 5, [0.5, 0.6, 0.5, 0.6, 0.5]) for load in loads})
    out = io.StringIO()
    results = Results.collect("test", {}, found.rows())
    show_comparison(Console(stdout=out, stderr=io.StringIO()), found, results)
    assert ("[" in out.getvalue()) is bounds
    assert "oracle" not in out.getvalue()


def test_a_console_shows_the_gap_to_an_oracle_if_there_is_one():
    run = LoadRuns(("off", "oracle"))
    block = {"off": served([10] * 4, [1.0] * 4), "oracle": served([10] * 4, [0.5] * 4)}
    run.add(range(4), 0, block)
    found = Comparison(runs={1: run}, clock="virtual")
    out = io.StringIO()
    results = Results.collect("test", {}, found.rows(oracle="oracle"))
    show_comparison(Console(stdout=out, stderr=io.StringIO()), found, results)
    text = " ".join(out.getvalue().split())
    assert "Share of the way from the best fixed depth to the oracle" in text
    assert "Goodput" not in text


def test_a_policy_that_was_not_run_gets_no_verdict():
    assert verdicts(Comparison(runs={1: runs([1.0] * 5, [2.0] * 5)}), "learned") == []


def test_the_fastest_is_judged_at_the_lowest_load_and_is_never_off():
    found = Comparison(runs={4: runs([1.0] * 4, [0.5] * 4), 1: runs([1.0] * 4, [2.0] * 4)})
    assert fastest(found) == "fixed:2"


def test_inverse_turns_the_bounds_round():
    assert inverse(Interval(2.0, 1.0, 4.0)) == (0.5, 0.25, 1.0)


def test_the_claim_counts_flops_and_measures_time():
    # One sequence far below the knee: a round costs the same at any depth.
    decoder = tiny_decoder()
    found = evaluate(
        decoder, {"off": Off(), "fixed:4": FixedDepth(4)}, tiny_requests(6), [1], num_requests=6
    )
    metrics = found.runs[1].metrics["fixed:4"]
    cost = CostModel(name="x", tokens=(1,), verify_s=(1.0,), flops_per_token=1e9, weight_bytes=8)
    text = claim(found, cost, "fixed:4")
    assert text is not None
    flops = (1 + metrics.mean_depth) / metrics.acceptance_length
    time = 1 / found.runs[1].ratio("fixed:4", "off").value
    assert flops > 1 > time
    assert f"{flops:.2f}x the FLOPs" in text
    assert f"{time:.2f}x its time" in text
    assert text.endswith("more arithmetic, less time.")


def test_a_claim_that_does_not_hold_is_not_made():
    cost = CostModel(name="x", tokens=(1,), verify_s=(1.0,), flops_per_token=1e9, weight_bytes=8)
    for times, word in (
        ([1.0] * 5, "no clear difference in time"),
        ([1.0, 0.8, 1.3, 0.9, 1.0], "no clear difference in time"),
        ([1.5, 1.4, 1.5, 1.6, 1.5], "more time"),
        ([0.5, 0.4, 0.5, 0.6, 0.5], "less time"),
        ([0.5] * 2, "less time (too few requests for an interval)"),
    ):
        text = claim(Comparison(runs={1: runs([1.0] * len(times), times)}), cost, "fixed:2")
        assert text is not None
        assert text.endswith(f": no more arithmetic, {word}.")


def test_without_counts_there_is_no_claim():
    found = Comparison(runs={1: runs([1.0] * 5, [0.5] * 5)})
    assert claim(found, CostModel.linear(), "fixed:2") is None
