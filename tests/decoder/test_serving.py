from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.serving import serve, share_of_different_texts
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import ClosedLoop, OpenLoop, Phase, Workload, WorkloadRequest
from specdepth.scheduler.baselines import FixedDepth, Off, RandomDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import RoundOutcome, RoundState
from tests.decoder.tiny import greedy_text, tiny_llama

COST = CostModel.linear(base_s=0.05, token_s=0.002, overhead_s=0.001)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return DECODER


def make_decoder(**options: Any) -> SpeculativeDecoder:
    defaults: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 400}
    return SpeculativeDecoder.from_pretrained(
        tiny_llama(),
        dtype="float64",
        device="cpu",
        clock=VirtualClock(COST),
        cost=COST,
        **(defaults | options),
    )


DECODER = make_decoder()


def requests(count: int, max_new_tokens: int = 12) -> tuple[WorkloadRequest, ...]:
    return tuple(
        WorkloadRequest(
            prompt_token_ids=tuple((i + j * j) % 97 for j in range(4 + i % 3)),
            sampling=SamplingParams(max_new_tokens=max_new_tokens + i % 4),
        )
        for i in range(count)
    )


def closed(count: int, load: int, **options: int) -> Workload:
    return Workload(requests=requests(count, **options), process=ClosedLoop.constant(load))


def test_results_come_in_the_order_of_requests_with_the_targets_own_text(decoder):
    workload, target = closed(7, 3), tiny_llama()
    served = serve(decoder.engine, workload, RandomDepth(1))
    for request, result in zip(workload.requests, served.results, strict=True):
        prompt = list(request.prompt_token_ids)
        expected = greedy_text(target, prompt, request.sampling.max_new_tokens)
        assert result.prompt_token_ids == prompt
        assert result.token_ids == expected


@pytest.mark.parametrize("load", [1, 3, 8])
def test_a_closed_loop_keeps_its_concurrency_until_requests_run_out(decoder, load):
    inside = []
    served = serve(
        decoder.engine,
        closed(12, load),
        Off(),
        on_round=lambda outcome: inside.append(decoder.engine.num_running),
    )
    assert max(inside) <= load
    assert 0.5 * load < served.mean_in_flight <= load + 1e-9


def test_shares_of_the_requests_sum_to_the_makespan_of_a_closed_loop(decoder):
    served = serve(decoder.engine, closed(9, 4), FixedDepth(2))
    assert served.request_s.shape == (9,)
    assert (served.request_s > 0).all()
    assert served.request_s.sum() == pytest.approx(served.makespan_s, rel=1e-9)
    assert served.request_wall_s.sum() == pytest.approx(served.wall_s, rel=0.05)
    assert served.throughput_tok_s == pytest.approx(served.num_tokens / served.makespan_s)


def test_one_request_alone_takes_all_the_time_that_its_rounds_take(decoder):
    served = serve(decoder.engine, closed(1, 1), Off())
    assert served.request_s[0] == pytest.approx(served.metrics.elapsed_s, rel=1e-6)
    assert served.mean_in_flight == 1


def test_an_idle_engine_waits_for_the_next_arrival_and_latency_counts_from_it(decoder):
    process = OpenLoop(times_s=(0.0, 100.0, 100.01))
    served = serve(decoder.engine, Workload(requests=requests(3), process=process), Off())
    assert served.makespan_s > 100
    assert served.request_s.sum() < 5
    arrivals = [result.metrics.arrival_s for result in served.results]
    assert np.diff(arrivals) == pytest.approx([100, 0.01])
    # The third comes while the second's first round runs, so it waits for that.
    assert served.results[2].metrics.ttft_s > 0.05


@settings(max_examples=15)
@given(
    times=st.lists(st.floats(0, 50), min_size=1, max_size=6).map(sorted),
    seed=st.integers(0, 1000),
)
def test_open_loops_end_whatever_their_times_round_to(times, seed):
    workload = Workload(
        requests=requests(len(times), max_new_tokens=2), process=OpenLoop(times_s=tuple(times))
    )
    served = serve(DECODER.engine, workload, RandomDepth(seed))
    assert len(served.results) == len(times)
    assert served.makespan_s >= times[-1]


def test_pauses_of_a_closed_loop_pass(decoder):
    phases = (
        Phase(concurrency=2, until=0.2),
        Phase(concurrency=0, until=30.0),
        Phase(concurrency=1),
    )
    process = ClosedLoop(phases=phases, unit="seconds")
    served = serve(decoder.engine, Workload(requests=requests(6), process=process), Off())
    assert served.makespan_s > 30
    assert len(served.results) == 6


def test_preempted_requests_finish_with_the_same_text():
    tight = make_decoder(num_kv_blocks=8, block_size=4, max_num_seqs=4)
    workload = Workload(requests=requests(8), process=ClosedLoop.constant(6))
    served = serve(tight.engine, workload, FixedDepth(4))
    roomy = serve(DECODER.engine, workload, Off())
    assert served.metrics.num_preemptions > 0
    assert share_of_different_texts(served, roomy) == 0


def test_different_texts_are_counted_by_request(decoder):
    long, short = closed(4, 2), closed(4, 2, max_new_tokens=11)
    a, b = (serve(decoder.engine, workload, Off()) for workload in (long, short))
    assert share_of_different_texts(a, a) == 0
    assert share_of_different_texts(a, b) == 1


def test_metrics_can_be_counted_on(decoder):
    metrics = EngineMetrics(8)
    first = serve(decoder.engine, closed(3, 2), Off(), metrics=metrics)
    tokens = metrics.num_committed_tokens
    second = serve(decoder.engine, closed(3, 2), Off(), metrics=metrics)
    assert first.metrics is second.metrics
    assert metrics.num_committed_tokens == 2 * tokens
    assert len(metrics.requests) == 6


class Interrupts(FixedDepth):
    def __init__(self, after: int) -> None:
        super().__init__(2)
        self.left = after

    def choose(self, state: RoundState):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().choose(state)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupt_leaves_the_engine_idle_and_usable(decoder, after):
    with pytest.raises(KeyboardInterrupt):
        serve(decoder.engine, closed(6, 3), Interrupts(after))
    assert not decoder.engine.has_work
    assert decoder.engine.pool.num_free == decoder.engine.pool.num_blocks
    assert len(serve(decoder.engine, closed(2, 2), Off()).results) == 2


def test_an_interrupt_after_a_round_leaves_no_results_behind(decoder):
    def stop(outcome: RoundOutcome) -> None:
        if outcome.finished.any():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(decoder.engine, closed(6, 3), Off(), on_round=stop)
    assert decoder.engine.take_finished() == []


def test_a_request_that_the_engine_refuses_stops_the_run_cleanly(decoder):
    bad = WorkloadRequest(prompt_token_ids=(1,) * 600, sampling=SamplingParams(max_new_tokens=1))
    workload = Workload(requests=(*requests(2), bad), process=ClosedLoop.constant(1))
    with pytest.raises(ValueError, match="600 tokens"):
        serve(decoder.engine, workload, Off())
    assert not decoder.engine.has_work


def test_a_busy_engine_is_refused(decoder):
    decoder.engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=2))
    try:
        with pytest.raises(RuntimeError, match="requests of its own"):
            serve(decoder.engine, closed(1, 1), Off())
        assert decoder.engine.has_work
    finally:
        decoder.engine.abort_all()


def test_a_workload_that_never_releases_is_refused(decoder):
    class Never:
        def due(self, **counts: float) -> int:
            return 0

        def next_s(self, now_s: float, num_released: int) -> None:
            return None

        def check(self, num_requests: int) -> None:
            pass

    with pytest.raises(RuntimeError, match="2 requests never become due"):
        serve(decoder.engine, Workload(requests=requests(2), process=Never()), Off())
