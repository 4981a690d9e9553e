"""Clocks: real, of a thread, and virtual."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from specdepth.decoder.clock import GRID_S, PassWork, ThreadClock, VirtualClock, WallClock
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import Watched, build_decoder, noisy_copy, tiny_llama

WORK = PassWork(
    num_pass_tokens=13,
    num_prefill_tokens=5,
    num_seqs=3,
    num_logit_rows=8,
    num_context_tokens=200,
    num_prefill_pairs=300,
    draft_pass_sequences=(3, 2),
    num_catch_up_tokens=4,
)


def cost() -> CostModel:
    return CostModel.linear(base_s=0.05, token_s=0.002, draft_base_s=0.01, name="test")


def test_the_wall_clock_books_what_was_measured_and_waits() -> None:
    clock = WallClock()
    assert clock.pass_times(WORK, 0.1, 0.2) == (0.1, 0.2)
    start = clock.now()
    clock.wait_until(start + 0.02)
    assert 0.02 <= clock.now() - start < 2
    before = clock.now()
    clock.wait_until(start)
    assert clock.now() - before < 0.02


def test_the_thread_clock_does_not_count_sleep_and_skips_waits() -> None:
    clock = ThreadClock()
    start = clock.now()
    time.sleep(0.05)
    assert clock.now() - start < 0.04
    began = time.perf_counter()
    clock.wait_until(clock.now() + 100)
    assert clock.now() - start >= 100
    assert time.perf_counter() - began < 10


def test_the_virtual_clock_moves_by_the_cost_model_alone() -> None:
    model = cost()
    clock = VirtualClock(model)
    draft_s, verify_s = clock.pass_times(WORK, 99.0, 99.0)
    assert draft_s == pytest.approx(model.draft_round_s((3, 2), 4), abs=GRID_S, rel=0)
    assert verify_s == pytest.approx(model.pass_s(13, 5, 200), abs=GRID_S, rel=0)
    assert min(draft_s, verify_s) > 1000 * GRID_S
    assert clock.now() == pytest.approx(draft_s + verify_s + model.overhead_s)
    clock.wait_until(5.0)
    assert clock.now() == 5.0
    clock.wait_until(1.0)
    assert clock.now() == 5.0


def test_the_virtual_clock_charges_what_prompts_look_at() -> None:
    model = replace(cost(), prefill_pair_s=1e-4)
    _, verify_s = VirtualClock(model).pass_times(WORK, 0.0, 0.0)
    assert verify_s == pytest.approx(cost().pass_s(13, 5, 200) + 0.03, abs=GRID_S, rel=0)


def test_a_decoder_on_a_virtual_clock_takes_exactly_the_modelled_time() -> None:
    target = tiny_llama()
    elapsed = []
    for _ in range(2):
        model = cost()
        decoder = build_decoder(
            target, noisy_copy(target, 0.05), clock=VirtualClock(model), cost=model
        )
        scheduler = Watched(2)
        batch = decoder.generate([[1, 2, 3], [4, 5]], 8, depth_scheduler=scheduler)
        assert decoder.engine.clock.now() == pytest.approx(
            sum(
                model.draft_round_s(o.draft_pass_sequences, o.num_catch_up_tokens)
                + model.pass_s(o.num_pass_tokens, o.num_prefill_tokens, o.num_context_tokens)
                + model.overhead_s
                for o in scheduler.outcomes
            )
        )
        assert all(outcome.schedule_s == 0 for outcome in scheduler.outcomes)
        first = scheduler.outcomes[0]
        assert batch[0].metrics.ttft_s == pytest.approx(first.start_s + first.elapsed_s)
        elapsed.append(decoder.engine.clock.now())
    assert elapsed[0] == elapsed[1]


def test_a_virtual_round_takes_the_same_time_whenever_it_runs() -> None:
    cost = CostModel.linear(base_s=0.1, token_s=0.0123, overhead_s=0.0007)
    work = PassWork(
        num_pass_tokens=7,
        num_prefill_tokens=0,
        num_seqs=1,
        num_logit_rows=7,
        num_context_tokens=30,
        num_prefill_pairs=0,
        draft_pass_sequences=(),
        num_catch_up_tokens=0,
    )
    spans = set()
    for start_s in (0.0, 0.1, 1 / 3, 17.7, 54321.0):
        clock = VirtualClock(cost)
        clock.wait_until(start_s)
        assert clock.now() >= start_s
        before = clock.now()
        _, verify_s = clock.pass_times(work, 0.0, 0.0)
        spans.add((clock.now() - before, verify_s))
    assert len(spans) == 1
