from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.workload import ClosedLoop, OpenLoop
from specdepth.envs.recording_pool import RecordingPool
from specdepth.envs.workload_config import WorkloadConfig
from tests.envs.toy_trace import toy_replay, toy_trace

MANY = WorkloadConfig(num_requests=400)


def rows_of(pool: RecordingPool) -> set[int]:
    workload = pool.workload(WorkloadConfig(num_requests=2000), np.random.default_rng(0))
    return {request.recording for request in workload.requests if request.recording is not None}


def test_requests_are_those_of_the_training_split_by_default() -> None:
    decoder = toy_replay()
    assert rows_of(RecordingPool(decoder)) == set(decoder.trace.rows("train").tolist())


@pytest.mark.parametrize("split", ["train", "held-out", None])
@pytest.mark.parametrize("looping", [True, False])
def test_split_and_looping_texts_can_be_chosen(split: Any, looping: bool) -> None:
    decoder = toy_replay(toy_trace(60))
    expected = decoder.trace.rows(split, looping=None if looping else False)
    assert rows_of(RecordingPool(decoder, split=split, looping=looping)) == set(expected.tolist())


def test_each_request_is_as_long_as_it_was_recorded() -> None:
    decoder = toy_replay()
    trace = decoder.trace
    for request in RecordingPool(decoder).workload(MANY, np.random.default_rng(0)).requests:
        assert request.recording is not None
        assert len(request.prompt_token_ids) == trace.num_prompt[request.recording]
        assert request.sampling.max_new_tokens == trace.max_new_tokens[request.recording]
        assert request.kind == trace.kinds[request.recording]


def test_a_limit_cuts_texts_shorter_and_can_be_lifted_again() -> None:
    pool, rng = RecordingPool(toy_replay()), np.random.default_rng(0)
    cut = pool.workload(WorkloadConfig(num_requests=50, max_new_tokens=7), rng)
    assert {request.sampling.max_new_tokens for request in cut.requests} == {7}
    whole = pool.workload(WorkloadConfig(num_requests=50), rng)
    assert min(request.sampling.max_new_tokens for request in whole.requests) > 7


def test_kinds_are_drawn_evenly_however_many_requests_they_have() -> None:
    workload = RecordingPool(toy_replay()).workload(MANY, np.random.default_rng(0))
    counts = Counter(request.kind for request in workload.requests)
    assert counts.keys() == {"chat", "code"}
    assert 0.4 < counts["code"] / 400 < 0.6


@pytest.mark.parametrize(
    ("arrivals", "kind"),
    [
        ("constant", ClosedLoop),
        ("varying", ClosedLoop),
        ("poisson", OpenLoop),
        ("bursty", OpenLoop),
    ],
)
def test_arrivals_are_those_of_the_configuration(arrivals: Any, kind: type) -> None:
    config = WorkloadConfig(arrivals=arrivals, num_requests=9)
    workload = RecordingPool(toy_replay()).workload(config, np.random.default_rng(0))
    assert workload.num_requests == 9
    assert isinstance(workload.process, kind)


def test_the_same_generator_draws_the_same_workload() -> None:
    pool = RecordingPool(toy_replay())
    first, again, other = (pool.workload(MANY, np.random.default_rng(s)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_recorded_temperature_may_be_asked_for_and_no_other() -> None:
    trace = toy_trace(verification="coupled", temperature=0.7)
    pool, rng = RecordingPool(toy_replay(trace)), np.random.default_rng(0)
    for temperature in (0.0, 0.7):
        workload = pool.workload(WorkloadConfig(temperature=temperature), rng)
        assert {request.sampling.temperature for request in workload.requests} == {0.7}
    with pytest.raises(ValueError, match=r"recorded at temperature 0\.7 and top_p 1\.0"):
        pool.workload(WorkloadConfig(temperature=0.5), rng)


def test_a_trace_without_such_requests_is_refused() -> None:
    trace = toy_trace(1)  # one request for training, and it loops
    with pytest.raises(ValueError, match="no requests in its split 'held-out'"):
        RecordingPool(toy_replay(trace), split="held-out")
    with pytest.raises(ValueError, match="no requests that do not loop"):
        RecordingPool(toy_replay(trace), looping=False)


def test_a_pool_of_blocks_that_cannot_hold_the_longest_request_is_refused_at_once() -> None:
    trace = toy_trace()
    longest = int((trace.num_prompt + trace.max_new_tokens)[trace.rows("train")].max())
    needed = -(-longest // 4)
    RecordingPool(toy_replay(trace, block_size=4, num_kv_blocks=needed))
    with pytest.raises(ValueError, match=f"needs {needed} KV blocks of 4 tokens"):
        RecordingPool(toy_replay(trace, block_size=4, num_kv_blocks=needed - 1))
