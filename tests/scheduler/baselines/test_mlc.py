from __future__ import annotations

from typing import Any

import pytest

from specdepth.scheduler.baselines.mlc import MlcDepth


@pytest.mark.parametrize(
    ("num_running", "depth"),
    [(1, 4), (9, 4), (10, 3), (19, 3), (20, 2), (29, 2), (30, 0), (500, 0)],
)
def test_thresholds_are_those_of_mlc(num_running: int, depth: int, make_state: Any) -> None:
    assert MlcDepth().choose(make_state(num_running)).tolist() == [depth] * num_running


def test_depths_are_cut_to_the_engine(make_state: Any) -> None:
    assert MlcDepth().choose(make_state(2, 3)).tolist() == [3, 3]


def test_a_batch_beyond_the_limit_does_not_draft(make_state: Any) -> None:
    scheduler = MlcDepth(max_num_sequence=40)
    assert scheduler.choose(make_state(8)).tolist() == [4] * 8
    assert scheduler.choose(make_state(9)).tolist() == [0] * 9
    assert scheduler.choose(make_state(10)).tolist() == [3] * 10


def test_the_limit_is_a_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="max_num_sequence is 1 or more, got 0"):
        MlcDepth(0)
