"""The guard over a policy that decides by a wrong cost model, and over a good one, on the replay engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdepth.decoder.arrivals import ClosedLoop
from specdepth.decoder.config import EngineConfig
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines import FixedDepth, Off, TableDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.guard import GuardConfig, GuardedScheduler
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival_estimators import MatchLengthSurvival
from tests.agents.made_trace import make_trace

TRACE = make_trace(40, num_tokens=300)
COST = CostModel.linear(base_s=0.05, token_s=0.012, knee=16, overhead_s=0.001)
FLAT = replace(COST, verify_s=tuple(0.05 + (s - 0.05) / 50 for s in COST.verify_s), prefill_s=())
"""Passes fifty times as flat as they really are."""
LOAD = 8


class Misled:
    """A cost-aware greedy that is shown another cost model than the machine's."""

    def __init__(self, cost: CostModel | None) -> None:
        self.rule, self.cost = CappedGreedyDepth(MatchLengthSurvival()), cost
        self.lawful_under = self.rule.lawful_under

    def reset(self) -> None:
        self.rule.reset()

    def choose(self, state: RoundState) -> Ints:
        return self.rule.choose(state if self.cost is None else replace(state, cost=self.cost))

    def observe(self, outcome: RoundOutcome) -> None:
        self.rule.observe(outcome)


DECODER = ReplayDecoder(TRACE, COST, EngineConfig(max_num_seqs=32, max_num_speculative_tokens=4))


def run(
    scheduler: DepthScheduler, repeats: int = 1, load: int = LOAD, num_requests: int = 40
) -> ServeResult:
    """Serve requests of the trace so many times at a constant load."""
    rows = np.tile(np.random.default_rng(0).permutation(num_requests), repeats)
    work = Workload(requests=DECODER.requests(rows), process=ClosedLoop.constant(load))
    return serve(DECODER.engine, work, scheduler)


@pytest.fixture(scope="module")
def off() -> float:
    return run(Off()).throughput_tok_s


@pytest.fixture(scope="module")
def good() -> float:
    return run(Misled(None)).throughput_tok_s


def test_a_policy_with_a_wrong_cost_model_loses_and_under_the_guard_it_does_not(off: float):
    assert run(Misled(FLAT)).throughput_tok_s < 0.8 * off
    guard = GuardedScheduler(Misled(FLAT))
    assert run(guard, repeats=2).throughput_tok_s >= 0.98 * off
    assert guard.as_dict()["guard_aside_at_8"] == 1


def test_the_better_of_off_and_the_fallback_is_reached(off: float):
    fallback = TableDepth.parse("1-=1")
    better = run(fallback).throughput_tok_s
    assert better > 1.2 * off
    guard = GuardedScheduler(Misled(FLAT), fallback)
    run(guard)  # finding out costs something, once
    assert run(guard, repeats=2).throughput_tok_s >= 0.98 * better


def test_a_good_policy_pays_less_than_a_hundredth(good: float, off: float):
    assert good > 1.3 * off
    guard = GuardedScheduler(Misled(None))
    assert run(guard, repeats=2).throughput_tok_s >= 0.99 * good
    guard = GuardedScheduler(Misled(None), FixedDepth(1))
    run(guard)
    assert run(guard, repeats=2).throughput_tok_s >= 0.99 * good
    assert guard.as_dict()["guard_aside_share"] == 0


def test_the_policy_comes_back_when_its_cost_model_becomes_right(good: float):
    policy = Misled(FLAT)
    guard = GuardedScheduler(policy, config=GuardConfig(max_interval=256))
    run(guard)
    assert guard.as_dict()["guard_aside_at_8"] == 1
    policy.cost = None
    run(guard, repeats=2)
    assert guard.as_dict()["guard_aside_at_8"] == 0
    assert run(guard).throughput_tok_s >= 0.97 * good  # off is still probed every 256 rounds


def test_loads_are_judged_apart():
    guard = GuardedScheduler(Misled(FLAT))
    run(guard)
    run(guard, load=2, num_requests=8)
    assert guard.as_dict()["guard_aside_at_2"] == 0  # at this load its passes are free
    assert guard.as_dict()["guard_aside_at_8"] == 1


def test_the_guarded_run_is_the_same_each_time():
    results = []
    guard = GuardedScheduler(Misled(FLAT), FixedDepth(1))
    for _ in range(2):
        guard.reset()
        results.append(run(guard))
    first, second = results
    assert first.makespan_s == pytest.approx(second.makespan_s, rel=1e-12)
    assert first.metrics.num_rounds == second.metrics.num_rounds
    assert [r.token_ids for r in first.results] == [r.token_ids for r in second.results]
