from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines import FixedDepth, HeuristicDepth, Off, RandomDepth
from specdepth.scheduler.depth import check_depths

# Off and fixed


def test_off_never_drafts(make_state: Any, make_outcome: Any) -> None:
    off = Off()
    for num_running in (0, 1, 7):
        state = make_state(num_running)
        depths = check_depths(off.choose(state), state, off)
        assert depths.tolist() == [0] * num_running
        off.observe(make_outcome(state, depths, depths))


def test_fixed_drafts_the_same_for_all(make_state: Any) -> None:
    assert FixedDepth(3).choose(make_state(4)).tolist() == [3] * 4


def test_fixed_deeper_than_the_limit_is_refused_by_the_seam(make_state: Any) -> None:
    state, fixed = make_state(2, 4), FixedDepth(5)
    with pytest.raises(ValueError, match=r"FixedDepth\.choose returned a depth of 5"):
        check_depths(fixed.choose(state), state, fixed)


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_fixed_needs_a_whole_number(depth: Any) -> None:
    with pytest.raises(ValueError, match="a fixed depth is"):
        FixedDepth(depth)


# Random


def test_random_depths_repeat_with_their_seed(make_state: Any) -> None:
    state = make_state(16)
    one, same, other = RandomDepth(1), RandomDepth(1), RandomDepth(2)
    rounds = [one.choose(state).tolist() for _ in range(3)]
    assert [same.choose(state).tolist() for _ in range(3)] == rounds
    assert [other.choose(state).tolist() for _ in range(3)] != rounds


def test_random_starts_again_after_reset(make_state: Any) -> None:
    state, scheduler = make_state(16), RandomDepth(1)
    first = scheduler.choose(state).tolist()
    scheduler.choose(state)
    scheduler.reset()
    assert scheduler.choose(state).tolist() == first


def test_random_depths_reach_every_depth_and_no_other(make_state: Any) -> None:
    state, scheduler = make_state(64, 5), RandomDepth()
    seen = np.concatenate([scheduler.choose(state) for _ in range(20)])
    assert set(seen.tolist()) == set(range(6))


# Heuristic


def step(scheduler: HeuristicDepth, state: Any, make_outcome: Any, accepted: Any) -> list[int]:
    depths = scheduler.choose(state)
    scheduler.observe(make_outcome(state, depths, np.minimum(accepted, depths)))
    return depths.tolist()


def test_heuristic_goes_up_by_two_and_down_by_one(make_state: Any, make_outcome: Any) -> None:
    state, scheduler = make_state(2, 16), HeuristicDepth(start=4)
    assert step(scheduler, state, make_outcome, [16, 0]) == [4, 4]
    assert step(scheduler, state, make_outcome, [16, 0]) == [6, 3]
    assert step(scheduler, state, make_outcome, [0, 16]) == [8, 2]
    assert scheduler.choose(state).tolist() == [7, 4]


def test_heuristic_never_goes_below_one(make_state: Any, make_outcome: Any) -> None:
    state, scheduler = make_state(1), HeuristicDepth(start=2)
    for _ in range(5):
        step(scheduler, state, make_outcome, [0])
    assert scheduler.choose(state).tolist() == [1]


def test_heuristic_never_goes_beyond_the_limit(make_state: Any, make_outcome: Any) -> None:
    state, scheduler = make_state(1, 8), HeuristicDepth()
    assert [step(scheduler, state, make_outcome, [8])[0] for _ in range(3)] == [8, 8, 8]
    step(scheduler, state, make_outcome, [0])
    assert scheduler.choose(state).tolist() == [7], "the limit is not exceeded in secret"


def test_heuristic_starts_as_deep_as_transformers(make_state: Any) -> None:
    assert HeuristicDepth().choose(make_state(1, 32)).tolist() == [20]


def test_heuristic_starts_afresh_with_a_new_request_in_the_slot(
    make_state: Any, make_outcome: Any
) -> None:
    scheduler = HeuristicDepth(start=4)
    step(scheduler, make_state(1), make_outcome, [0])
    newcomer = make_state(1, request_ids=np.array([999]))
    assert scheduler.choose(newcomer).tolist() == [4]


def test_heuristic_follows_a_sequence_whatever_its_row(make_state: Any, make_outcome: Any) -> None:
    scheduler = HeuristicDepth(start=4)
    step(scheduler, make_state(2), make_outcome, [8, 0])
    turned = make_state(2, slots=np.array([1, 0]), request_ids=np.array([101, 100]))
    assert scheduler.choose(turned).tolist() == [3, 6]


def test_heuristic_keeps_its_depth_when_nothing_was_drafted(
    make_state: Any, make_outcome: Any
) -> None:
    state, scheduler = make_state(1), HeuristicDepth(start=4)
    scheduler.choose(state)
    scheduler.observe(make_outcome(state, [0], [0]))
    assert scheduler.choose(state).tolist() == [4]


def test_heuristic_counts_a_clipped_draft_that_was_accepted_as_full(
    make_state: Any, make_outcome: Any
) -> None:
    state, scheduler = make_state(1), HeuristicDepth(start=4)
    scheduler.choose(state)
    scheduler.observe(make_outcome(state, [2], [2]))
    assert scheduler.choose(state).tolist() == [6]


def test_heuristic_remembers_a_preempted_request(make_state: Any, make_outcome: Any) -> None:
    scheduler = HeuristicDepth(start=4)
    state = make_state(2)
    step(scheduler, state, make_outcome, [8, 0])
    scheduler.choose(state)
    gone = make_outcome(state, [0, 0], [0, 0], preempted=np.array([False, True]))
    scheduler.observe(gone)
    scheduler.choose(make_state(2, request_ids=np.array([100, 300])))
    back = make_state(2, slots=np.array([0, 5]))
    assert scheduler.choose(back).tolist() == [6, 3]


def test_heuristic_memory_does_not_grow_with_requests(make_state: Any, make_outcome: Any) -> None:
    scheduler = HeuristicDepth()
    everyone = np.ones(32, np.bool_)
    for round_index in range(200):
        state = make_state(32, request_ids=np.arange(32) + 32 * round_index)
        depths = scheduler.choose(state)
        scheduler.observe(make_outcome(state, depths, depths, preempted=everyone))
    sizes = [len(value) for value in vars(scheduler).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 4096


def test_heuristic_reset_forgets(make_state: Any, make_outcome: Any) -> None:
    state, scheduler = make_state(1), HeuristicDepth(start=4)
    step(scheduler, state, make_outcome, [0])
    scheduler.reset()
    assert scheduler.choose(state).tolist() == [4]


def test_heuristic_grows_with_the_engine(make_state: Any) -> None:
    scheduler = HeuristicDepth(start=2)
    scheduler.choose(make_state(2, max_num_seqs=2))
    assert scheduler.choose(make_state(40, max_num_seqs=40)).tolist() == [2] * 40


def test_heuristic_needs_a_start_of_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HeuristicDepth(0)
