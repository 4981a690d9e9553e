from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdepth.agents.advice import TABLE
from specdepth.agents.advice_drafters import (
    DrafterComparison,
    compare_drafters,
    drafter_name,
    ratio_of_speedups,
    same_requests,
)
from specdepth.agents.advice_search import Drafting
from specdepth.agents.comparison import OFF
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.cost import CostModel
from tests.agents.made_drafters import (
    KNEE,
    KNEE_WITH_DRAFT,
    draft_trace,
    lookup_trace,
    two_drafters,
)

SIGNALS = ("target_top1", "target_entropy")
LOOKUP, DRAFT = "prompt lookup", "draft model tiny"


@pytest.fixture(scope="module")
def crossing() -> DrafterComparison:
    """The draft model wins at load 1, prompt lookup at 6, and nothing pays at 12."""
    return compare_drafters(two_drafters(), [1, 6, 12], depths=[1, 3])


def test_ratios_are_those_of_the_arithmetic(crossing: DrafterComparison) -> None:
    # Texts of 4 tokens in passes of 50 ms, below the knee whatever is drafted at load 1.
    lookup, draft = (crossing.advice[name].loads for name in (LOOKUP, DRAFT))
    assert lookup[0].table.value == pytest.approx(4 / 2)  # two tokens a round
    assert draft[0].table.value == pytest.approx(4 * 50 / (50 + 3 * 5))
    assert lookup[1].table.value == pytest.approx(4 / 2)
    assert draft[1].table.value == pytest.approx(4 * 50 / (2 * (50 + 30)))
    assert [one.depth for one in lookup] == [1, 1, 0]
    assert [one.depth for one in draft] == [3, 1, 0]


def test_each_load_has_its_best_drafter(crossing: DrafterComparison) -> None:
    first, second, third = crossing.by["table"]
    assert (first.load, first.best, first.pays, first.level) == (1, DRAFT, "yes", ())
    assert first.over[LOOKUP].value == pytest.approx(200 / 65 / 2)
    assert (second.load, second.best, second.pays, second.level) == (6, LOOKUP, "yes", ())
    assert second.over[DRAFT].value == pytest.approx(2 / 1.25)
    assert (third.load, third.pays) == (12, "no")
    assert [one.load for one in crossing.by["rule"]] == [1, 6, 12]


def test_the_best_drafter_has_the_best_mean_of_tables(crossing: DrafterComparison) -> None:
    means = {name: one.mean("table") for name, one in crossing.advice.items()}
    assert means[LOOKUP] == pytest.approx(4 ** (1 / 3))
    assert means[DRAFT] == pytest.approx((200 / 65 * 1.25) ** (1 / 3))
    assert crossing.best == LOOKUP


def test_a_drafter_that_is_better_everywhere_wins_everywhere() -> None:
    found = compare_drafters(two_drafters(0, 3), [1, 2], depths=[3])
    for verdicts in found.by.values():
        assert [(one.best, one.pays, one.level) for one in verdicts] == [(DRAFT, "yes", ())] * 2
    assert found.best == DRAFT


def test_the_same_drafter_twice_is_a_tie() -> None:
    one = Drafting(trace=lookup_trace(np.arange(24) % 4), cost=KNEE)
    found = compare_drafters({"a": one, "b": one}, [1, 2], depths=[2])
    for verdicts in found.by.values():
        assert [(verdict.best, verdict.level) for verdict in verdicts] == [("a", ("b",))] * 2
        assert [verdict.over["b"].value for verdict in verdicts] == [1, 1]
    assert found.best == "a"


def test_a_difference_that_other_requests_would_turn_is_a_tie() -> None:
    # As good on average, and each on requests of its own.
    runs = np.where(np.arange(24) % 4 < 2, 3, 0)
    drafters = two_drafters(runs, 3 - runs)
    drafters[DRAFT] = replace(
        drafters[DRAFT], cost=replace(KNEE, draft_sequences=(1,), draft_s=(1e-6,))
    )
    (verdict,) = compare_drafters(drafters, [1], depths=[3]).by["table"]
    assert verdict.pays == "yes"
    assert len(verdict.level) == 1
    (ratio,) = verdict.over.values()
    assert ratio.low < 0.9
    assert ratio.high > 1.1


def test_requests_in_pairs_tell_apart_what_intervals_do_not() -> None:
    # Requests differ far more than drafters do, and the same way with both.
    runs = np.where(np.arange(24) % 4 < 2, 3, 0)
    drafters = two_drafters(runs, runs)
    found = compare_drafters(drafters, [1], depths=[3])
    lookup, draft = (found.advice[name].loads[0].table for name in (LOOKUP, DRAFT))
    assert lookup.low < draft.high
    (verdict,) = found.by["table"]
    assert (verdict.best, verdict.level) == (LOOKUP, ())


def test_a_drafter_that_clearly_pays_goes_before_one_that_may() -> None:
    # One request in six gains a lot and the others lose; the draft model helps all a little.
    rare = np.where(np.arange(24) % 12 < 2, 4, 0)
    cost = CostModel.linear(base_s=0.05, token_s=0.0005)
    with_draft = replace(cost, draft_sequences=(1,), draft_s=(0.0447,))
    drafters = {
        LOOKUP: Drafting(trace=lookup_trace(rare), cost=cost),
        DRAFT: Drafting(trace=draft_trace(1), cost=with_draft),
    }
    found = compare_drafters(drafters, [1], depths=[1, 4])
    lookup, draft = (found.advice[name].loads[0] for name in (LOOKUP, DRAFT))
    assert lookup.table.value > draft.table.value
    assert (lookup.pays, draft.pays) == ("unclear", "yes")
    (verdict,) = found.by["table"]
    assert (verdict.best, verdict.pays, verdict.level) == (DRAFT, "yes", (LOOKUP,))


def test_rows_are_paired_by_id_whatever_their_order(crossing: DrafterComparison) -> None:
    runs = np.arange(24) % 4
    drafters = two_drafters(runs, runs[::-1])
    order = np.random.default_rng(3).permutation(24)
    shuffled = replace(drafters[DRAFT], trace=drafters[DRAFT].trace.select(order))
    straight = compare_drafters(drafters, [1], depths=[2])
    mixed = compare_drafters({**drafters, DRAFT: shuffled}, [1], depths=[2])
    assert mixed.by == straight.by
    assert mixed.advice[DRAFT].loads == straight.advice[DRAFT].loads


def test_by_default_loads_go_on_until_no_drafter_pays() -> None:
    # Prompt lookup alone would end after two.
    drafters = {
        name: replace(one, trace=one.trace.select(np.arange(12)))
        for name, one in two_drafters(0, 3).items()
    }
    found = compare_drafters(drafters, depths=[3])
    assert [[one.load for one in advice.loads] for advice in found.advice.values()] == [
        [1, 2, 4]
    ] * 2


def test_the_ratio_over_a_drafter_that_is_off_is_the_speedup() -> None:
    runs = np.arange(24) % 4
    drafters = two_drafters(runs, 0)
    found = compare_drafters(drafters, [1], depths=[2])
    mine, off = (found.advice[name].loads[0] for name in (LOOKUP, DRAFT))
    ratio = ratio_of_speedups(mine.runs, off.runs, TABLE)
    speedup = mine.runs.ratio(TABLE, OFF)
    assert ratio.value == pytest.approx(speedup.value)
    # Other draws of the same law.
    assert ratio.low == pytest.approx(speedup.low, rel=0.01)
    assert ratio.high == pytest.approx(speedup.high, rel=0.01)


def test_few_requests_give_no_interval_and_no_winner() -> None:
    drafters = {
        name: replace(one, trace=one.trace.select(np.arange(6)))
        for name, one in two_drafters().items()
    }
    (verdict,) = compare_drafters(drafters, [1], depths=[3]).by["table"]
    assert verdict.pays == "unclear"
    assert len(verdict.level) == 1


def test_texts_of_other_lengths_are_counted() -> None:
    trace = lookup_trace(0)
    kept = np.ones(trace.num_positions, np.bool_)
    kept[trace.starts[[3, 5, 8]] + trace.num_tokens[[3, 5, 8]] - 1] = False
    per_position = (
        *("accepted", "proposal_length", "match_length", "num_matches", "num_agreeing"),
        *("match_tokens", "match_distance", "match_in_output", "agreement"),
    )
    cut = {name: getattr(trace, name)[kept] for name in (*per_position, *SIGNALS)}
    lengths = np.add.reduceat(kept, trace.starts, dtype=int)
    shorter = replace(trace, num_tokens=lengths, stopped=lengths < trace.num_tokens, **cut)
    drafters = {"a": Drafting(trace=trace, cost=KNEE), "b": Drafting(trace=shorter, cost=KNEE)}
    found = compare_drafters(drafters, [1], depths=[1])
    assert found.share_of_other_lengths == pytest.approx(3 / 24)
    # Each is off, at its own length.
    assert [one.mean("table") for one in found.advice.values()] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("pair", "drafter", "name"),
    [
        ("big+prompt-lookup", "prompt-lookup", "prompt lookup"),
        ("big+org/small", "draft-model", "draft model org/small"),
        ("a+b+small", "draft-model", "draft model small"),
    ],
)
def test_drafters_are_called_by_what_they_are(pair: str, drafter: Any, name: str) -> None:
    info = TraceInfo(model_pair=pair, drafter=drafter, max_num_speculative_tokens=4)
    assert drafter_name(info) == name


def other_info(trace: Trace, **changes: Any) -> Trace:
    return replace(trace, info=replace(trace.info, **changes))


def changed(trace: Trace, field: str, row: int, value: Any) -> Trace:
    values = getattr(trace, field).copy()
    values[row] = value
    return replace(trace, **{field: values})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (other_info(draft_trace(1), model_pair="other+tiny"), r"with made and b with other;"),
        (
            other_info(draft_trace(1), verification="coupled", temperature=0.7),
            r"verification is greedy in the trace of a and coupled in that of b;",
        ),
        (draft_trace(1, 12), r"of 24 ids in the trace of a and 12 in that of b only 12 are"),
        (
            replace(draft_trace(1), ids=tuple(f"made-{i}" for i in range(1, 25))),
            r"of 24 ids in the trace of a and 24 in that of b only 23 are the same",
        ),
        (
            replace(draft_trace(1), ids=("made-1", *draft_trace(1).ids[1:])),
            r"the same requests, each once, but of 24 ids",
        ),
        (changed(draft_trace(1), "num_prompt", 3, 2), r"request made-3 has another prompt tokens"),
        (changed(draft_trace(1), "held_out", 4, True), r"request made-4 has another half"),
        (changed(draft_trace(1), "max_new_tokens", 5, 9), r"made-5 has another limit of tokens"),
    ],
)
def test_other_requests_targets_or_sampling_are_refused(other: Trace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        same_requests({"a": lookup_trace(1), "b": other})


def test_sampling_is_compared_setting_by_setting() -> None:
    traces = {
        name: other_info(lookup_trace(1), verification="coupled", temperature=temperature)
        for name, temperature in (("a", 0.7), ("b", 1.0))
    }
    with pytest.raises(ValueError, match=r"temperature is 0.7 in the trace of a and 1.0 in that"):
        same_requests(traces)


def test_ids_that_are_there_twice_cannot_be_paired() -> None:
    twice = replace(lookup_trace(1), ids=("made-1", *lookup_trace(1).ids[1:]))
    with pytest.raises(ValueError, match="each once"):
        same_requests({"a": twice, "b": twice})


def test_a_draft_model_without_a_price_is_refused() -> None:
    drafters = two_drafters()
    free = replace(drafters[DRAFT], cost=KNEE)
    with pytest.raises(
        ValueError, match=r"knee at 12 has no draft passes, so it cannot price draft"
    ):
        compare_drafters({**drafters, DRAFT: free}, [1])
    # Prompt lookup may be priced by the cost model of a pair: it makes no draft passes.
    priced = replace(drafters[LOOKUP], cost=KNEE_WITH_DRAFT)
    found = compare_drafters({LOOKUP: priced}, [1], depths=[1])
    assert found.advice[LOOKUP].loads[0].table.value == pytest.approx(2)


def test_what_advice_refuses_is_refused_here_too() -> None:
    with pytest.raises(ValueError, match="load 13 needs at least 13 different requests"):
        compare_drafters(two_drafters(), [1, 13])
    with pytest.raises(ValueError, match="=5, but the trace was recorded up to 4"):
        compare_drafters(two_drafters(), [1], max_num_speculative_tokens=5)


def test_a_flat_machine_prefers_the_drafter_with_longer_runs() -> None:
    flat = CostModel.linear(base_s=0.05, token_s=0.0, knee=10_000, max_tokens=20_000)
    drafters = {
        "a": Drafting(trace=lookup_trace(1), cost=flat),
        "b": Drafting(trace=lookup_trace(3), cost=flat),
    }
    found = compare_drafters(drafters, [2], depths=[1, 3])
    (verdict,) = found.by["table"]
    assert verdict.best == "b"
    assert verdict.over["a"].value == pytest.approx(2)
