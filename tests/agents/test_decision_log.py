"""What a policy did, watched: against hand-counted rounds, and against the comparison itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.agents.decision_log import (
    DecisionLog,
    acceptance_rows,
    record_decisions,
    timeline,
    timeline_name,
)
from specdepth.agents.replay_evaluate import evaluate_replay
from specdepth.decoder.arrivals import ClosedLoop
from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.metrics import RoundRow
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.trace import TraceInfo
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import RoundState
from tests.agents.made_trace import DEPTH, make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.01, knee=3)
TRACE = make_trace(24, num_tokens=12)
CONFIG = EngineConfig(max_num_speculative_tokens=DEPTH, max_num_seqs=4)


class Match:
    """Drafts as deep as the match is long."""

    def choose(self, state: RoundState) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.minimum(state.match_length, state.max_num_speculative_tokens)

    def observe(self, outcome: object) -> None:
        pass


def record(*names: str, profile: str = "specdepth", **changes: Any) -> Any:
    given: dict[str, Any] = {"arrivals": ["constant"], "rows": TRACE.rows("held-out"), "seed": 3}
    policies = {name: make_scheduler(name) for name in names}
    return record_decisions(
        TRACE,
        COST,
        policies,
        (1, 4),
        config=CONFIG,
        profile=EngineProfile.named(profile),
        **(given | changes),
    )


def round_row(start_s: float, seconds: float, **changes: float) -> RoundRow:
    values = dict.fromkeys(RoundRow._fields, 0) | {"start_s": start_s, "verify_s": seconds}
    return RoundRow(**(values | changes))  # type: ignore[arg-type]


def serve_watched(trace: Any, scheduler: Any, drafter: Any) -> tuple[DecisionLog, Any]:
    log = DecisionLog(scheduler, drafter)
    decoder = ReplayDecoder(trace, COST, CONFIG)
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(2))
    return log, serve(decoder.engine, workload, log).metrics


def test_depths_are_counted_by_what_was_shown() -> None:
    log, metrics = serve_watched(TRACE, Match(), "prompt-lookup")
    rows = {row.metric: row for row in log.rows("mine", 2)}
    depths = {n: rows[f"depth_at_match_{n}"].value for n in (1, 2, 3, 4)}
    # Only a text's end cuts a draft below the length of its match.
    assert depths[1] == 1
    assert all(n - 0.8 < depth <= n for n, depth in depths.items())
    assert "depth_at_match_0" not in rows
    assert rows["depth_at_match_1"].unit == "tokens"
    drafted = sum(depths[n] * rows[f"rounds_at_match_{n}"].value for n in depths)
    assert drafted == pytest.approx(metrics.num_drafted_tokens)


def test_a_draft_model_is_watched_by_estimated_survival() -> None:
    signals = np.random.default_rng(0).random((3, len(TRACE.accepted), DEPTH)) * 0.9 + 0.05
    trace = make_trace(
        24,
        num_tokens=12,
        info=TraceInfo(
            model_pair="made + made", drafter="draft-model", max_num_speculative_tokens=DEPTH
        ),
        draft_top1=signals[0],
        draft_entropy=signals[1],
        draft_margin=signals[2],
    )
    log, _ = serve_watched(trace, make_scheduler("fixed:2"), "draft-model")
    rows = {row.metric: row.value for row in log.rows("mine", 2)}
    bins = {name.removeprefix("depth_at_survival_") for name in rows if name.startswith("depth")}
    assert bins <= {"0", "20", "40", "60", "80"}
    assert len(bins) > 1
    assert all(value <= 2 for name, value in rows.items() if name.startswith("depth"))


def test_optional_parts_of_a_scheduler_are_passed_on() -> None:
    class Trims(Match):
        lawful_under = frozenset({"greedy"})

        def trim(self, state: object, signals: object) -> None:
            raise NotImplementedError

    log = DecisionLog(Trims(), "prompt-lookup")
    assert log.lawful_under == frozenset({"greedy"})
    assert hasattr(log, "trim")
    assert not hasattr(log, "keep_drafting")
    assert not hasattr(log, "reset")


@pytest.mark.parametrize("profile", ["specdepth", "vllm-like"])
def test_watched_rounds_are_those_of_the_comparison(profile: str) -> None:
    found = evaluate_replay(
        TRACE,
        COST,
        {"off": make_scheduler("off"), "heuristic": make_scheduler("heuristic")},
        (1, 4),
        arrivals=["constant", "varying"],
        seed=3,
        config=CONFIG,
        profile=EngineProfile.named(profile),
        oracles=False,
    )
    seen = record("heuristic", "off", profile=profile, arrivals=["constant", "varying"])
    for load in (1, 4, "varying"):
        rows = {row.metric: row.value for row in seen.rows if row.load == load}
        drafted = sum(
            rows[f"depth_at_match_{n}"] * rows[f"rounds_at_match_{n}"] for n in range(1, 5)
        )
        everything = found.runs[load].metrics["heuristic"].num_drafted_tokens
        # With lag, some draft of whom the policy had last seen that they have nothing on offer.
        assert drafted == pytest.approx(everything) or profile == "vllm-like"
        assert 0 < drafted < everything + 0.5
    for name in ("heuristic", "off"):
        curve = seen.series[timeline_name("varying", "batch", name)]
        makespan_s = found.runs["varying"].makespan_s[name]
        assert curve.x[-1] == pytest.approx(makespan_s * (1 - 0.5 / len(curve.x)))


def test_without_a_varying_load_the_timeline_is_a_day_of_all_loads() -> None:
    seen = record("heuristic")
    assert {row.load for row in seen.rows} == {1, 4}
    assert list(seen.series) == [
        timeline_name("varying", quantity, "heuristic") for quantity in ("batch", "kv", "depth")
    ]
    batch = seen.series[timeline_name("varying", "batch", "heuristic")].y
    assert batch[0] == pytest.approx(1)
    assert max(batch) == pytest.approx(4)


def test_only_the_first_policy_has_a_map() -> None:
    assert {row.policy for row in record("heuristic", "fixed:2").rows} == {"heuristic"}


def test_a_timeline_weighs_by_time_and_counts_waits_as_nothing() -> None:
    rounds = [
        round_row(10.0, 1.0, num_running=2, num_drafted=6, kv_used_fraction=0.5),
        round_row(11.0, 1.0, num_running=4, num_drafted=4, kv_used_fraction=0.25),
        round_row(14.0, 2.0, num_running=1, num_drafted=3, kv_used_fraction=0.0),
    ]
    curves = timeline(rounds, pool_tokens=100, num_bins=3)  # 2 s each
    assert curves["batch"].x == pytest.approx((1, 3, 5))
    assert curves["batch"].y == pytest.approx((3, 0, 1))
    assert curves["kv"].y == pytest.approx((37.5, 0, 0))
    assert curves["depth"].x == pytest.approx((1, 5))
    assert curves["depth"].y == pytest.approx((10 / 6, 3))


def test_a_round_longer_than_a_stretch_fills_several() -> None:
    curves = timeline([round_row(0.0, 4.0, num_running=3)], pool_tokens=1, num_bins=4)
    assert curves["batch"].y == pytest.approx((3, 3, 3, 3))


def test_no_rounds_give_no_curves() -> None:
    assert timeline([], pool_tokens=1) == {}


def test_acceptance_by_depth_is_that_of_the_counts() -> None:
    policies = {"off": make_scheduler("off"), "fixed:2": make_scheduler("fixed:2")}
    found = evaluate_replay(TRACE, COST, policies, (2,), config=CONFIG, oracles=False)
    counts = found.runs[2].metrics["fixed:2"].accept_counts
    rows = acceptance_rows(found, ["fixed:2", "absent"])
    assert {(row.policy, row.load, row.unit) for row in rows} == {("fixed:2", 2, "share")}
    by_depth = {row.metric: row.value for row in rows}
    expected = (counts[2] * np.arange(DEPTH + 1)).sum() / (2 * counts[2].sum())
    assert by_depth["acceptance_at_depth_2"] == pytest.approx(expected)
    assert acceptance_rows(found, ["off"]) == []
