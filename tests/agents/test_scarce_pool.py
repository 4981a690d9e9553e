from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.scarce_pool import scarce_pool
from specdepth.decoder.arrivals import ClosedLoop
from specdepth.decoder.replay import BLOCK_SIZE, ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines import FixedDepth
from tests.envs.toy_trace import COST, toy_trace


def test_a_small_share_preempts_and_a_large_one_does_not() -> None:
    trace = toy_trace()
    preemptions = []
    for share in (0.6, 2.5):
        pool = scarce_pool(trace, 4, share)
        assert pool is not None
        decoder = ReplayDecoder(trace, COST, pool)
        workload = Workload(
            requests=decoder.requests(trace.rows("train")), process=ClosedLoop.constant(4)
        )
        preemptions.append(serve(decoder.engine, workload, FixedDepth(4)).metrics.num_preemptions)
    assert preemptions[0] > 5
    assert preemptions[1] == 0


def test_it_holds_the_share_that_was_asked_for() -> None:
    trace = toy_trace()
    rows = trace.rows("train")
    full = float(np.mean(trace.num_prompt[rows] + trace.num_tokens[rows]))
    pool = scarce_pool(trace, 16, 0.5)
    assert pool is not None
    assert pool.num_kv_blocks is not None
    assert pool.num_kv_blocks * BLOCK_SIZE == pytest.approx(0.5 * 16 * full, abs=BLOCK_SIZE)
    assert (pool.max_num_seqs, pool.max_num_speculative_tokens) == (16, 4)


def test_there_is_no_pool_too_small_for_the_longest_request() -> None:
    assert scarce_pool(toy_trace(), 1, 0.5) is None
