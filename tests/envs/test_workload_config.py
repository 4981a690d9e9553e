from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompts import Prompt
from specdepth.decoder.workload import ClosedLoop, OpenLoop
from specdepth.envs.workload_config import PromptPool, WorkloadConfig
from specdepth.envs.workload_run import WorkloadRun
from tests.envs.toy import toy_decoder, toy_prompts


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"arrivals": "sometimes"}, "arrivals must be one of"),
        ({"num_requests": 0}, "num_requests must be at least 1"),
        ({"concurrency": 0}, "a concurrency must be at least 1"),
        ({"concurrencies": (4, 0)}, "a concurrency must be at least 1"),
        ({"concurrencies": ()}, "at least one concurrency"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorkloadConfig(**settings)


def test_a_phase_has_room_for_what_a_busier_one_left_in_the_engine() -> None:
    config = WorkloadConfig(num_requests=100, concurrencies=(1, 4, 16))
    orders = set()
    for seed in range(20):
        process = config.process(100, np.random.default_rng(seed))
        assert isinstance(process, ClosedLoop)
        order = [phase.concurrency for phase in process.phases]
        orders.add(tuple(order))
        counts = [order[0], *(max(a, b) for a, b in pairwise(order))]
        ends = np.cumsum(counts) / sum(counts)
        assert [phase.until for phase in process.phases] == pytest.approx(ends.tolist())
    assert len(orders) == 6


def test_every_concurrency_of_a_varying_workload_is_really_met() -> None:
    decoder = toy_decoder(max_num_seqs=8)
    config = WorkloadConfig(num_requests=25, concurrencies=(1, 3, 8), max_new_tokens=14)
    pool = PromptPool(decoder, toy_prompts())
    for seed in range(2):
        run = WorkloadRun(decoder.engine, pool.workload(config, np.random.default_rng(seed)))
        rounds: Counter[int] = Counter()
        state = run.next_decision()
        while state is not None:
            rounds[state.num_running] += 1
            run.finish_round(np.zeros(state.num_running, np.int64))
            state = run.next_decision()
        assert all(rounds[load] >= 8 for load in (1, 3, 8)), rounds


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_open_loops_have_a_time_for_each_request(arrivals: Any) -> None:
    config = WorkloadConfig(arrivals=arrivals, num_requests=7)
    process = config.process(7, np.random.default_rng(0))
    assert config.is_open_loop
    assert isinstance(process, OpenLoop)
    assert len(process.times_s) == 7


def test_the_same_generator_draws_the_same_workload() -> None:
    pool = PromptPool(toy_decoder(), toy_prompts())
    config = WorkloadConfig(num_requests=20, arrivals="bursty", temperature=0.5)
    first, again, other = (pool.workload(config, np.random.default_rng(s)) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({request.sampling.seed for request in first.requests}) == 20


def test_kinds_are_drawn_evenly_however_many_prompts_they_have() -> None:
    decoder = toy_decoder()
    decoder.tokenizer = None
    pool = PromptPool(decoder, [[1], [2], [3]])
    pool._by_kind, pool._kinds = {"a": [(1,)], "b": [(2,)] * 99}, ("a", "b")
    workload = pool.workload(WorkloadConfig(num_requests=400), np.random.default_rng(0))
    share = sum(request.kind == "a" for request in workload.requests) / 400
    assert 0.4 < share < 0.6


def test_sampling_can_be_given_whole() -> None:
    pool = PromptPool(toy_decoder(), toy_prompts())
    sampling = SamplingParams(temperature=0.7, top_k=5, max_new_tokens=3, seed=11)
    workload = pool.workload(WorkloadConfig(num_requests=4), np.random.default_rng(0), sampling)
    assert {request.sampling for request in workload.requests} == {sampling}


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([], "at least one prompt"),
        ([[1], []], "must not be empty"),
        ([[10**6]], "the vocabulary has"),
        (["text"], "no tokenizer"),
        ([Prompt(id="a", kind="chat", text="hello", split="train")], "no tokenizer"),
        (None, "no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(prompts: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PromptPool(toy_decoder(), prompts)
