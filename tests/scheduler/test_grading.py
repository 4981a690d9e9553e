from __future__ import annotations

from typing import Any

import numpy as np

from specdepth.scheduler.grading import grade


def test_accepted_tokens_and_the_first_rejected_one_are_tested(
    make_state: Any, make_outcome: Any
) -> None:
    grades = grade(make_outcome(make_state(3, 4), [4, 4, 0], [1, 4, 0]), 4)
    assert grades.tested.astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert grades.accepted.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert grades.rejected.tolist() == [True, False, False]


def test_a_text_that_ends_within_its_accepted_tokens_rejects_nothing(
    make_state: Any, make_outcome: Any
) -> None:
    outcome = make_outcome(make_state(1, 4), [4], [2], num_committed=np.array([2]))
    grades = grade(outcome, 4)
    assert grades.tested.astype(int).tolist() == [[1, 1, 0, 0]]
    assert not grades.rejected.any()


def test_a_text_that_ends_with_the_recovered_token_was_rejected(
    make_state: Any, make_outcome: Any
) -> None:
    finished = np.array([True])
    outcome = make_outcome(make_state(1, 4), [4], [2], finished=finished)
    assert grade(outcome, 4).tested.sum() == 3


def test_a_preempted_sequence_was_not_tested(make_state: Any, make_outcome: Any) -> None:
    outcome = make_outcome(make_state(1, 4), [0], [0], num_committed=np.array([0]))
    assert not grade(outcome, 4).tested.any()
