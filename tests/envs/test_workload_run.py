from __future__ import annotations

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.workload import ClosedLoop, OpenLoop, Workload, WorkloadRequest
from specdepth.envs.workload_run import WorkloadRun
from tests.envs.toy import toy_decoder, toy_prompts, toy_texts


def requests(count: int, max_new_tokens: int = 10) -> tuple[WorkloadRequest, ...]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    prompts = toy_prompts()
    return tuple(
        WorkloadRequest(prompt_token_ids=prompts[i % len(prompts)], sampling=sampling)
        for i in range(count)
    )


def serve(run: WorkloadRun, depth: int = 2) -> list[int]:
    """Running sequences of each round."""
    running = []
    state = run.next_decision()
    while state is not None:
        running.append(state.num_running)
        run.finish_round(np.full(state.num_running, depth))
        state = run.next_decision()
    return running


def test_a_closed_loop_keeps_its_concurrency_and_serves_everything() -> None:
    decoder = toy_decoder()
    run = WorkloadRun(
        decoder.engine, Workload(requests=requests(6), process=ClosedLoop.constant(2))
    )
    running = serve(run)
    assert run.done
    assert max(running) == 2
    assert decoder.engine.metrics.num_committed_tokens == 60


def test_the_text_is_the_targets_own() -> None:
    decoder = toy_decoder()
    decoder.engine.collect_deltas = True
    run = WorkloadRun(
        decoder.engine, Workload(requests=requests(3), process=ClosedLoop.constant(3))
    )
    serve(run, depth=4)
    texts: dict[str, list[int]] = {}
    for delta in decoder.engine.take_deltas():
        texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert [tuple(text) for text in texts.values()] == [text[:10] for text in toy_texts()[:3]]


def test_time_is_the_sum_of_rounds_on_a_virtual_clock() -> None:
    decoder = toy_decoder()
    start_s = decoder.engine.clock.now()
    run = WorkloadRun(
        decoder.engine, Workload(requests=requests(4), process=ClosedLoop.constant(4))
    )
    serve(run)
    assert run.now_s == pytest.approx(decoder.engine.clock.now() - start_s)


def test_rounds_that_only_prefill_are_absorbed_and_their_time_is_kept() -> None:
    # A budget of 4 tokens, one of which is kept for the sequence itself, takes 3 of the first 5.
    decoder = toy_decoder(max_num_batched_tokens=4)
    run = WorkloadRun(
        decoder.engine, Workload(requests=requests(1), process=ClosedLoop.constant(1))
    )
    state = run.next_decision()
    assert state is not None
    assert state.num_running == 1
    assert run.undecided_s == pytest.approx(0.05 + 2 * 0.003)
    assert run.undecided_modelled_s == pytest.approx(run.undecided_s)
    run.finish_round(np.array([0]))
    run.next_decision()
    assert run.undecided_s == 0


def test_an_idle_engine_jumps_to_the_next_arrival_without_charging() -> None:
    decoder = toy_decoder()
    process = OpenLoop(times_s=(1.0, 100.0))
    run = WorkloadRun(decoder.engine, Workload(requests=requests(2), process=process))
    assert run.next_decision() is not None
    assert run.idle_s == pytest.approx(1.0)
    idle_s = [run.idle_s]
    while run.state is not None:
        run.finish_round(np.zeros(run.state.num_running, np.int64))
        run.next_decision()
        idle_s.append(run.idle_s)
    assert run.now_s == pytest.approx(100 + 10 * 0.05 + 5 * 0.003)
    assert sum(idle_s) == pytest.approx(run.now_s - 2 * (10 * 0.05 + 5 * 0.003))


def test_thinking_time_lets_no_requests_pile_up() -> None:
    """The trainer updates for a minute between two rounds: arrivals follow the workload's time."""
    decoder = toy_decoder()
    process = OpenLoop(times_s=(0.0, 5.0, 6.0, 7.0))
    run = WorkloadRun(decoder.engine, Workload(requests=requests(4), process=process))
    state = run.next_decision()
    assert state is not None
    decoder.engine.clock.wait_until(decoder.engine.clock.now() + 60)
    run.finish_round(np.zeros(1, np.int64))
    assert run.now_s == pytest.approx(0.05 + 5 * 0.003)
    state = run.next_decision()
    assert state is not None
    assert (state.num_running, state.num_waiting) == (1, 0)


def test_a_new_run_drops_what_an_earlier_one_left() -> None:
    decoder = toy_decoder()
    workload = Workload(requests=requests(3), process=ClosedLoop.constant(3))
    WorkloadRun(decoder.engine, workload).next_decision()
    run = WorkloadRun(decoder.engine, workload)
    assert not decoder.engine.has_work
    serve(run)
    assert run.num_finished == 3


def test_finishing_a_round_before_the_first_state_is_an_error() -> None:
    run = WorkloadRun(
        toy_decoder().engine, Workload(requests=requests(1), process=ClosedLoop.constant(1))
    )
    with pytest.raises(RuntimeError, match="next_decision"):
        run.finish_round(np.zeros(1, np.int64))


def test_a_workload_that_never_releases_is_refused() -> None:
    class Never:
        def due(self, **_: object) -> int:
            return 0

        def next_s(self, now_s: float, num_released: int) -> float | None:
            return None

        def check(self, num_requests: int) -> None:
            pass

    run = WorkloadRun(toy_decoder().engine, Workload(requests=requests(1), process=Never()))
    with pytest.raises(ValueError, match="releases 0 of 1 requests"):
        run.next_decision()
