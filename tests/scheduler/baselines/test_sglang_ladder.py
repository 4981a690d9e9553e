from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.sglang_ladder import LadderBand, SGLangLadder


def play(
    ladder: SGLangLadder, state: Any, make_outcome: Any, accepted: float, rounds: int
) -> list[int]:
    """Depths of so many rounds in which each sequence gets `accepted` tokens accepted."""
    depths = []
    for _ in range(rounds):
        chosen = ladder.choose(state)
        assert len(set(chosen.tolist())) == 1
        depths.append(int(chosen[0]))
        ladder.observe(make_outcome(state, chosen, np.minimum(accepted, chosen)))
    return depths


# By hand, batch 1, ladder 1 3 5 7 from 3, average from 2, weight 0.2, thresholds: up at depth - 0.5, down
# at the depth below - 0.75. Rounds 1-15 with 3 accepted: 3 - 0.8^15 = 2.965 > 2.5, up to 5 (not > 4.5).
# Rounds 16-20 with 5: 5 - 2.035 * 0.8^5 = 4.333, stays. Rounds 21-25: 4.782 > 4.5, up to 7.
# Rounds 26-30 with 0: 4.782 * 0.8^5 = 1.567 <= 4.25 and <= 2.25 but not <= 0.25, down to 3.


def test_the_ladder_moves_as_worked_out_by_hand(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(), make_state(1)
    assert play(ladder, state, make_outcome, 3, 15) == [3] * 15
    assert play(ladder, state, make_outcome, 5, 5) == [5] * 5
    assert play(ladder, state, make_outcome, 5, 5) == [5] * 5
    assert play(ladder, state, make_outcome, 0, 5) == [7] * 5
    assert ladder.choose(state).tolist() == [3]


# Batch 8, ladder 0 1 3 from 3, average from 2. Rounds 1-15 with 0: 2 * 0.8^15 = 0.0704 <= 0.5, down to 1,
# and 0 counts as undershot at 0.5: down to 0. Rounds 16-20 at 0 teach nothing; then 1 is tried. Rounds
# 21-25 with 1: 1 - 0.9296 * 0.8^5 = 0.695 > 0.5, up to 3.


def test_depth_0_is_left_by_trying_the_shallowest_depth(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(), make_state(8)
    assert play(ladder, state, make_outcome, 0, 15) == [3] * 15
    assert play(ladder, state, make_outcome, 0, 5) == [0] * 5
    assert play(ladder, state, make_outcome, 1, 5) == [1] * 5
    assert ladder.choose(state).tolist() == [3] * 8


def test_a_failed_try_goes_back_to_0(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(), make_state(8)
    play(ladder, state, make_outcome, 0, 20)
    assert play(ladder, state, make_outcome, 0, 10) == [1] * 5 + [0] * 5


def test_a_ladder_that_began_at_0_first_tries_from_a_neutral_average(
    make_state: Any, make_outcome: Any
) -> None:
    # The average is set to 2 - 1 = 1; five rounds with 2 make it 2 - 0.8^5 = 1.672 > 1.5: up to 4.
    bands = (LadderBand(min_batch_size=1, depths=(0, 2, 4)),)
    ladder, state = SGLangLadder(bands, initial_depth=0, warmup_rounds=0), make_state(1)
    assert play(ladder, state, make_outcome, 2, 11) == [0] * 5 + [2] * 5 + [4]


def test_hysteresis_shifts_both_thresholds(make_state: Any, make_outcome: Any) -> None:
    # At depth 2 with the average at 1: up if 1 > 1.5 + up - 1, down if 1 <= 0.5 + down.
    for up, down, expected in ((0.0, 0.0, 3), (0.75, 0.0, 2), (0.0, 0.75, 1)):
        band = LadderBand(
            min_batch_size=1, depths=(1, 2, 3), up_hysteresis=up - 1, down_hysteresis=down
        )
        ladder, state = SGLangLadder((band,), initial_depth=2, warmup_rounds=0), make_state(1)
        play(ladder, state, make_outcome, 1, 5)
        assert ladder.choose(state).tolist() == [expected], (up, down)


@pytest.mark.parametrize(
    ("num_running", "depth"), [(1, 3), (7, 3), (8, 3), (31, 3), (32, 1), (63, 1), (64, 0), (200, 0)]
)
def test_each_batch_size_starts_on_its_own_ladder(
    make_state: Any, num_running: int, depth: int
) -> None:
    assert SGLangLadder().choose(make_state(num_running)).tolist() == [depth] * num_running


def test_ladders_learn_apart(make_state: Any, make_outcome: Any) -> None:
    ladder = SGLangLadder()
    play(ladder, make_state(8), make_outcome, 0, 15)
    assert ladder.choose(make_state(1)).tolist() == [3]
    assert ladder.choose(make_state(8)).tolist() == [0] * 8


def test_depths_above_k_are_left_out(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(), make_state(1, 4)
    assert max(play(ladder, state, make_outcome, 4, 60)) == 3
    assert SGLangLadder().choose(make_state(1, 2)).tolist() == [1]
    assert SGLangLadder((LadderBand(min_batch_size=1, depths=(5, 7)),), initial_depth=5).choose(
        make_state(1, 2)
    ).tolist() == [2]


def test_only_sequences_that_drafted_count(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(warmup_rounds=0), make_state(2)
    for _ in range(5):
        ladder.choose(state)
        ladder.observe(make_outcome(state, [3, 0], [3, 0]))
    assert ladder.choose(state).tolist() == [
        5,
        5,
    ]  # 3 - 0.8^5 = 2.67 > 2.5; a mean of 1.5 would stay


def test_rounds_without_drafts_are_not_counted(make_state: Any, make_outcome: Any) -> None:
    ladder, state = SGLangLadder(warmup_rounds=0), make_state(2)
    for _ in range(50):
        ladder.choose(state)
        ladder.observe(make_outcome(state, [0, 0], [0, 0]))
    assert ladder.choose(state).tolist() == [3, 3]


@pytest.mark.parametrize("depths", [(), (3, 1), (1, 1), (-1, 2)])
def test_bad_ladders_are_refused(depths: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="ascending depths"):
        LadderBand(min_batch_size=1, depths=tuple(depths))


def test_bad_settings_are_refused() -> None:
    band = LadderBand(min_batch_size=1, depths=(1,))
    with pytest.raises(ValueError, match="different batch sizes"):
        SGLangLadder((band, band))
    with pytest.raises(ValueError, match="different batch sizes"):
        SGLangLadder(())
    for options in ({"ema_weight": 0.0}, {"update_interval": 0}, {"warmup_rounds": -1}):
        with pytest.raises(ValueError, match="ema_weight in"):
            SGLangLadder(**options)
