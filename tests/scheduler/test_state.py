from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.state import SequenceHistory


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def test_a_new_slot_knows_nothing() -> None:
    history = SequenceHistory(3, 4)
    assert history.acceptance_ema.tolist() == [0.5] * 3
    assert history.num_drafted_rounds.tolist() == [0] * 3
    assert history.last_depth.tolist() == history.last_accepted.tolist() == [-1] * 3
    assert np.isnan(history.draft_top1).all()
    assert np.isnan(history.target_entropy).all()


def test_a_drafting_round_moves_the_average_by_its_weight() -> None:
    history = SequenceHistory(2, 4)
    history.update(ints(1), ints(4), ints(1))
    assert history.acceptance_ema[1] == pytest.approx(0.5 + 0.3 * (0.25 - 0.5))
    assert history.acceptance_ema_slow[1] == pytest.approx(0.5 + 0.08 * (0.25 - 0.5))
    assert history.num_drafted_tokens[1] == 4
    assert history.num_accepted_tokens[1] == 1


def test_other_slots_are_left_alone() -> None:
    history = SequenceHistory(3, 4)
    before = history.save(0), history.save(2)
    history.update(ints(1), ints(4), ints(1))
    for slot, saved in zip((0, 2), before, strict=True):
        for was, now in zip(saved, history.save(slot), strict=True):
            np.testing.assert_array_equal(now, was)


def test_a_round_without_drafts_keeps_acceptance_and_counts_the_gap() -> None:
    history = SequenceHistory(1, 4)
    history.update(ints(0), ints(2), ints(2))
    for gap in (1, 2, 3):
        history.update(ints(0), ints(0), ints(0))
        assert history.rounds_since_draft[0] == gap
    assert history.last_depth[0] == 0
    assert history.last_accepted[0] == 2
    assert history.full_streak[0] == 1
    assert history.num_drafted_rounds[0] == 1


def test_drafting_again_closes_the_gap() -> None:
    history = SequenceHistory(1, 4)
    history.update(ints(0), ints(0), ints(0))
    history.update(ints(0), ints(3), ints(1))
    assert history.rounds_since_draft[0] == 0


def test_the_streak_counts_full_rounds_and_breaks() -> None:
    history = SequenceHistory(1, 4)
    for drafted, accepted, streak in ((2, 2, 1), (4, 4, 2), (0, 0, 2), (4, 3, 0), (1, 1, 1)):
        history.update(ints(0), ints(drafted), ints(accepted))
        assert history.full_streak[0] == streak


def test_mixed_rounds_update_only_those_that_drafted() -> None:
    history = SequenceHistory(3, 4)
    history.update(ints(2, 0), ints(0, 4), ints(0, 4))
    assert history.num_drafted_rounds.tolist() == [1, 0, 0]
    assert history.rounds_since_draft.tolist() == [0, 0, 1]
    assert history.last_depth.tolist() == [4, -1, 0]


def test_reset_forgets_one_slot() -> None:
    history = SequenceHistory(2, 4)
    history.update(ints(0, 1), ints(4, 4), ints(4, 4))
    history.draft_top1[:] = 0.9
    history.reset(ints(0))
    assert history.num_drafted_rounds.tolist() == [0, 1]
    assert np.isnan(history.draft_top1[0]).all()
    assert (history.draft_top1[1] == 0.9).all()


def test_a_preempted_history_moves_to_another_slot() -> None:
    history = SequenceHistory(3, 4)
    history.update(ints(0), ints(4), ints(3))
    history.draft_entropy[0] = 0.25
    saved = history.save(0)
    history.reset(ints(0))
    history.restore(2, saved)
    assert history.num_accepted_tokens.tolist() == [0, 0, 3]
    assert (history.draft_entropy[2] == 0.25).all()


def test_what_was_saved_does_not_change_with_its_slot() -> None:
    history = SequenceHistory(1, 4)
    saved = history.save(0)
    history.draft_top1[0] = 0.5
    assert np.isnan(saved.draft_signals).all()


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), max_size=30))
def test_averages_stay_between_zero_and_one(rounds: list[tuple[int, float]]) -> None:
    history = SequenceHistory(1, 8)
    for drafted, share in rounds:
        history.update(ints(0), ints(drafted), ints(int(share * drafted)))
        assert 0 <= history.acceptance_ema[0] <= 1
        assert 0 <= history.acceptance_ema_slow[0] <= 1
        assert history.num_accepted_tokens[0] <= history.num_drafted_tokens[0]


def test_slots_in_any_order_give_the_same_history() -> None:
    one, other = SequenceHistory(4, 4), SequenceHistory(4, 4)
    one.update(ints(0, 1, 3), ints(4, 0, 2), ints(1, 0, 2))
    other.update(ints(3, 0, 1), ints(2, 4, 0), ints(2, 1, 0))
    for name, array in vars(one).items():
        np.testing.assert_array_equal(array, getattr(other, name))


def test_elapsed_time_is_the_sum_of_its_parts(make_state: Any, make_outcome: Any) -> None:
    outcome = make_outcome(
        make_state(1), [2], [1], draft_s=1.0, verify_s=2.0, schedule_s=4.0, other_s=8.0
    )
    assert outcome.elapsed_s == 15.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copy_has_names_for_its_own_numbers(copied: Any) -> None:
    history = SequenceHistory(2, 4)
    other = copied(history)
    other.update(ints(1), ints(4), ints(2))
    other.last_match_length[1] = 3
    assert other.counts[7, 1] == 3
    assert other.last_accepted.tolist() == [-1, 2]
    assert history.last_accepted.tolist() == [-1, -1]
