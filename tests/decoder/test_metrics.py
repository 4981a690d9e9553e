from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.request import RequestMetrics
from specdepth.scheduler.state import RoundOutcome

K = 4


def make_outcome(
    drafted: list[int],
    accepted: list[int],
    committed: list[int] | None = None,
    preempted: list[bool] | None = None,
    **changes: object,
) -> RoundOutcome:
    num_running = len(drafted)
    if committed is None:
        committed = [a + 1 for a in accepted]
    unknown = np.full((num_running, K), np.nan)
    outcome = RoundOutcome(
        slots=np.arange(num_running),
        request_ids=np.arange(num_running),
        depths=np.array(drafted, np.int64),
        num_drafted=np.array(drafted, np.int64),
        num_proposed=np.array(drafted, np.int64),
        num_accepted=np.array(accepted, np.int64),
        num_committed=np.array(committed, np.int64),
        finished=np.zeros(num_running, np.bool_),
        preempted=np.array(preempted or [False] * num_running, np.bool_),
        draft_top1=unknown,
        draft_entropy=unknown,
        draft_margin=unknown,
        target_top1=unknown[:, 0],
        target_entropy=unknown[:, 0],
        num_preempted_prefills=0,
        num_pass_tokens=num_running + sum(drafted),
        num_prefill_tokens=0,
        num_context_tokens=100 * num_running,
        num_prefill_pairs=0,
        draft_pass_sequences=(),
        num_catch_up_tokens=0,
        num_waiting=0,
        kv_used_fraction=0.5,
        start_s=10.0,
        draft_s=0.01,
        verify_s=0.08,
        schedule_s=0.004,
        other_s=0.006,
    )
    return replace(outcome, **changes)  # type: ignore[arg-type]


def make_request(num_tokens: int = 11, ttft_s: float = 0.5, tpot_s: float = 0.1) -> RequestMetrics:
    return RequestMetrics(
        num_prompt_tokens=7,
        num_generated_tokens=num_tokens,
        num_rounds=num_tokens,
        num_drafted_tokens=0,
        num_accepted_tokens=0,
        num_preemptions=0,
        arrival_s=1.0,
        first_token_s=1.0 + ttft_s,
        finished_s=1.0 + ttft_s + tpot_s * (num_tokens - 1),
    )


def make_metrics(*outcomes: RoundOutcome, keep_rounds: bool = False) -> EngineMetrics:
    metrics = EngineMetrics(K, keep_rounds=keep_rounds)
    for outcome in outcomes:
        metrics.on_round(outcome)
    return metrics


def test_histogram_counts_each_sequence_of_each_round() -> None:
    metrics = make_metrics(make_outcome([0, 2, 2, 4], [0, 1, 2, 0]), make_outcome([2], [1]))
    expected = np.zeros((K + 1, K + 1), np.int64)
    expected[0, 0] = expected[2, 2] = expected[4, 0] = 1
    expected[2, 1] = 2
    assert np.array_equal(metrics.accept_counts, expected)
    assert metrics.accept_counts.dtype == np.int64


def test_totals_are_those_of_the_rounds() -> None:
    metrics = make_metrics(
        make_outcome([3, 0], [1, 0], draft_pass_sequences=(1, 1, 1), num_catch_up_tokens=5),
        make_outcome([4, 4], [4, 0], num_prefill_tokens=20, num_pass_tokens=30),
    )
    assert metrics.num_rounds == 2
    assert metrics.num_sequence_rounds == 4
    assert (metrics.num_drafted_tokens, metrics.num_accepted_tokens) == (11, 5)
    assert metrics.num_committed_tokens == 9
    assert metrics.num_wasted_tokens == 6
    assert metrics.num_pass_tokens == 5 + 30
    assert metrics.num_prefill_tokens == 20
    assert (metrics.num_draft_passes, metrics.num_catch_up_tokens) == (3, 5)


def test_acceptance_length_includes_the_bonus_token() -> None:
    assert make_metrics(make_outcome([4, 4], [4, 1])).acceptance_length == 1 + 5 / 2
    assert make_metrics(make_outcome([0, 0], [0, 0])).acceptance_length == 1.0


def test_tokens_past_the_end_of_a_text_are_wasted_but_not_rejected() -> None:
    ended = make_outcome([4], [2], committed=[2], finished=np.array([True]))
    rejected = make_outcome([4], [2], committed=[3], finished=np.array([True]))
    metrics = make_metrics(ended)
    assert (metrics.num_committed_tokens, metrics.num_wasted_tokens) == (2, 2)
    assert np.array_equal(metrics.acceptance_by_position, [1, 1, np.nan, np.nan], equal_nan=True)
    rates = make_metrics(ended, rejected).acceptance_by_position
    assert np.array_equal(rates, [1, 1, 0, np.nan], equal_nan=True)


def test_trimmed_tokens_are_wasted_and_not_drafted() -> None:
    metrics = make_metrics(make_outcome([2], [1], num_proposed=np.array([5])))
    assert (metrics.num_drafted_tokens, metrics.num_proposed_tokens) == (2, 5)
    assert metrics.num_wasted_tokens == 4
    assert metrics.acceptance_rate == 0.5


def test_a_preempted_sequence_counts_as_preemption_only() -> None:
    metrics = make_metrics(
        make_outcome([2, 0, 0], [1, 0, 0], committed=[2, 1, 0], preempted=[False, False, True])
    )
    assert metrics.num_preemptions == 1
    assert metrics.num_sequence_rounds == 2
    prefilling = make_outcome([2], [1], num_preempted_prefills=3)
    assert make_metrics(prefilling).num_preemptions == 3
    assert metrics.accept_counts[0, 0] == 1


def test_position_rate_ignores_rounds_in_which_the_position_was_not_seen() -> None:
    # Depth 1 says nothing of position 2, nor does a rejection at position 1.
    metrics = make_metrics(make_outcome([1, 1, 3, 3, 3, 3], [1, 1, 0, 1, 2, 3]))
    rates = metrics.acceptance_by_position
    assert rates[:3].tolist() == [5 / 6, 2 / 3, 1 / 2]
    assert np.isnan(rates[3])


def test_survival_is_unbiased_when_depths_censor_it() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([0.9, 0.5, 0.8, 0.3])
    metrics = EngineMetrics(K)
    for _ in range(2000):
        depths = rng.choice([0, 1, 1, 1, 2, 4], size=32)
        runs = np.cumprod(rng.random((32, K)) < truth, axis=1).sum(1)
        accepted = np.minimum(runs, depths)
        metrics.on_round(make_outcome(depths.tolist(), accepted.tolist()))
    assert metrics.acceptance_by_position == pytest.approx(truth, abs=0.02)
    assert metrics.survival_by_position == pytest.approx(np.cumprod(truth), abs=0.02)
    # The naive rate, accepted over drafted, is another number: it depends on the depths chosen.
    assert abs(metrics.acceptance_rate - metrics.survival_by_position[1]) > 0.05


def test_acceptance_by_depth_is_accepted_over_drafted_in_rounds_of_that_depth() -> None:
    rates = make_metrics(make_outcome([2, 2, 4, 0], [2, 1, 1, 0])).acceptance_by_depth
    assert np.array_equal(rates, [np.nan, 3 / 4, np.nan, 1 / 4], equal_nan=True)


def test_depths_are_counted_by_running_sequences() -> None:
    metrics = make_metrics(
        make_outcome([4], [4]), make_outcome([4], [0]), make_outcome([0, 1], [0, 0])
    )
    assert {n: c.tolist() for n, c in metrics.depth_counts_by_running.items()} == {
        1: [0, 0, 0, 0, 2],
        2: [1, 1, 0, 0, 0],
    }
    assert metrics.depth_counts.tolist() == [1, 1, 0, 0, 2]


def test_throughput_is_committed_tokens_over_time_in_rounds() -> None:
    metrics = make_metrics(make_outcome([4], [3]), make_outcome([4], [0]))
    assert metrics.throughput_tok_s == pytest.approx(5 / 0.2)


def test_span_includes_idle_time_between_rounds() -> None:
    metrics = make_metrics(make_outcome([1], [1]), make_outcome([1], [1], start_s=13.0))
    assert metrics.span_s == pytest.approx(3.1)
    assert metrics.elapsed_s == pytest.approx(0.2)


def test_time_shares_sum_to_one() -> None:
    shares = make_metrics(make_outcome([4], [3])).time_shares
    assert shares == pytest.approx({"draft": 0.1, "verify": 0.8, "schedule": 0.04, "other": 0.06})


def test_goodput_counts_requests_that_keep_the_limit() -> None:
    metrics = make_metrics(*[make_outcome([0], [0])] * 30)
    metrics.on_finished(make_request(num_tokens=11, tpot_s=0.1))
    metrics.on_finished(make_request(num_tokens=5, tpot_s=0.3))
    assert metrics.goodput_tok_s(0.2) == pytest.approx(11 / 3.0)
    assert metrics.goodput_tok_s(0.4) == pytest.approx(16 / 3.0)
    assert metrics.goodput_tok_s(0.05) == 0.0


def test_percentiles_are_over_requests() -> None:
    metrics = EngineMetrics(K)
    for i in range(101):
        metrics.on_finished(make_request(ttft_s=i / 100, tpot_s=i / 1000))
    assert metrics.ttft_s == pytest.approx({50: 0.50, 95: 0.95, 99: 0.99})
    assert metrics.tpot_s == pytest.approx({50: 0.050, 95: 0.095, 99: 0.099})


def test_requests_of_one_token_have_no_time_per_output_token() -> None:
    metrics = EngineMetrics(K)
    metrics.on_finished(make_request(num_tokens=1))
    metrics.on_finished(make_request(num_tokens=11, tpot_s=0.2))
    assert metrics.tpot_s[50] == pytest.approx(0.2)


def test_a_request_aborted_before_its_first_token_has_no_latencies() -> None:
    metrics = EngineMetrics(K)
    metrics.on_finished(make_request(ttft_s=0.5))
    metrics.on_finished(make_request(num_tokens=0, ttft_s=float("nan")))
    assert metrics.ttft_s[99] == pytest.approx(0.5)
    assert not np.isnan(metrics.goodput_tok_s(1.0))


def test_a_round_that_only_prefills_has_no_sequences() -> None:
    metrics = make_metrics(make_outcome([], [], num_pass_tokens=64, num_prefill_tokens=64))
    assert metrics.num_rounds == 1
    assert metrics.num_sequence_rounds == 0
    assert metrics.num_pass_tokens == 64
    assert metrics.depth_counts_by_running == {}


def test_empty_metrics_are_all_defined() -> None:
    metrics = EngineMetrics(K)
    values = metrics.as_dict()
    assert values["throughput_tok_s"] == 0.0
    assert not any(np.isnan(value) for value in values.values())
    assert "ttft_p50_ms" not in values


def test_dictionary_is_flat_with_units() -> None:
    metrics = make_metrics(make_outcome([1], [1]))
    metrics.on_finished(make_request(ttft_s=0.25, tpot_s=0.125))
    values = metrics.as_dict()
    assert values["ttft_p95_ms"] == pytest.approx(250.0)
    assert values["tpot_p50_ms"] == pytest.approx(125.0)
    assert values["elapsed_s"] == pytest.approx(0.1)
    assert values["depth_1_share"] == 1.0
    assert values["acceptance_at_position_1"] == 1.0
    assert "acceptance_at_position_2" not in values
    assert all(isinstance(value, int | float) for value in values.values())


def test_reset_forgets_everything() -> None:
    metrics = make_metrics(make_outcome([1], [1]), keep_rounds=True)
    metrics.on_finished(make_request())
    metrics.reset()
    assert metrics.as_dict() == EngineMetrics(K).as_dict()
    assert metrics.rounds == []


def test_rounds_are_kept_only_when_asked() -> None:
    outcome = make_outcome([3, 1], [2, 0], draft_pass_sequences=(2, 1, 1))
    assert make_metrics(outcome).rounds == []
    (row,) = make_metrics(outcome, keep_rounds=True).rounds
    assert (row.num_running, row.mean_depth, row.num_accepted, row.num_committed) == (2, 2.0, 2, 4)
    assert row.num_draft_passes == 3
    assert row.verify_s == 0.08
    assert np.isnan(row.predicted_verify_s)


def test_more_drafted_tokens_than_k_are_refused() -> None:
    with pytest.raises(ValueError, match="drafted 5 tokens"):
        make_metrics(make_outcome([5], [0]))


def test_feeding_does_not_change_the_outcome() -> None:
    outcome = make_outcome([2, 0], [1, 0], committed=[2, 0], preempted=[False, True])
    before = [array.copy() for array in (outcome.num_drafted, outcome.num_accepted)]
    make_metrics(outcome, outcome)
    assert np.array_equal(before, [outcome.num_drafted, outcome.num_accepted])


@st.composite
def rounds(draw: st.DrawFn) -> RoundOutcome:
    pairs = st.integers(0, K).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
    drafted, accepted = zip(*draw(st.lists(pairs, min_size=1, max_size=6)), strict=True)
    return make_outcome(list(drafted), list(accepted))


@settings(max_examples=40)
@given(st.lists(rounds(), min_size=1, max_size=6))
def test_everything_drafted_is_accepted_or_wasted(outcomes: list[RoundOutcome]) -> None:
    metrics = make_metrics(*outcomes)
    assert metrics.num_drafted_tokens == metrics.num_accepted_tokens + metrics.num_wasted_tokens
    assert metrics.num_committed_tokens == metrics.num_accepted_tokens + metrics.num_sequence_rounds
    assert metrics.depth_counts.sum() == metrics.num_sequence_rounds
    assert 1 <= metrics.acceptance_length <= 1 + metrics.mean_depth


@settings(max_examples=40)
@given(st.lists(rounds(), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_order_of_rounds_does_not_matter(outcomes: list[RoundOutcome], random: object) -> None:
    shuffled = list(outcomes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = make_metrics(*outcomes).as_dict(), make_metrics(*shuffled).as_dict()
    assert one == pytest.approx(other)


def test_feeding_a_round_is_cheap() -> None:
    outcome = make_outcome([2] * 32, [1] * 32)
    metrics = EngineMetrics(8)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(50):
            metrics.on_round(outcome)
        times.append((time.perf_counter() - start) / 50)
    assert min(times) < 50e-6  # about 7 microseconds on a quiet core
