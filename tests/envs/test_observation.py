from __future__ import annotations

import numpy as np

from specdepth.envs.observation import (
    COLUMN_NAMES,
    COLUMN_UNITS,
    NUM_COLUMNS,
    ROW_HIGH,
    ROW_LOW,
    slot_observation,
)
from specdepth.envs.workload_config import PromptPool, WorkloadConfig
from specdepth.envs.workload_run import WorkloadRun
from specdepth.scheduler.features import FEATURE_NAMES, feature_matrix
from tests.envs.toy import toy_decoder, toy_prompts


def test_columns_are_active_and_then_the_features() -> None:
    assert list(COLUMN_NAMES) == ["active", *FEATURE_NAMES]
    assert len(COLUMN_UNITS) == len(ROW_LOW) == len(ROW_HIGH) == NUM_COLUMNS == len(COLUMN_NAMES)


def test_empty_slots_lie_within_the_bounds() -> None:
    assert (ROW_LOW <= 0).all()
    assert (ROW_HIGH >= 0).all()
    assert not slot_observation(None, 3).any()


def test_rows_of_running_slots_are_the_features_that_a_deployed_policy_sees() -> None:
    decoder = toy_decoder()
    config = WorkloadConfig(arrivals="constant", num_requests=6, concurrency=3, max_new_tokens=12)
    workload = PromptPool(decoder, toy_prompts()).workload(config, np.random.default_rng(0))
    run = WorkloadRun(decoder.engine, workload)
    state = run.next_decision()
    rounds = 0
    while state is not None:
        observation = slot_observation(state, 4)
        assert np.array_equal(observation[state.slots, 1:], feature_matrix(state))
        assert np.array_equal(np.flatnonzero(observation[:, 0]), np.sort(state.slots))
        empty = np.setdiff1d(np.arange(4), state.slots)
        assert not observation[empty].any()
        run.finish_round(np.full(state.num_running, 2))
        state = run.next_decision()
        rounds += 1
    assert rounds > 5
