from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from specdepth.agents.comparison import Comparison
from specdepth.agents.replay_evaluate import (
    BEST_FIXED,
    ONE_DEPTH_ORACLE,
    ORACLE,
    evaluate_replay,
)
from specdepth.agents.results import ResultRow
from specdepth.decoder.config import EngineConfig
from specdepth.scheduler.baselines import FixedDepth, Off
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler, DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundState
from tests.agents.made_trace import DEPTH, make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.006, knee=2, context_s=1e-6, overhead_s=0.001)
TRACE = make_trace(36, num_tokens=16)
HELD_OUT = TRACE.rows("held-out")
ROWS: dict[tuple[int, float | None], list[ResultRow]] = {}
KEPT: list[Comparison] = []


def policies() -> dict[str, DepthScheduler]:
    return {"off": Off(), "fixed:1": FixedDepth(1), "fixed:4": FixedDepth(4)}


@pytest.fixture(scope="module")
def found() -> Comparison:
    return evaluate_replay(TRACE, COST, policies(), [1, 8], arrivals=["constant", "varying"])


def value(
    found: Comparison, policy: str, load: int | str, metric: str, tpot_limit_ms: float | None = None
) -> float:
    only = Comparison(runs={load: found.runs[load]}, clock=found.clock)
    key = (id(found.runs[load]), tpot_limit_ms)
    if key not in ROWS:
        ROWS[key] = only.rows(oracle=ORACLE, tpot_limit_ms=tpot_limit_ms)
        KEPT.append(found)  # an id stays another's while it lives
    (row,) = [row for row in ROWS[key] if (row.policy, row.metric) == (policy, metric)]
    return row.value


def test_all_policies_serve_the_same_requests_and_tokens(found):
    tokens = int(TRACE.num_tokens[HELD_OUT].sum())
    for load, repeats in ((1, 1), (8, 6), ("varying", 6)):
        for policy in found.policies:
            assert value(found, policy, load, "committed_tokens") == repeats * tokens
            assert value(found, policy, load, "different_text_share") == 0
        assert found.runs[load].num_requests == len(HELD_OUT)
        assert found.runs[load].num_repeats == repeats


def test_the_time_without_speculation_is_the_sum_of_its_passes(found):
    seconds = 0.0
    for row in HELD_OUT:
        prompt, count = int(TRACE.num_prompt[row]), int(TRACE.num_tokens[row])
        seconds += COST.pass_s(prompt, prompt - 1, prompt)  # the first token comes with the prompt
        seconds += sum(COST.pass_s(1, 0, prompt + done) for done in range(1, count))
        seconds += count * COST.overhead_s
    assert value(found, "off", 1, "makespan_s") == pytest.approx(seconds)
    tokens = float(TRACE.num_tokens[HELD_OUT].sum())
    assert value(found, "off", 1, "throughput_tok_s") == pytest.approx(tokens / seconds)


def test_a_load_is_kept_up_but_for_the_end(found):
    assert value(found, "off", 1, "mean_in_flight") == pytest.approx(1)
    assert 7 < value(found, "off", 8, "mean_in_flight") <= 8
    assert 1 < value(found, "off", "varying", "mean_in_flight") < 8


def test_best_fixed_is_the_fastest_fixed_depth_of_each_load(found):
    for load in found.loads:
        fixed = [value(found, name, load, "throughput_tok_s") for name in policies()]
        assert value(found, BEST_FIXED, load, "throughput_tok_s") == max(fixed)
        assert value(found, BEST_FIXED, load, "ratio_to_best_fixed") == pytest.approx(1)
    assert found.best_fixed(1) == "fixed:4"


def test_the_gap_to_the_oracle_is_measured_from_the_best_fixed_depth(found):
    for load in found.loads:
        best, top = (value(found, name, load, "throughput_tok_s") for name in (BEST_FIXED, ORACLE))
        mine = value(found, "fixed:1", load, "throughput_tok_s")
        assert top > best
        closed = value(found, "fixed:1", load, "oracle_gap_closed")
        assert closed == pytest.approx((mine - best) / (top - best))
        assert value(found, ORACLE, load, "oracle_gap_closed") == 1
        assert value(found, BEST_FIXED, load, "oracle_gap_closed") == 0
        # Best round by round is not best in the long run, not even for an oracle.
        assert value(found, ONE_DEPTH_ORACLE, load, "throughput_tok_s") > 0.9 * best


def test_goodput_counts_requests_within_the_limit(found):
    slowest = max(r.tpot_s for r in found.runs[8].metrics["fixed:1"].requests)
    all_good = value(found, "fixed:1", 8, "goodput_tok_s", tpot_limit_ms=1e3 * slowest + 1e-6)
    assert all_good == pytest.approx(value(found, "fixed:1", 8, "throughput_tok_s"))
    median = value(found, "fixed:1", 8, "tpot_p50_ms")
    some = value(found, "fixed:1", 8, "goodput_tok_s", tpot_limit_ms=median)
    assert 0 < some < all_good
    assert value(found, "fixed:1", 8, "goodput_tok_s", tpot_limit_ms=1e-3) == 0


def test_replay_is_exact_and_says_so(found):
    again = evaluate_replay(TRACE, COST, policies(), [1, 8], arrivals=["constant", "varying"])
    timed = ("policy_ms", "wall_s", "throughput_wall_tok_s", "speedup_wall")
    rows, more = (
        [row for row in one.rows(oracle=ORACLE) if row.metric not in timed]
        for one in (found, again)
    )
    assert rows == more
    assert found.clock == "virtual"
    assert "for these very ones the modelled times are exact" in found.notes[0]
    assert "12 at load 1, 12 x 6 at load 8, 12 x 6 at varying" in found.notes[0]


def test_requests_can_be_chosen(found):
    rows = TRACE.rows("held-out", looping=False)
    chosen = evaluate_replay(TRACE, COST, policies(), [2], rows=rows, oracles=False)
    assert chosen.policies == list(policies())
    assert chosen.runs[2].num_requests == len(rows) < len(HELD_OUT)
    assert set(chosen.runs[2].sums("off")) == set(rows.tolist())


class Learns(FixedDepth):
    """One token deeper with each round since the last reset."""

    def __init__(self) -> None:
        super().__init__(0)
        self.num_rounds = 0
        self.starts: list[int] = []

    def reset(self) -> None:
        self.starts.append(self.num_rounds)
        self.num_rounds = 0

    def choose(self, state: RoundState) -> Ints:
        self.num_rounds += 1
        return super().choose(state)


def test_what_a_policy_learned_at_one_load_is_forgotten_at_the_next():
    policy = Learns()
    evaluate_replay(TRACE, COST, {"learns": policy}, [1, 2, 4])
    assert len(policy.starts) == 3
    assert policy.starts[0] == 0
    assert min(policy.starts[1:]) > 0


class CountsRounds(FixedDepth):
    """Drafts in every second round."""

    def choose(self, state: RoundState) -> Ints:
        return super().choose(state) * (state.round_index % 2)


def test_the_place_in_the_list_of_policies_changes_nothing():
    def makespan(names: list[str]) -> float:
        chosen: dict[str, DepthScheduler] = {name: CountsRounds(3) for name in names}
        found = evaluate_replay(TRACE, COST, chosen, [4], oracles=False, arrivals=["poisson"])
        return found.runs["poisson 4"].makespan_s["this"]

    assert makespan(["this"]) == makespan(["a", "b", "this"])


class Slow(FixedDepth):
    def choose(self, state: RoundState) -> Ints:
        time.sleep(0.001)
        return super().choose(state)


@pytest.mark.parametrize("charge", [False, True])
def test_decisions_are_timed_and_charged_only_if_asked_for(charge):
    chosen: dict[str, DepthScheduler] = {"off": Off(), "slow": Slow(0)}
    rows = HELD_OUT[:2]
    found = evaluate_replay(
        TRACE, COST, chosen, [1], rows=rows, oracles=False, charge_decisions=charge
    )
    assert value(found, "slow", 1, "policy_ms") > 1
    assert value(found, "slow", 1, "policy_ms") > 5 * value(found, "off", 1, "policy_ms")
    slow, off = (value(found, name, 1, "makespan_s") for name in ("slow", "off"))
    if charge:
        assert slow - off > 0.0005 * value(found, "slow", 1, "rounds")
    else:
        assert slow == off


class Stops(FixedDepth):
    """Asks for the deepest drafts and stops all of them after the first token."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        return np.full(len(signals.rows), signals.num_drafted < 1)


def test_stops_between_draft_passes_are_kept():
    signals = np.random.default_rng(0).random((TRACE.num_positions, DEPTH))
    drafted = make_trace(
        36,
        16,
        info=type(TRACE.info)(
            model_pair="a + b", drafter="draft-model", max_num_speculative_tokens=DEPTH
        ),
        draft_top1=signals,
        draft_entropy=signals,
        draft_margin=signals,
    )
    cost = CostModel.linear(draft_base_s=0.01, draft_token_s=0.001)
    chosen: dict[str, DepthScheduler] = {"stops": Stops(4), "fixed:1": FixedDepth(1)}
    found = evaluate_replay(drafted, cost, chosen, [2], oracles=False)
    assert value(found, "stops", 2, "mean_depth") == value(found, "fixed:1", 2, "mean_depth")
    # The pass that says stop is paid for.
    assert value(found, "stops", 2, "draft_passes") > value(found, "fixed:1", 2, "draft_passes")


def test_passes_beyond_the_cost_model_are_named():
    narrow = CostModel(name="narrow", tokens=(1, 4), verify_s=(0.05, 0.06))
    found = evaluate_replay(TRACE, narrow, policies(), [4])
    assert any("narrow was modelled up to 4 packed tokens" in note for note in found.notes)
    assert not any(
        "extrapolated" in note for note in evaluate_replay(TRACE, COST, policies(), [4]).notes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": {}}, "at least one policy"),
        ({"policies": {ORACLE: Off()}}, "is the name of an oracle"),
        ({"loads": [13]}, "load 13 needs at least 13 different requests, this .* has 12"),
        ({"loads": []}, "different whole numbers"),
        ({"arrivals": ["tidal"]}, "no arrivals 'tidal'"),
        ({"rows": np.zeros(0, np.int64)}, "holds no request"),
        (
            {"config": EngineConfig(max_num_seqs=4, max_num_speculative_tokens=4), "loads": [5]},
            r"load 5 is outside 1\.\.4",
        ),
        ({"config": EngineConfig(max_num_speculative_tokens=9)}, "recorded up to 4"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    settings: dict[str, Any] = {"policies": policies(), "loads": [1]}
    with pytest.raises(ValueError, match=message):
        evaluate_replay(TRACE, COST, **(settings | changes))


def test_orders_are_counted_together():
    load = [4]
    together = evaluate_replay(TRACE, COST, policies(), load, orders=2)
    apart = [evaluate_replay(TRACE, COST, policies(), load, seed=seed) for seed in (0, 1)]
    run, parts = together.runs[4], [one.runs[4] for one in apart]
    for policy in (*policies(), ORACLE):
        assert run.makespan_s[policy] == sum(part.makespan_s[policy] for part in parts)
        rounds = [part.metrics[policy].num_rounds for part in parts]
        assert run.metrics[policy].num_rounds == sum(rounds)
        for index, (tokens, seconds) in run.sums(policy).items():
            each = [part.sums(policy)[index] for part in parts]
            assert tokens == sum(one[0] for one in each)
            assert seconds == pytest.approx(sum(one[1] for one in each))
    assert run.num_repeats == sum(part.num_repeats for part in parts)
    assert parts[0].makespan_s["fixed:4"] != parts[1].makespan_s["fixed:4"]


def test_no_order_is_refused():
    with pytest.raises(ValueError, match="orders must be at least 1, got 0"):
        evaluate_replay(TRACE, COST, policies(), [1], orders=0)
