"""Oracles are what a search over all depths finds, and looking ahead changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.config import EngineConfig
from specdepth.decoder.oracles import HindsightDepths, HindsightUniformDepth, TrueSurvival
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.baselines import FixedDepth
from specdepth.scheduler.baselines.pricing import prefill_s
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import DrafterKind, Ints, RoundOutcome, RoundState
from tests.decoder.tiny import build_decoder, tiny_llama

DEPTH = 4
NUM_TOKENS = 12
SMOOTH = CostModel.linear(base_s=0.05, token_s=0.004, knee=3, context_s=1e-5, overhead_s=0.001)
STAIRS = CostModel(
    name="stairs",
    tokens=(1, 2, 3, 4, 5, 6, 8, 9, 12, 16),
    verify_s=(0.05, 0.06, 0.06, 0.11, 0.08, 0.12, 0.12, 0.2, 0.21, 0.4),
    overhead_s=0.002,
)
AFFINE = CostModel.linear(
    base_s=0.05, token_s=0.006, context_s=1e-5, draft_base_s=0.02, draft_token_s=0.003
)


def make_trace(drafter: DrafterKind, seed: int, num_requests: int = 6) -> Trace:
    """Random runs; every second text ends by itself, the others at their limit."""
    rng = np.random.default_rng(seed)
    size = num_requests * NUM_TOKENS
    left = np.tile(np.arange(NUM_TOKENS, 0, -1), num_requests)
    offered = np.full(size, DEPTH)
    if drafter == "prompt-lookup":
        offered = rng.integers(0, DEPTH + 1, size)
    stopped = np.arange(num_requests) % 2 == 0
    signals = None if drafter == "prompt-lookup" else rng.random((size, DEPTH))
    return Trace(
        info=TraceInfo(model_pair="toy", drafter=drafter, max_num_speculative_tokens=DEPTH),
        ids=tuple(map(str, range(num_requests))),
        kinds=("toy",) * num_requests,
        held_out=np.zeros(num_requests, np.bool_),
        num_prompt=np.full(num_requests, 3),
        num_tokens=np.full(num_requests, NUM_TOKENS),
        max_new_tokens=np.where(stopped, 2 * NUM_TOKENS, NUM_TOKENS),
        stopped=stopped,
        looping=np.zeros(num_requests, np.bool_),
        accepted=np.minimum(rng.integers(0, DEPTH + 1, size), np.minimum(offered, left)),
        proposal_length=offered,
        match_length=np.minimum(offered, 1),
        num_matches=np.minimum(offered, 1),
        num_agreeing=np.minimum(offered, 1),
        match_tokens=np.minimum(offered, 1),
        match_distance=np.minimum(offered, 1),
        match_in_output=offered > 1,
        agreement=np.zeros((size, DEPTH), np.uint8),
        target_top1=rng.random(size),
        target_entropy=rng.random(size),
        draft_top1=signals,
        draft_entropy=signals,
        draft_margin=signals,
    )


def make_decoder(trace: Trace, cost: CostModel) -> ReplayDecoder:
    config = EngineConfig(max_num_seqs=3, max_num_speculative_tokens=DEPTH, block_size=4)
    return ReplayDecoder(trace, cost, config)


def useful_runs(trace: Trace, state: RoundState) -> Ints:
    """From the trace alone: requests are numbered by row."""
    rows, done = state.request_ids, state.num_generated
    return np.minimum(trace.accepted[trace.starts[rows] + done], NUM_TOKENS - done - 1)


def tokens_a_second(state: RoundState, depths: Ints, committed: int) -> float:
    """What catches up a draft model, and what prompts take, is paid whatever is drafted now."""
    seconds = state.cost.round_s(
        depths,
        num_prefill_tokens=state.num_prefill_tokens,
        num_context_tokens=state.num_context_tokens,
        drafter=state.drafter,
    )
    return float(committed / (seconds - prefill_s(state)))


def rounds(
    decoder: ReplayDecoder, scheduler: Any
) -> Iterator[tuple[RoundState, Ints, RoundOutcome]]:
    """Serve the whole trace, three requests at a time."""
    engine = decoder.engine
    engine.set_scheduler(scheduler)
    for request in decoder.requests():
        engine.add_request(request.prompt_token_ids, request.sampling, recording=request.recording)
    while (state := engine.begin_round()) is not None:
        depths = scheduler.choose(state)
        yield state, depths, engine.finish_round(depths)


CASES = [
    ("prompt-lookup", SMOOTH),
    ("prompt-lookup", STAIRS),
    ("draft-model", AFFINE),
]


@pytest.mark.parametrize(("drafter", "cost"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_hindsight_depths_are_the_best_of_all_within_the_true_runs(drafter, cost, seed):
    trace = make_trace(drafter, seed)
    decoder = make_decoder(trace, cost)
    count = 0
    for state, depths, outcome in rounds(decoder, HindsightDepths(decoder.engine)):
        runs = useful_runs(trace, state)
        assert (depths <= runs).all()
        every = itertools.product(*(range(run + 1) for run in runs))
        best = max(tokens_a_second(state, np.array(d), len(d) + sum(d)) for d in every)
        committed = int(outcome.num_committed.sum())
        assert committed == len(depths) + depths.sum()
        assert tokens_a_second(state, depths, committed) == pytest.approx(best, rel=1e-12)
        count += 1
    assert count > 8


@pytest.mark.parametrize(("drafter", "cost"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_uniform_depth_is_the_best_of_all_by_what_is_committed(drafter, cost, seed):
    trace = make_trace(drafter, seed)
    decoder = make_decoder(trace, cost)
    for state, depths, outcome in rounds(decoder, HindsightUniformDepth(decoder.engine)):
        runs = useful_runs(trace, state)

        def rate(depth: int, state: RoundState = state, runs: Ints = runs) -> float:
            clipped = np.minimum(depth, state.max_depths)
            return tokens_a_second(state, clipped, len(runs) + int(np.minimum(runs, depth).sum()))

        best = max(rate(depth) for depth in range(DEPTH + 1))
        committed = int(outcome.num_committed.sum())
        assert tokens_a_second(state, depths, committed) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_looking_ahead_leaves_no_trace(drafter):
    class Looks(FixedDepth):
        truth: TrueSurvival

        def choose(self, state: RoundState) -> Ints:
            self.truth.survival(state)
            return super().choose(state)

    seen = []
    for looks in (False, True):
        decoder = make_decoder(make_trace(drafter, 0), AFFINE)
        scheduler = Looks(2) if looks else FixedDepth(2)
        if isinstance(scheduler, Looks):
            scheduler.truth = TrueSurvival(decoder.engine)
        outcomes = [outcome for _, _, outcome in rounds(decoder, scheduler)]
        seen.append(
            [(o.num_accepted.tolist(), o.num_catch_up_tokens, o.verify_s) for o in outcomes]
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
@pytest.mark.parametrize("load", [1, 3])
def test_no_fixed_depth_is_faster_than_hindsight(drafter, load):
    trace = make_trace(drafter, 5, num_requests=24)
    decoder = make_decoder(trace, AFFINE)
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(load))
    found = {}
    schedulers: list[DepthScheduler] = [FixedDepth(depth) for depth in range(DEPTH + 1)]
    for scheduler in (HindsightDepths(decoder.engine), *schedulers):
        decoder.engine.clock = VirtualClock(AFFINE)
        found[repr(scheduler)] = serve(decoder.engine, workload, scheduler).makespan_s
    best_fixed = min(s for name, s in found.items() if name.startswith("Fixed"))
    assert found["HindsightDepths()"] < best_fixed


def test_survival_is_certain_up_to_the_run_and_impossible_beyond():
    trace = make_trace("prompt-lookup", 1)
    decoder = make_decoder(trace, SMOOTH)
    truth = TrueSurvival(decoder.engine)
    for _ in rounds(decoder, FixedDepth(1)):
        pass
    requests = decoder.requests(np.array([0]))
    decoder.engine.add_request(requests[0].prompt_token_ids, requests[0].sampling, recording=0)
    state = decoder.engine.begin_round()
    assert state is not None
    run = int(trace.accepted[0])
    assert truth.survival(state).tolist() == [[float(j < run) for j in range(DEPTH)]]
    decoder.engine.abort_all()


def test_a_decoder_with_models_has_no_hindsight():
    engine = build_decoder(tiny_llama(), "prompt-lookup").engine
    for oracle in (TrueSurvival, HindsightDepths, HindsightUniformDepth):
        with pytest.raises(ValueError, match="needs recorded outcomes"):
            oracle(engine)
