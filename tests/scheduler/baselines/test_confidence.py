from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.baselines.confidence import HFConfidence, LlamaCppConfidence, roc_threshold
from specdepth.scheduler.depth import DraftSignals


def signals(*rows: list[float]) -> DraftSignals:
    """Top-1 probabilities so far, the last of each row of the token not drawn yet."""
    top1 = np.array(rows)
    return DraftSignals(np.arange(len(top1)), top1.shape[1] - 1, top1, top1, top1)


def draft_state(make_state: Any, num_running: int = 1, **changes: Any) -> Any:
    return make_state(num_running, drafter="draft-model", **changes)


def shown(num_columns: int, *rows: list[float]) -> np.ndarray:
    """`draft_top1` of an outcome: the given columns, then NaN."""
    return np.array([row + [np.nan] * (num_columns - len(row)) for row in rows])


# Which tokens are drafted


def test_hf_draws_the_first_token_whatever_its_probability(make_state: Any) -> None:
    state = draft_state(make_state, 2)
    assert HFConfidence().keep_drafting(state, signals([0.01], [0.9])).tolist() == [True, True]


def test_hf_keeps_the_unsure_token_and_stops_after_it(make_state: Any) -> None:
    state, rule = draft_state(make_state, 3), HFConfidence(0.4)
    before_third = signals([0.9, 0.39, 0.9], [0.9, 0.4, 0.1], [0.1, 0.9, 0.9])
    # Row 2 would have stopped before, and is only judged by its latest token.
    assert rule.keep_drafting(state, before_third).tolist() == [False, True, True]


def test_llamacpp_drops_the_unsure_token(make_state: Any) -> None:
    state, rule = draft_state(make_state, 3), LlamaCppConfidence()
    assert rule.keep_drafting(state, signals([0.74], [0.75], [0.9])).tolist() == [False, True, True]
    assert rule.keep_drafting(state, signals([0.1, 0.8], [0.9, 0.7], [0.9, 1.0])).tolist() == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("rule", [HFConfidence(), LlamaCppConfidence()])
def test_depths_before_stopping_are_what_is_on_offer(make_state: Any, rule: Any) -> None:
    offered = np.array([0, 3, 8, 12])
    for drafter in ("draft-model", "prompt-lookup"):
        state = make_state(4, max_depths=offered, drafter=drafter)
        assert rule.choose(state).tolist() == [0, 3, 8, 8]


# The threshold of transformers


def test_roc_threshold_by_hand() -> None:
    # 3 accepted, 3 rejected. At 0.9: 0 + 3 * 2/3; 0.8: 0 + 3 * 1/3; 0.7: 1/3 + 1; 0.6: 1/3; 0.5: 2/3; 0.4: 1.
    matched = np.array([True, True, False, True, False, False])
    assert roc_threshold(np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), matched) == 0.6


def test_roc_threshold_takes_equal_confidences_together() -> None:
    # At 0.9: 3 * 3/4; at 0.5: 1/2, not the 0 that the first three of the four 0.5 would give; at 0.2: 1.
    confidences = np.array([0.9, 0.5, 0.5, 0.5, 0.5, 0.2])
    matched = np.array([True, True, True, True, False, False])
    assert roc_threshold(confidences, matched) == 0.5


def test_roc_threshold_takes_the_highest_of_equally_good_ones() -> None:
    # At 0.9: 3 * 2/3; at 0.8: 3 * 1/3 = 1; then 1/3 more for each rejected one; at 0.4: 1 + 0 = 1 again.
    confidences = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    matched = np.array([True, True, False, False, False, True])
    assert roc_threshold(confidences, matched) == 0.8


@pytest.mark.parametrize("matched", [[True] * 8, [False] * 8, [True, False, True, True, False], []])
def test_roc_threshold_needs_six_tokens_of_both_fates(matched: list[bool]) -> None:
    assert roc_threshold(np.linspace(0.1, 0.9, len(matched)), np.array(matched, np.bool_)) is None


@given(
    st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=6, max_size=40).filter(
        lambda tokens: len({matched for _, matched in tokens}) == 2
    )
)
def test_roc_threshold_is_the_best_of_all_by_definition(tokens: list[tuple[int, bool]]) -> None:
    confidences = np.array([level / 12 for level, _ in tokens])
    matched = np.array([fate for _, fate in tokens])

    def cost(threshold: float) -> float:
        positive = confidences >= threshold
        return float(np.mean(positive[~matched]) + 3 * np.mean(~positive[matched]))

    best = min(sorted(set(confidences.tolist()), reverse=True), key=lambda at: round(cost(at), 9))
    found = roc_threshold(confidences, matched)
    assert found is not None
    assert cost(found) == pytest.approx(cost(best))


def test_hf_refits_from_drafts_up_to_their_first_rejection(
    make_state: Any, make_outcome: Any
) -> None:
    rule, state = HFConfidence(0.4), draft_state(make_state, 2)
    rule.choose(state)
    # The tokens of the example by hand: 0.9 0.8 accepted, 0.7 rejected; 0.6 accepted, 0.5 rejected.
    first = shown(8, [0.9, 0.8, 0.7], [0.6, 0.5])
    rule.observe(make_outcome(state, [5, 3], [2, 1], draft_top1=first))
    assert rule.threshold == 0.4, "five tokens are too few"
    rule.observe(make_outcome(state, [1, 0], [0, 0], draft_top1=shown(8, [0.4], [])))
    assert rule.threshold == 0.6


def test_hf_does_not_take_an_end_of_text_for_a_rejection(
    make_state: Any, make_outcome: Any
) -> None:
    rule, state = HFConfidence(0.4), draft_state(make_state)
    rule.choose(state)
    ended = make_outcome(
        state, [8], [6], draft_top1=shown(8, [0.9] * 7), num_committed=np.array([6])
    )
    rule.observe(ended)
    assert rule.threshold == 0.4, "seven accepted tokens and no rejected one"
    rule.observe(make_outcome(state, [8], [6], draft_top1=shown(8, [0.9] * 6 + [0.3])))
    assert rule.threshold == 0.9


def test_hf_counts_no_token_twice_when_all_are_accepted(make_state: Any, make_outcome: Any) -> None:
    rule, state = HFConfidence(), draft_state(make_state)
    rule.choose(state)
    rule.observe(make_outcome(state, [3], [3], draft_top1=shown(8, [0.9, 0.8, 0.7])))
    assert rule._matched.tolist() == [True] * 3


def test_hf_remembers_a_window_of_tokens(make_state: Any, make_outcome: Any) -> None:
    rule, state = HFConfidence(window=10), draft_state(make_state)
    for top1 in (0.2, 0.3, 0.6):
        rule.choose(state)
        rule.observe(make_outcome(state, [8], [7], draft_top1=shown(8, [top1] * 8)))
    assert rule._confidences.tolist() == [0.3] * 2 + [0.6] * 8


def test_hf_without_a_window_keeps_its_threshold(make_state: Any, make_outcome: Any) -> None:
    rule, state = HFConfidence(0.3, window=0), draft_state(make_state)
    rule.choose(state)
    rule.observe(make_outcome(state, [8], [7], draft_top1=shown(8, [0.9] * 7 + [0.1])))
    assert rule.threshold == 0.3


def test_prompt_lookup_teaches_hf_nothing(make_state: Any, make_outcome: Any) -> None:
    rule, state = HFConfidence(), make_state(4)
    depths = rule.choose(state)
    rule.observe(make_outcome(state, depths, depths // 2))
    assert rule.threshold == 0.4
    assert not len(rule._confidences)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_thresholds_are_probabilities(threshold: float) -> None:
    for rule in (HFConfidence, LlamaCppConfidence):
        with pytest.raises(ValueError, match="is a probability"):
            rule(threshold)


def test_hf_needs_a_window_of_zero_or_more() -> None:
    with pytest.raises(ValueError, match="0 or more tokens"):
        HFConfidence(window=-1)
