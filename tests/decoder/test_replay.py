"""Replay gives the rounds that the live engine gives, whatever the schedule, load and pool."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.arrivals import OpenLoop
from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.config import EngineConfig, SamplingParams
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.decoder.trace_recorder import TextToRecord, decode_texts, record_proposals
from specdepth.decoder.workload import Arrivals, ClosedLoop, Workload, WorkloadRequest
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState
from tests.decoder.tiny import Watched, build_decoder, noisy_copy, repetitive_prompts, tiny_llama
from tests.decoder.tiny_eagle import tiny_eagle
from tests.decoder.traces import toy_trace

TARGET = tiny_llama(eos_token_id=[5, 17, 29, 41, 53])
COST = CostModel.linear(
    knee=6, context_s=1e-5, draft_base_s=0.004, draft_token_s=0.0003, overhead_s=0.001
)
NUM_TOKENS = 16
PROMPTS = [*repetitive_prompts(0), *repetitive_prompts(1)]
LOOSE: dict[str, Any] = {"num_kv_blocks": 400, "max_num_batched_tokens": 64}
TIGHT: dict[str, Any] = {"num_kv_blocks": 20, "max_num_batched_tokens": 12}
DRAFTERS = ("prompt-lookup", "draft-model", "eagle")
TEMPERATURES = (0.0, 0.4)
DRAFTS: dict[str, Any] = {"draft-model": noisy_copy(TARGET, 0.05), "eagle": tiny_eagle(TARGET)}


def live_decoder(drafter: str, temperature: float, **options: Any) -> SpeculativeDecoder:
    return build_decoder(
        TARGET,
        DRAFTS.get(drafter, drafter),
        verification="coupled" if temperature else "greedy",
        clock=VirtualClock(COST),
        cost=COST,
        **options,
    )


@cache
def decoder_for(drafter: str, temperature: float, tight: bool, lookahead: str) -> Any:
    options = TIGHT if tight else LOOSE
    return live_decoder(drafter, temperature, lookahead=lookahead, **options)


def sampling(temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_new_tokens=NUM_TOKENS)


@cache
def recorded(drafter: str, temperature: float, top: int = 8) -> Trace:
    """Recorded by a decoder of its own: other slots, other pool, other batches."""
    decoder = live_decoder(drafter, temperature, max_num_seqs=7, num_kv_blocks=300)
    info = TraceInfo(
        model_pair=decoder.model_pair,
        drafter=decoder.runner.drafter,
        reads_target=drafter == "eagle",
        max_num_speculative_tokens=top,
        verification="coupled" if temperature else "greedy",
        temperature=temperature,
    )
    texts = [
        TextToRecord(
            id=f"prompt-{i}",
            kind="toy",
            split="train" if i % 2 else "held-out",
            prompt_token_ids=prompt,
            sampling=sampling(temperature, i),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return record_proposals(decoder, decode_texts(decoder, texts), info)


class RandomStops(Watched):
    """Random depths, and random stops after draft passes, in either form of answer, and drafts."""

    def __init__(self, seed: int, stops: bool) -> None:
        super().__init__(self.draw)
        self.rng = np.random.default_rng(seed)
        if not stops:
            self.keep_drafting = None  # type: ignore[assignment, method-assign]
            self.trim = None  # type: ignore[assignment, method-assign]

    def draw(self, state: RoundState) -> Ints:
        return self.rng.integers(0, state.max_num_speculative_tokens + 1, state.num_running)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools | Ints:
        size, top = len(signals.rows), state.max_num_speculative_tokens
        # Signals of live and recorded passes differ in the last bits; thresholds are not near any.
        likes = signals.top1[:, -1] > 0.1234
        if self.rng.random() < 0.5:
            return likes * self.rng.integers(0, top + 2, size)
        return likes & (self.rng.random(size) < 0.7)

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        return self.rng.integers(0, signals.num_proposed + 1)


def run(
    decoder: SpeculativeDecoder | ReplayDecoder,
    requests: tuple[WorkloadRequest, ...],
    arrivals: Arrivals,
    scheduler: Watched,
) -> tuple[list[RoundOutcome], ServeResult]:
    decoder.engine.clock = VirtualClock(COST)
    decoder.engine.round_index = 0
    outcomes: list[RoundOutcome] = []
    served = serve(
        decoder.engine,
        Workload(requests=requests, process=arrivals),
        scheduler,
        on_round=outcomes.append,
    )
    return outcomes, served


SHOWN_BY_THE_OFFER = (
    *("proposal_length", "max_depths", "match_length", "num_matches", "match_agreement"),
    *("agreement", "match_tokens", "match_distance", "match_in_output"),
)
NOT_KNOWN_PAST_THE_END = ("target_top1", "target_entropy")


def assert_equal_rounds(live: RoundOutcome, replayed: RoundOutcome, first_id: int) -> None:
    for field in fields(RoundOutcome):
        a, b = getattr(live, field.name), getattr(replayed, field.name)
        if field.name == "request_ids":
            a = a - first_id
        if field.name in NOT_KNOWN_PAST_THE_END:
            a, b = a[~live.finished], b[~live.finished]
        if field.name in NOT_KNOWN_PAST_THE_END or field.name.startswith("draft_"):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=field.name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("lookahead", ["reserve", "clip"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_and_live_do_identical_rounds(
    drafter: str, temperature: float, tight: bool, lookahead: Any, seed: int
) -> None:
    trace = recorded(drafter, temperature)
    live = decoder_for(drafter, temperature, tight, lookahead)
    config = EngineConfig(
        max_num_seqs=4, block_size=4, lookahead=lookahead, **(TIGHT if tight else LOOSE)
    )
    replayer = ReplayDecoder(trace, COST, replace(config, max_model_len=live.config.max_model_len))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(trace.num_requests)[: 5 + 3 * seed]
    arrivals: Arrivals = (
        OpenLoop.poisson(len(rows), 4.0, rng) if seed == 1 else ClosedLoop.constant(2 + seed)
    )
    wanted = tuple(
        WorkloadRequest(
            prompt_token_ids=tuple(PROMPTS[row]), sampling=sampling(temperature, int(row))
        )
        for row in rows
    )
    first_id = live.engine._next_number
    watch, watch_replay = (RandomStops(seed, stops=seed > 0) for _ in range(2))
    expected, served = run(live, wanted, arrivals, watch)
    got, replayed = run(replayer, replayer.requests(rows), arrivals, watch_replay)
    assert len(expected) == len(got)
    for live_state, replayed_state in zip(watch.states, watch_replay.states, strict=True):
        for name in SHOWN_BY_THE_OFFER:
            a, b = getattr(live_state, name), getattr(replayed_state, name)
            np.testing.assert_array_equal(a, b, err_msg=name)
    for live_round, replayed_round in zip(expected, got, strict=True):
        assert_equal_rounds(live_round, replayed_round, first_id)
    assert served.makespan_s == replayed.makespan_s
    assert [len(r.token_ids) for r in served.results] == [
        len(r.token_ids) for r in replayed.results
    ]
    if tight and lookahead == "reserve" and seed == 2:
        assert served.metrics.num_preemptions > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_recorded_runs_are_of_all_lengths(drafter: str, temperature: float) -> None:
    trace = recorded(drafter, temperature)
    offered = trace.proposal_length > 0
    assert 0.02 < (trace.accepted[offered] > 0).mean() < 0.98
    assert trace.accepted.max() > 2
    if drafter == "prompt-lookup":
        some = trace.agreement[offered]
        assert (some < 255).any()
        assert (some[:, -1] > 0).any()
        assert len(np.unique(trace.match_tokens)) > 3
        assert trace.match_in_output.any()
        assert (trace.match_distance[~trace.match_in_output] > 0).any()
    else:
        assert not trace.agreement.any()
    assert trace.stopped.any()
    assert not trace.stopped.all()


def test_a_sampled_trace_is_replayed_at_the_prices_of_sampling() -> None:
    cost = replace(CostModel.linear(), coupled_row_s=1e-3, rejection_row_s=5e-4)
    greedy = toy_trace(stopped=np.ones(4, np.bool_))
    info = replace(greedy.info, verification="coupled", temperature=0.7)
    sampled = replace(greedy, info=info)
    assert ReplayDecoder(greedy, cost).engine.cost is cost
    decoder = ReplayDecoder(sampled, cost)
    assert decoder.engine.cost == cost.sampled("coupled")
    seconds = []
    for one in (ReplayDecoder(greedy, cost), decoder):
        work = Workload(requests=one.requests(), process=ClosedLoop.constant(2))
        scheduler = Watched(3)
        serve(one.engine, work, scheduler)
        rows = sum(int((1 + outcome.num_drafted).sum()) for outcome in scheduler.outcomes)
        seconds.append(one.engine.clock.now())
    assert seconds[1] - seconds[0] == pytest.approx(1e-3 * rows, rel=1e-6)
    # Folded in already, for another rule than the recording's.
    assert ReplayDecoder(sampled, cost.sampled("rejection")).engine.cost == cost.sampled(
        "rejection"
    )
