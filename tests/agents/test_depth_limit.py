from __future__ import annotations

import pytest

from specdepth.agents.depth_limit import deepest_depth, depths_to_try
from specdepth.decoder.trace_files import load_trace


@pytest.mark.parametrize(
    ("draft", "asked", "expected"),
    [
        ("prompt-lookup", None, 32),
        ("smollm2-eagle3", None, 8),
        ("none", None, 8),
        ("prompt-lookup", 5, 5),
        ("prompt-lookup", 0, 0),
    ],
)
def test_what_is_asked_for_wins_over_what_suits_the_drafter(
    draft: str, asked: int | None, expected: int
) -> None:
    assert deepest_depth(draft, asked) == expected


@pytest.mark.parametrize(("asked", "expected"), [(None, 32), (3, 3), (0, 0)])
def test_a_replay_goes_as_deep_as_was_recorded_unless_told_otherwise(
    asked: int | None, expected: int
) -> None:
    assert load_trace("default").info.depth_limit(asked) == expected


@pytest.mark.parametrize(
    ("top", "beyond"),
    [(0, []), (1, []), (16, []), (17, [17]), (20, [20]), (21, [20, 21]), (32, [20, 24, 28, 32])],
)
def test_every_depth_is_tried_up_to_16_and_every_fourth_above(top: int, beyond: list[int]) -> None:
    assert list(depths_to_try(top)) == [*range(1, min(top, 16) + 1), *beyond]
