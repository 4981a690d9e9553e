from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdepth.agents.advice import Advice, LoadAdvice
from specdepth.agents.advice_text import as_mapping, caveats, judged_grid, sentences, sweep_grid
from specdepth.agents.advise import advise
from specdepth.agents.intervals import Interval
from specdepth.agents.load_runs import LoadRuns
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.baselines.table import OPEN_END
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.survival_estimators import PositionSurvival
from tests.agents.made_trace import DEPTH, make_trace

FLAT = CostModel.linear(base_s=0.05, token_s=0.001, knee=10_000, max_tokens=20_000, name="flat")
STEEP = CostModel.linear(base_s=0.001, token_s=0.001, knee=1, name="steep")
KNEE = CostModel.linear(base_s=0.05, token_s=0.01, knee=12, name="knee at 12")


def trace_of(run: int, num_requests: int = 24, num_tokens: int = 8, **changes: Any) -> Trace:
    """All positions propose K tokens, of which `run` are right."""
    size = num_requests * num_tokens
    left = np.tile(np.arange(num_tokens, 0, -1), num_requests)
    fields: dict[str, Any] = {
        "accepted": np.minimum(run, left),
        "match_length": np.full(size, 2),
        "proposal_length": np.full(size, DEPTH),
        "num_matches": np.ones(size, np.int64),
        "num_agreeing": np.ones(size, np.int64),
        "looping": np.zeros(num_requests, np.bool_),
        "held_out": np.arange(num_requests) % 2 == 1,
    }
    return make_trace(num_requests, num_tokens, **(fields | changes))


@pytest.fixture(scope="module")
def crossing() -> Advice:
    """Drafting pays below the knee and not above it."""
    return advise(trace_of(2), KNEE, [1, 4, 12])


def test_where_passes_cost_the_same_all_loads_draft_as_deep_as_accepted() -> None:
    found = advise(trace_of(3), FLAT, [1, 4, 8])
    assert [one.depth for one in found.loads] == [3, 3, 3]
    assert [one.pays for one in found.loads] == ["yes"] * 3
    assert found.off_above is None
    assert found.best_single == 3
    assert "no batch size replayed, which were up to 8" in " ".join(sentences(found))


def test_with_the_knee_at_one_token_it_is_off_everywhere() -> None:
    half = np.random.default_rng(0).integers(0, 2, 24 * 8)
    found = advise(trace_of(1, accepted=np.minimum(half, trace_of(1).accepted)), STEEP, [1, 4])
    assert found.table.ranges == ((1, OPEN_END, 0),)
    assert found.off_above == 0
    assert found.best_single == 0
    assert [one.pays for one in found.loads] == ["no", "no"]
    assert "Switch it off: at every batch size." in sentences(found)


def test_without_acceptance_it_is_off_even_where_drafts_are_free() -> None:
    found = advise(trace_of(0), FLAT, [1, 4])
    assert found.table.ranges == ((1, OPEN_END, 0),)
    assert [one.oracle for one in found.loads] == pytest.approx([1, 1])


def test_drafting_is_switched_off_above_the_knee(crossing: Advice) -> None:
    assert crossing.loads[0].depth == 2
    assert crossing.loads[-1].depth == 0
    assert crossing.loads[0].pays == "yes"
    assert crossing.off_above is not None
    last_on = max(one.load for one in crossing.loads if one.depth)
    first_off = min(one.load for one in crossing.loads if not one.depth)
    assert (last_on, first_off) == (4, 12)
    assert last_on < crossing.off_above < first_off  # a load that was not asked for
    assert crossing.table.depth_at(crossing.off_above) > 0
    assert crossing.table.depth_at(crossing.off_above + 1) == 0
    assert f"above {crossing.off_above} running" in " ".join(sentences(crossing))


def test_ratios_are_of_requests_that_depths_were_not_chosen_on() -> None:
    # Right in training only: the other half says that it does not pay.
    runs = np.where(np.repeat(np.arange(24) % 2 == 1, 8), 0, 3)
    found = advise(trace_of(3, accepted=np.minimum(runs, trace_of(4).accepted)), KNEE, [2])
    assert found.loads[0].sweep[3] > 1.2
    assert found.loads[0].depth == 3
    assert found.loads[0].table.value <= 1
    assert found.loads[0].pays != "yes"


def test_the_table_never_goes_deeper_with_load(crossing: Advice) -> None:
    depths = [depth for _, _, depth in crossing.table.ranges]
    assert depths == sorted(depths, reverse=True)


def test_a_policy_that_sees_the_match_beats_the_table_where_it_tells_apart() -> None:
    found = advise(make_trace(60, 20), KNEE, [8])
    (one,) = found.loads
    assert one.rule_gain.value > 1.02
    assert one.oracle > one.table.value
    assert "adds +" in " ".join(sentences(found))


def test_looping_requests_are_left_out_of_the_second_figures() -> None:
    looping = np.arange(24) % 4 == 1  # of the other half
    right = np.repeat(looping, 8)
    accepted = np.minimum(np.where(right, 4, 0), trace_of(4).accepted)
    found = advise(trace_of(0, looping=looping, accepted=accepted), FLAT, [1], depths=[4])
    (one,) = found.loads
    assert found.looping_share == 0.25
    assert one.rule_without_looping is not None
    assert one.rule_without_looping.value == pytest.approx(1)
    assert one.rule.value > 1.1
    assert any("25.0% of the requests" in note for note in caveats(found))
    assert "without looping" in " ".join(judged_grid(found).header)


def test_without_looping_requests_there_is_one_set_of_figures(crossing: Advice) -> None:
    assert all(one.table_without_looping is None for one in crossing.loads)
    assert "looping" not in " ".join(judged_grid(crossing).header)


def test_default_loads_end_after_two_that_do_not_pay() -> None:
    assert [one.load for one in advise(trace_of(0), FLAT).loads] == [1, 2]


def test_default_loads_end_with_the_requests() -> None:
    assert [one.load for one in advise(trace_of(3), FLAT).loads] == [1, 2, 4, 8]


def test_passes_beyond_the_cost_model_are_named() -> None:
    small = CostModel(name="small", tokens=(1, 8), verify_s=(0.05, 0.05), measured=True)
    found = advise(trace_of(3), small, [1, 4])
    assert [one.extrapolated for one in found.loads] == [False, True]
    assert found.extrapolation is not None
    text = " ".join(caveats(found))
    assert "up to 8 packed tokens" in text
    assert "load 4 (*)" in text
    assert "modelled, not measured" not in text


def test_advice_repeats_with_the_same_seed(crossing: Advice) -> None:
    again = advise(trace_of(2), KNEE, [1, 4, 12])
    assert as_mapping(again) == as_mapping(crossing)


def test_advice_is_json_with_all_loads(crossing: Advice) -> None:
    values = json.loads(json.dumps(as_mapping(crossing), allow_nan=False))
    assert [one["load"] for one in values["loads"]] == [1, 4, 12]
    assert values["knee_tokens"] == KNEE.knee_tokens()
    assert values["off_above"] == crossing.off_above
    assert len(sweep_grid(crossing).rows) == len(judged_grid(crossing).rows) == 3


def test_own_survival_and_engine_profile_are_used() -> None:
    profile = EngineProfile.named("vllm-like")
    found = advise(trace_of(2), KNEE, [2], survival=PositionSurvival(), profile=profile)
    assert "PositionSurvival" in repr(found.rule)


def test_progress_rises_to_the_end() -> None:
    shares: list[float] = []
    advise(trace_of(2), KNEE, [1, 4], progress=lambda share, detail: shares.append(share))
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] < 1


def test_a_draft_model_is_judged_by_its_confidence() -> None:
    size = 24 * 8
    signals = np.full((size, DEPTH), 0.8)
    info = TraceInfo(
        model_pair="made+tiny",
        drafter="draft-model",
        max_num_speculative_tokens=DEPTH,
        verification="coupled",
        temperature=1.0,
    )
    zeros = np.zeros(size, np.int64)
    trace = trace_of(
        3,
        info=info,
        match_length=zeros,
        num_matches=zeros,
        num_agreeing=zeros,
        draft_top1=signals,
        draft_entropy=signals,
        draft_margin=signals,
    )
    cost = CostModel.linear(knee=10_000, max_tokens=20_000, draft_base_s=0.001)
    found = advise(trace, cost, [1, 4])
    assert "ConfidenceSurvival" in repr(found.rule)
    assert found.loads[0].depth == 3
    text = " ".join(caveats(found))
    assert "temperature 1" in text
    assert "no draft passes" not in text
    assert "hold no draft passes" in " ".join(caveats(advise(trace, FLAT, [1])))
    assert "accepts a little more of a draft model" in text


def test_a_log_is_called_one_draw() -> None:
    trace = trace_of(3)
    logged = replace(trace, info=replace(trace.info, source="outputs"))
    assert any("from a log" in note for note in caveats(advise(logged, FLAT, [1])))


def made_load(table: Interval, depth: int = 2) -> LoadAdvice:
    return LoadAdvice(
        load=1,
        sweep={0: 1.0, 2: 1.2},
        depth=depth,
        table=table,
        rule=table,
        rule_gain=table,
        oracle=1.0,
        table_without_looping=None,
        rule_without_looping=None,
        extrapolated=False,
        runs=LoadRuns(()),
    )


@pytest.mark.parametrize(
    ("table", "depth", "verdict"),
    [
        (Interval(1.1, 1.05, 1.2), 2, "yes"),
        (Interval(1.1, 0.95, 1.2), 2, "unclear"),
        (Interval(0.9, 0.8, 0.95), 2, "no"),
        (Interval(1.1, 1.05, 1.2), 0, "no"),
        (Interval(1.0, 1.0, 1.0), 2, "no"),
        (Interval(1.1, float("nan"), float("nan")), 2, "unclear"),
    ],
)
def test_it_pays_only_where_the_interval_says_so(table: Interval, depth: int, verdict: str) -> None:
    assert made_load(table, depth).pays == verdict


def test_bad_requests_are_refused_in_a_sentence() -> None:
    trace = trace_of(2)
    with pytest.raises(ValueError, match="load 13 needs at least 13 different requests"):
        advise(trace, KNEE, [1, 13])
    with pytest.raises(ValueError, match="=5, but the trace was recorded up to 4"):
        advise(trace, KNEE, [1], max_num_speculative_tokens=5)
    with pytest.raises(ValueError, match=r"a depth in 1\.\.4 to try, got \[6\]"):
        advise(trace, KNEE, [1], depths=[6])
    with pytest.raises(ValueError, match="24 requests to choose depths on and 0 others"):
        advise(trace_of(2, held_out=np.zeros(24, np.bool_)), KNEE, [1])
