"""What a `ReplayDecoder` takes and refuses, and how replayed texts end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.decoder.config import EngineConfig, SamplingParams
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
from specdepth.scheduler.baselines import FixedDepth, Off
from specdepth.scheduler.cost import CostModel
from tests.decoder.traces import toy_trace

COST = CostModel.linear(base_s=0.05, token_s=0.01)


def five_texts(**changed: Any) -> Trace:
    """The even ones ended by themselves."""
    sizes = (5, 3, 9, 1, 4)
    settings: dict[str, Any] = {
        "max_new_tokens": np.array([8, 3, 9, 1, 6]),
        "stopped": np.array([True, False, True, False, True]),
    }
    return toy_trace(sizes, **(settings | changed))


def replay(decoder: ReplayDecoder, requests: tuple[WorkloadRequest, ...]) -> ServeResult:
    workload = Workload(requests=requests, process=ClosedLoop.constant(3))
    return serve(decoder.engine, workload, FixedDepth(4))


def test_texts_have_their_recorded_lengths_and_ends() -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    served = replay(decoder, decoder.requests())
    assert [len(result.token_ids) for result in served.results] == [5, 3, 9, 1, 4]
    reasons = [result.finish_reason for result in served.results]
    assert reasons == ["stop", "length", "stop", "length", "stop"]
    assert decoder.engine.pool.num_free == decoder.engine.pool.num_blocks


def test_texts_can_be_cut_short() -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    served = replay(decoder, decoder.requests(max_new_tokens=4))
    assert [len(result.token_ids) for result in served.results] == [4, 3, 4, 1, 4]
    assert served.results[0].finish_reason == "length"


def test_rows_are_replayed_in_the_order_asked_for() -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    requests = decoder.requests(np.array([3, 0]))
    assert [request.recording for request in requests] == [3, 0]
    assert [len(r.token_ids) for r in replay(decoder, requests).results] == [1, 5]


def test_a_row_may_be_replayed_many_times_at_once() -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    served = replay(decoder, decoder.requests(np.array([2, 2, 2, 2])))
    rounds = {result.metrics.num_rounds for result in served.results}
    assert len(rounds) == 1  # the same text is accepted the same way beside itself


def test_without_speculation_each_token_takes_a_round() -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(1))
    served = serve(decoder.engine, workload, Off())
    assert [result.metrics.num_rounds for result in served.results] == [5, 3, 9, 1, 4]


def test_a_depth_beyond_the_recording_is_refused() -> None:
    config = EngineConfig(max_num_speculative_tokens=9)
    with pytest.raises(ValueError, match=r"max_num_speculative_tokens=9, but .* up to 8; lower"):
        ReplayDecoder(five_texts(), COST, config)


def test_a_shallower_engine_is_offered_less() -> None:
    decoder = ReplayDecoder(five_texts(), COST, EngineConfig(max_num_speculative_tokens=2))
    decoder.engine.set_scheduler(Off())
    for request in decoder.requests():
        decoder.engine.add_request(
            request.prompt_token_ids, request.sampling, recording=request.recording
        )
    state = decoder.engine.begin_round()
    assert state is not None
    assert state.max_num_speculative_tokens == 2
    assert state.proposal_length.max() <= 2


@pytest.mark.parametrize("recording", [None, -1, 5])
def test_a_request_without_a_recording_is_refused(recording: int | None) -> None:
    decoder = ReplayDecoder(five_texts(), COST)
    lost = WorkloadRequest(
        prompt_token_ids=(1, 2), sampling=SamplingParams(max_new_tokens=2), recording=recording
    )
    with pytest.raises(ValueError, match=r"replay needs the row of a recording, 0\.\.4, got"):
        replay(decoder, (lost,))
    assert not decoder.engine.has_work
    assert decoder.engine.pool.num_free == decoder.engine.pool.num_blocks


def test_more_tokens_than_recorded_are_refused_where_the_text_did_not_end() -> None:
    decoder = ReplayDecoder(five_texts(), COST, EngineConfig(max_model_len=1000))
    longer = WorkloadRequest(
        prompt_token_ids=(0,) * 3, sampling=SamplingParams(max_new_tokens=7), recording=1
    )
    with pytest.raises(ValueError, match=r"request 1 was recorded for 3 tokens, .* asks for 7"):
        replay(decoder, (longer,))


def test_the_engine_verifies_as_the_trace_was_made() -> None:
    assert ReplayDecoder(five_texts(), COST).config.verification == "greedy"


def test_sizes_left_open_fit_the_longest_request() -> None:
    trace = five_texts()
    decoder = ReplayDecoder(trace, COST)
    assert decoder.config.max_model_len == (trace.num_prompt + trace.max_new_tokens).max()
    assert decoder.model_pair == "a+b"
    assert decoder.runner.drafter == "prompt-lookup"
