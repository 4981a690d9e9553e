from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.adaedl import AdaEDL
from specdepth.scheduler.depth import DraftSignals


def keeps(rule: AdaEDL, state: Any, *entropies: float) -> list[bool]:
    """Answers for sequences whose next laws have these entropies."""
    entropy = np.array(entropies)[:, None]
    signals = DraftSignals(np.arange(len(entropy)), 0, entropy, entropy, entropy)
    answer: list[bool] = rule.keep_drafting(state, signals).tolist()
    return answer


def thresholds(rule: AdaEDL, state: Any) -> list[float]:
    rule.choose(state)
    found: list[float] = rule._memory.at(state.slots)[:, 0].tolist()
    return found


def test_adaedl_stops_below_its_bound(make_state: Any) -> None:
    # 1 - sqrt(0.1 H) = 0.5 at H = 2.5.
    rule, state = AdaEDL(), make_state(4, drafter="draft-model")
    rule.choose(state)
    assert keeps(rule, state, 0.0, 2.49, 2.51, 1000.0) == [True, True, False, False]


def test_adaedl_thresholds_by_hand(make_state: Any, make_outcome: Any) -> None:
    # Average from 0; 4 of 8 accepted: A = 0.25 < 0.9, threshold 0.9 * 0.5 + 0.1 * 0.51 = 0.501.
    # Then all 8 each time: A = 0.625, 0.8125 and the threshold 0.502, 0.503; then A = 0.90625 > 0.9 with all
    # of K accepted: 0.9 * 0.503 + 0.1 * 0.493 = 0.502.
    rule, state = AdaEDL(), make_state(1, drafter="draft-model")
    for accepted, expected in ((4, 0.501), (8, 0.502), (8, 0.503), (8, 0.502)):
        rule.choose(state)
        rule.observe(make_outcome(state, [8], [accepted]))
        assert thresholds(rule, state) == [pytest.approx(expected, abs=1e-12)]
    # A = 0.953 after 3 of 3, which is not all of K: the threshold stays.
    rule.observe(make_outcome(state, [3], [3]))
    assert thresholds(rule, state) == [pytest.approx(0.502, abs=1e-12)]


def test_adaedl_moves_each_request_by_itself(make_state: Any, make_outcome: Any) -> None:
    rule, state = AdaEDL(), make_state(2, drafter="draft-model")
    for _ in range(10):
        rule.choose(state)
        rule.observe(make_outcome(state, [8, 8], [8, 0]))
    good, bad = thresholds(rule, state)
    assert good < 0.5 < bad


def test_adaedl_learns_nothing_from_rounds_without_drafts(
    make_state: Any, make_outcome: Any
) -> None:
    rule, state = AdaEDL(), make_state(2, drafter="draft-model")
    for _ in range(5):
        rule.choose(state)
        rule.observe(make_outcome(state, [0, 0], [0, 0], preempted=np.array([False, True])))
    assert thresholds(rule, state) == [0.5, 0.5]


def test_adaedl_threshold_stays_a_probability(make_state: Any, make_outcome: Any) -> None:
    state = make_state(2, drafter="draft-model")
    for start in (0.0, 1.0):
        rule = AdaEDL(threshold=start)
        for _ in range(20):
            rule.choose(state)
            rule.observe(make_outcome(state, [8, 8], [8, 0]))
        assert all(0 <= threshold <= 1 for threshold in thresholds(rule, state))


def test_adaedl_remembers_a_preempted_request(make_state: Any, make_outcome: Any) -> None:
    rule, state = AdaEDL(), make_state(2, drafter="draft-model")
    for _ in range(4):
        rule.choose(state)
        rule.observe(make_outcome(state, [8, 8], [0, 8]))
    before = thresholds(rule, state)
    rule.observe(make_outcome(state, [0, 0], [0, 0], preempted=np.array([True, False])))
    newcomer = make_state(2, request_ids=np.array([300, 101]), drafter="draft-model")
    assert thresholds(rule, newcomer) == [0.5, before[1]]
    back = make_state(2, slots=np.array([7, 1]), drafter="draft-model")
    assert thresholds(rule, back) == before


def test_adaedl_memory_does_not_grow_with_requests(make_state: Any, make_outcome: Any) -> None:
    rule = AdaEDL()
    everyone = np.ones(32, np.bool_)
    for round_index in range(200):
        state = make_state(32, request_ids=np.arange(32) + 32 * round_index)
        depths = rule.choose(state)
        rule.observe(make_outcome(state, depths, depths, preempted=everyone))
    assert len(rule._memory._parked) == 4096
    assert len(rule._memory._owners) == 32


def test_adaedl_grows_with_the_engine(make_state: Any) -> None:
    rule = AdaEDL()
    rule.choose(make_state(2, max_num_seqs=2))
    assert thresholds(rule, make_state(40, max_num_seqs=40)) == [0.5] * 40


@pytest.mark.parametrize("options", [{"gamma": 0.0}, {"gamma": float("nan")}, {"threshold": 1.5}])
def test_adaedl_refuses_bad_settings(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="AdaEDL's"):
        AdaEDL(**options)
