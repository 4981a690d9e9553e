from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.agents.comparison import MIN_REQUESTS
from specdepth.agents.fitting import FAIR_NEW_TOKENS, MIN_NEW_TOKENS, Fit, _block_s, fit
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.workload import WorkloadRequest
from specdepth.scheduler.cost import CostModel

COST = CostModel.linear(base_s=0.05, token_s=0.003)


def requests(lengths: list[int], max_new_tokens: int = 48) -> list[WorkloadRequest]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return [WorkloadRequest(prompt_token_ids=(1,) * n, sampling=sampling) for n in lengths]


MIXED = requests([20, 200, 60, 300, 100, 30] * 10)


def chosen(seconds: float, loads: tuple[int, ...] = (1, 4, 16), num_runs: int = 7) -> Fit:
    return fit(MIXED, loads, seconds=seconds, cost=COST, num_runs=num_runs)


def predicted_s(found: Fit, num_runs: int = 7) -> float:
    return num_runs * sum(
        _block_s(COST, found.requests, load, size) for load, size in found.sizes.items()
    )


def answer(found: Fit) -> int:
    return max(request.sampling.max_new_tokens for request in found.requests)


def test_with_time_enough_nothing_is_cut():
    found = chosen(math.inf)
    assert found.requests == MIXED
    assert found.sizes == {1: 4, 4: 6, 16: 24}
    assert found.notes == []


def test_cuts_come_in_order_as_time_shrinks():
    whole_s = predicted_s(chosen(math.inf))
    stages = []
    for share in (1.01, 0.7, 0.5, 0.3, 0.15, 0.01):
        found = chosen(share * whole_s)
        narrow = found.sizes[16] == 16
        stages.append((narrow, -answer(found), -len(found.requests)))
    assert stages == sorted(stages)
    assert stages[0] == (False, -48, -60)
    assert stages[-1] == (True, -MIN_NEW_TOKENS, -16)


def test_long_prompts_go_only_when_answers_are_fair():
    for seconds in (10, 20, 40, 60, 80, 100):
        found = chosen(seconds)
        if len(found.requests) < len(MIXED):
            assert answer(found) <= FAIR_NEW_TOKENS
        if answer(found) < FAIR_NEW_TOKENS:
            assert len(found.requests) == 16


def test_the_shortest_prompts_are_kept_in_their_order():
    found = chosen(1.0)
    lengths = [len(request.prompt_token_ids) for request in found.requests]
    assert set(lengths) == {20, 30}
    assert lengths[:4] == [20, 30, 20, 30]
    assert any("more than 30 tokens" in note for note in found.notes)
    assert any(f"cut to {MIN_NEW_TOKENS} instead of 48" in note for note in found.notes)


def test_equal_prompts_can_be_left_out_too():
    same = requests([400] * 8)
    found = fit(same, (4,), seconds=1.0, cost=COST, num_runs=3)
    assert len(found.requests) == 4


def test_answers_that_are_short_already_stay():
    short = [replace(r, sampling=SamplingParams(max_new_tokens=5)) for r in MIXED]
    found = fit(short, (1,), seconds=0.001, cost=COST, num_runs=7)
    assert answer(found) == 5
    assert not any("Answers were cut" in note for note in found.notes)


@settings(max_examples=50)
@given(
    seconds=st.floats(0.1, 1000),
    lengths=st.lists(st.integers(1, 500), min_size=16, max_size=40),
    num_runs=st.integers(1, 9),
)
def test_what_is_chosen_fits_or_is_the_least(seconds, lengths, num_runs):
    given_requests = requests(lengths)
    found = fit(given_requests, (1, 16), seconds=seconds, cost=COST, num_runs=num_runs)
    assert all(found.sizes[load] >= load for load in (1, 16))
    assert len(found.requests) >= max(found.sizes.values())
    is_least = answer(found) == MIN_NEW_TOKENS and len(found.requests) == 16
    assert is_least or predicted_s(found, num_runs) <= seconds


def test_a_load_above_the_number_of_requests_takes_them_all():
    found = fit(requests([10] * 5), (4,), seconds=math.inf, cost=COST, num_runs=1)
    assert found.sizes == {4: 5}


@pytest.mark.parametrize(("load", "size"), [(1, 4), (2, 4), (3, 4), (4, 6), (16, 24)])
def test_blocks_are_half_as_long_again_as_the_load_and_enough_for_an_interval(load, size):
    assert size >= MIN_REQUESTS
    assert chosen(math.inf, (load,)).sizes == {load: size}
