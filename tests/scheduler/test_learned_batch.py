"""Policies that say one depth for all sequences of a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdepth.scheduler.batch_row import batch_row
from specdepth.scheduler.features import feature_matrix
from specdepth.scheduler.learned import LearnedScheduler


def varied_state(make_state: Any, num_running: int, **changes: Any) -> Any:
    rng = np.random.default_rng(num_running)
    fields = {
        "acceptance_ema": rng.random(num_running),
        "match_length": rng.integers(0, 5, num_running),
        "last_depth": rng.integers(-1, 9, num_running),
        "positions": rng.integers(1, 4000, num_running),
        "target_top1": rng.random(num_running),
    }
    return make_state(num_running, **(fields | changes))


def test_the_depth_comes_from_what_the_sequences_have_in_common(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    depths = (0, 8, 1, 7, 2, 6, 3, 5, 4)
    scheduler = LearnedScheduler(make_weights(action="batch", depths=depths), make_card())
    chosen = set()
    for running in range(1, 33):
        state = varied_state(make_state, running)
        scores = scheduler.scores(batch_row(feature_matrix(state))[None])
        best = depths[int(scores.argmax())]
        assert scheduler.choose(state).tolist() == [best] * running
        chosen.add(best)
    assert len(chosen) > 1, "the test would not notice a constant"


def test_for_one_sequence_it_is_what_the_policy_says_of_that_sequence(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    together = LearnedScheduler(make_weights(action="batch"), make_card(mask_depths=True))
    alone = LearnedScheduler(make_weights(), make_card(mask_depths=True))
    for limit in range(9):
        state = varied_state(make_state, 1, max_depths=np.array([limit]))
        assert together.choose(state).tolist() == alone.choose(state).tolist()


def test_it_is_masked_by_the_deepest_that_any_sequence_can_have(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    scheduler = LearnedScheduler(make_weights(action="batch"), make_card(mask_depths=True))
    free = LearnedScheduler(make_weights(action="batch"), make_card())
    cut = 0
    for limit in range(9):
        state = varied_state(make_state, 4, max_depths=np.array([0, limit, 0, 0]))
        assert scheduler.choose(state).max() <= limit
        cut += int(free.choose(state).max() > limit)
    assert cut


def test_without_a_sequence_there_is_nothing_to_choose(
    make_state: Any, make_weights: Any, make_card: Any
) -> None:
    scheduler = LearnedScheduler(make_weights(action="batch"), make_card())
    assert scheduler.choose(make_state(0)).shape == (0,)
