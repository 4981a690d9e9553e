from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from specdepth.agents.offset_weights import offset_weights
from specdepth.agents.pressure_weights import pressure_weights
from specdepth.agents.sensitivity import (
    SIGNALS,
    MemoryBlind,
    Signal,
    record_states,
    sensitivity,
    with_acceptance,
    with_batch_size,
    with_free_kv,
)
from specdepth.decoder.arrivals import ClosedLoop
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines import FixedDepth, Off, TableDepth
from specdepth.scheduler.baselines.ema_greedy import EmaGreedyDepth
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import FEATURE_NAMES, feature_matrix
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard
from specdepth.scheduler.state import RoundState
from tests.agents.toy_rule import toy_rule
from tests.envs.toy_trace import toy_replay, toy_trace

CARD = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)
BLIND = LearnedScheduler(offset_weights(toy_rule(), {}), CARD)
SEEING = LearnedScheduler(pressure_weights(BLIND.weights, np.array([0.0, -3.0, 0.0])), CARD)


@pytest.fixture(scope="module")
def states() -> list[RoundState]:
    """Of a toy workload in a pool that preempts."""
    decoder = toy_replay(num_kv_blocks=7)
    requests = decoder.requests(toy_trace().rows("train"))
    workload = Workload(requests=requests, process=ClosedLoop.constant(4))
    return record_states(decoder, workload, FixedDepth(2), num_states=60)


def features(state: RoundState) -> dict[str, np.ndarray]:
    return dict(zip(FEATURE_NAMES, feature_matrix(state).T, strict=True))


@pytest.mark.parametrize("signal", SIGNALS)
def test_depth_moves_with_each_signal_alone(states: list[RoundState], signal: Signal) -> None:
    found = sensitivity(SEEING, states, signal)
    assert (found.signal, found.num_states) == (signal, len(states))
    assert found.span > 0.1
    rises = {"batch size": False, "acceptance": True, "free KV": True}[signal]
    assert (found.depths[-1] > found.depths[0]) is rises


@pytest.mark.parametrize("blind", [BLIND, MemoryBlind(SEEING)], ids=["by weights", "by wrapper"])
def test_a_policy_blind_to_memory_does_not_move_with_it(
    states: list[RoundState], blind: DepthScheduler
) -> None:
    assert sensitivity(blind, states, "free KV").span == 0
    assert sensitivity(blind, states, "batch size").span > 0.1
    assert sensitivity(blind, states, "acceptance").span > 0.1


def test_rules_blind_to_a_signal_do_not_move_with_it(states: list[RoundState]) -> None:
    table = TableDepth([(1, 2, 4), (3, 64, 1)])
    assert sensitivity(table, states, "batch size").span > 0.5
    assert sensitivity(table, states, "acceptance").span == 0
    ema = EmaGreedyDepth()
    assert sensitivity(ema, states, "acceptance").span > 0.5
    assert sensitivity(ema, states, "free KV").span == 0
    for signal in SIGNALS:
        assert sensitivity(Off(), states, signal).depths == (0.0,) * len(
            sensitivity(Off(), states, signal).levels
        )


def test_what_is_blind_to_memory_has_the_optional_parts_of_its_scheduler(
    states: list[RoundState],
) -> None:
    class Stops(FixedDepth):
        lawful_under = frozenset({"greedy"})

        def keep_drafting(self, state: RoundState, signals: int) -> tuple[int, int]:
            return state.num_free_blocks, signals

    blind = MemoryBlind(Stops(2))
    assert blind.lawful_under == {"greedy"}
    free, signals = blind.keep_drafting(with_free_kv(states[0], 0), 7)
    assert free > 0
    assert signals == 7
    assert not hasattr(blind, "trim")
    assert not hasattr(MemoryBlind(FixedDepth(2)), "keep_drafting")


def test_with_room_for_all_both_policies_decide_alike(states: list[RoundState]) -> None:
    blind, seeing = (sensitivity(one, states, "free KV", (36.0,)) for one in (BLIND, SEEING))
    assert blind.depths == seeing.depths


def test_a_mean_counts_sequences_with_something_on_offer_and_what_can_be_honoured(
    states: list[RoundState],
) -> None:
    room = float(states[0].num_free_blocks * states[0].block_size / states[0].num_running)
    found = sensitivity(FixedDepth(4), states[:1], "free KV", (room,))
    offered = states[0].max_depths[states[0].max_depths > 0]
    assert list(found.depths) == pytest.approx([offered.mean()])


def changed_features(one: RoundState, other: RoundState) -> set[str]:
    before, after = features(one), features(other)
    return {name for name in before if not np.allclose(before[name], after[name], atol=1e-6)}


def test_free_kv_changes_nothing_but_the_pool(states: list[RoundState]) -> None:
    for state in states[::10]:
        changed = with_free_kv(state, 0)
        assert changed_features(state, changed) <= {"kv_room", "kv_used"}
        assert (changed.num_free_blocks, changed.kv_used_fraction) == (0, 1.0)
        roomy = with_free_kv(state, 36)
        used = state.num_blocks - state.num_free_blocks
        assert roomy.num_blocks - roomy.num_free_blocks == used
        assert (features(roomy)["kv_room"] > 0.9).all()


def test_acceptance_changes_what_belongs_to_it(states: list[RoundState]) -> None:
    allowed = {
        "acceptance",
        "acceptance_slow",
        "last_accepted",
        "full_streak",
        "batch_acceptance",
    }
    state = next(state for state in states if (state.num_drafted_rounds > 2).all())
    for rate in (0.0, 0.5, 1.0):
        changed = with_acceptance(state, rate)
        assert changed_features(state, changed) <= allowed
        np.testing.assert_array_equal(changed.acceptance_ema, rate)
        assert (changed.last_accepted <= np.maximum(state.last_depth, state.last_accepted)).all()
    assert not with_acceptance(state, 0.0).full_streak.any()
    assert (with_acceptance(state, 1.0).full_streak > 0).all()


def test_a_sequence_that_never_drafted_has_no_acceptance_to_change(
    states: list[RoundState],
) -> None:
    none = np.zeros(states[0].num_running, np.int64)
    fresh = replace(
        states[0],
        num_drafted_rounds=none,
        num_drafted_tokens=none,
        num_accepted_tokens=none,
        last_accepted=none - 1,
    )
    assert changed_features(fresh, with_acceptance(fresh, 1.0)) == set()


def test_a_batch_of_another_size_holds_the_same_sequences(states: list[RoundState]) -> None:
    state = next(state for state in states if state.num_running == 4)
    for count in (1, 3, 9):
        changed = with_batch_size(state, count)
        assert changed.num_running == count
        for field in fields(state):
            value = getattr(changed, field.name)
            if isinstance(value, np.ndarray):
                assert len(value) == count
        assert set(changed.request_ids) <= set(state.request_ids)
        assert len(set(changed.slots)) == count
        context = state.num_context_tokens - state.positions.sum()
        assert changed.num_context_tokens == context + changed.positions.sum()
        assert changed.num_free_blocks == round(state.num_free_blocks * count / 4)
    whole = with_batch_size(replace(state, round_index=0), 4)
    assert changed_features(state, whole) == set()


@pytest.mark.parametrize(
    ("change", "level"), [(with_batch_size, 0), (with_acceptance, 1.5), (with_free_kv, -1)]
)
def test_levels_out_of_range_are_refused(
    states: list[RoundState], change: Callable[[RoundState, float], RoundState], level: float
) -> None:
    with pytest.raises(ValueError, match="got"):
        change(states[0], level)


def test_what_cannot_be_studied_is_refused(states: list[RoundState]) -> None:
    with pytest.raises(ValueError, match="signal must be one of"):
        sensitivity(Off(), states, "weather")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="states and levels"):
        sensitivity(Off(), [], "acceptance")
    decoder = toy_replay(max_num_speculative_tokens=0)
    requests = decoder.requests(toy_trace().rows("train")[:2])
    workload = Workload(requests=requests, process=ClosedLoop.constant(1))
    with pytest.raises(ValueError, match="nothing can be varied"):
        record_states(decoder, workload, Off())
