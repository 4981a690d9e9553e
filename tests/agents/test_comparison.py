from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.comparison import (
    MIN_REQUESTS,
    Comparison,
    LoadRuns,
    machine_noise,
    paired_noise,
)
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.request import GenerationResult, RequestMetrics
from specdepth.decoder.serving import ServeResult


def served(tokens: list[int], seconds: list[float], first: int = 0) -> ServeResult:
    """Results with so many tokens and shares of time; token ids begin with `first`."""
    results = tuple(
        GenerationResult(
            request_id=str(i),
            prompt_token_ids=[1],
            token_ids=[first, *range(1, count)],
            text=None,
            finish_reason="length",
            metrics=RequestMetrics(
                num_prompt_tokens=1,
                num_generated_tokens=count,
                num_rounds=count,
                num_drafted_tokens=0,
                num_accepted_tokens=0,
                num_preemptions=0,
                arrival_s=0.0,
                first_token_s=0.1,
                finished_s=1.0,
            ),
        )
        for i, count in enumerate(tokens)
    )
    return ServeResult(
        results=results,
        metrics=EngineMetrics(8),
        makespan_s=sum(seconds),
        wall_s=2 * sum(seconds),
        request_s=np.array(seconds),
        request_wall_s=2 * np.array(seconds),
        mean_in_flight=1.0,
    )


def runs(off: list[float], fast: list[float], tokens: int = 10) -> LoadRuns:
    found = LoadRuns(("off", "fixed:2"))
    count = [tokens] * len(off)
    block = range(len(off))
    found.add(block, 0, {"off": served(count, off), "fixed:2": served(count, fast)})
    return found


def test_throughput_is_tokens_over_seconds():
    found = runs([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert found.throughput("off").value == pytest.approx(40 / 10)
    assert found.throughput("off", wall=True).value == pytest.approx(40 / 20)


def test_the_ratio_is_that_of_throughputs_and_its_interval_is_paired():
    off = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = runs(off, [s / 2 for s in off])
    ratio = found.ratio("fixed:2", "off")
    # Every request is twice as fast, so resampling pairs changes nothing.
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    spread = found.throughput("off")
    assert spread.low < spread.value < spread.high


def test_unequal_speedups_give_an_interval_around_the_total():
    found = runs([1.0] * 6, [1.0, 1.0, 0.5, 0.5, 0.25, 2.0])
    ratio = found.ratio("fixed:2", "off")
    assert ratio.value == pytest.approx(6 / 5.25)
    assert ratio.low < ratio.value < ratio.high


def test_an_answer_of_another_length_counts_with_its_own_tokens():
    found = LoadRuns(("off", "fixed:2"))
    found.add(
        [0, 1], 0, {"off": served([10, 10], [1.0, 1.0]), "fixed:2": served([20, 10], [1.0, 1.0])}
    )
    assert found.ratio("fixed:2", "off").value == pytest.approx(1.5)


def test_few_requests_have_no_interval():
    few = runs([1.0] * (MIN_REQUESTS - 1), [0.5] * (MIN_REQUESTS - 1))
    assert few.ratio("fixed:2", "off").bounds == (None, None)
    enough = runs([1.0] * MIN_REQUESTS, [0.5] * MIN_REQUESTS)
    assert enough.ratio("fixed:2", "off").bounds == pytest.approx((2.0, 2.0))


def test_noise_of_the_machine_widens_intervals_and_more_blocks_narrow_them():
    once = runs([1.0] * 8, [0.8] * 8)
    exact = once.ratio("fixed:2", "off")
    assert exact == pytest.approx((1.25, 1.25, 1.25))
    once.noise = 0.1
    noisy = once.ratio("fixed:2", "off")
    # Two runs of standard deviation 0.1, at 1.96 standard deviations.
    assert noisy.value == exact.value
    assert np.log(noisy.high / noisy.low) / 2 == pytest.approx(1.96 * 0.1 * np.sqrt(2), rel=0.05)
    one_sided = once.throughput("off")
    assert np.log(one_sided.high / one_sided.low) / 2 == pytest.approx(1.96 * 0.1, rel=0.05)
    count = [10] * 8
    for repeat in (1, 2, 3):
        both = {"off": served(count, [1.0] * 8), "fixed:2": served(count, [0.8] * 8)}
        once.add(range(8), repeat, both)
    four = once.ratio("fixed:2", "off")
    assert np.log(four.high / four.low) == pytest.approx(np.log(noisy.high / noisy.low) / 2)


def test_a_policy_is_exactly_as_fast_as_itself_however_noisy_the_machine_is():
    found = runs([1.0] * 8, [0.8] * 8)
    found.noise = 0.5
    assert found.ratio("off", "off") == (1, 1, 1)


def test_noise_is_what_runs_of_a_load_differ_by_from_the_cost_model():
    assert machine_noise([[0.3, 0.3, 0.3], [-0.2, -0.2]]) == pytest.approx(0)
    assert machine_noise([[]]) == 0
    assert machine_noise([[0.5]]) == 0
    rng = np.random.default_rng(0)
    many = [(shift + rng.normal(0, 0.1, 500)).tolist() for shift in (0.0, 1.0, -3.0)]
    assert machine_noise(many) == pytest.approx(0.1, rel=0.05)


def test_paired_noise_is_what_is_neither_a_blocks_nor_a_policys() -> None:
    rng = np.random.default_rng(0)
    blocks, policies = rng.normal(0, 0.5, (300, 1)), np.array([0.0, 0.3, -0.2, 0.1])
    assert paired_noise((blocks + policies).tolist()) == pytest.approx(0)
    noisy = blocks + policies + rng.normal(0, 0.1, (300, 4))
    assert paired_noise(noisy.tolist()) == pytest.approx(0.1, rel=0.1)
    assert machine_noise(noisy.T.tolist()) > 0.4
    # Few blocks say the same on the average.
    few = [paired_noise(noisy[at : at + 3].tolist()) ** 2 for at in range(0, 300, 3)]
    assert np.mean(few) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("misses", [[], [[0.1, 0.2]], [[0.1], [0.4]]])
def test_one_block_or_one_policy_shows_no_noise(misses: list[list[float]]) -> None:
    assert paired_noise(misses) == 0


def test_repeats_of_a_request_are_one_unit():
    found = LoadRuns(("off",))
    for repeat in range(3):
        found.add([0, 1, 2, 3], repeat, {"off": served([10] * 4, [1.0, 2.0, 3.0, 4.0])})
    once = runs([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert found.num_requests == 4
    assert found.num_repeats == 3
    assert found.throughput("off") == pytest.approx(once.throughput("off"))


def test_blocks_of_other_requests_add_up():
    found = LoadRuns(("off",))
    found.add([0, 1], 0, {"off": served([10, 10], [1.0, 1.0])})
    found.add([2, 3, 4], 0, {"off": served([10, 10, 10], [2.0, 2.0, 2.0])})
    assert found.num_requests == 5
    assert found.makespan_s["off"] == 8
    assert found.throughput("off").value == pytest.approx(50 / 8)


def test_different_texts_are_a_share_of_answers():
    found = LoadRuns(("off", "fixed:2"))
    a = served([3, 3, 3, 3], [1.0] * 4)
    b = served([3, 3, 3, 3], [1.0] * 4, first=7)
    found.add([0, 1, 2, 3], 0, {"off": a, "fixed:2": a})
    found.add([4, 5, 6, 7], 0, {"off": a, "fixed:2": b})
    assert found.share_of_different_texts("fixed:2") == 0.5
    notes = Comparison(runs={1: found}).describe()
    assert any("Up to 50% of a policy's answers differ" in note for note in notes)


def test_the_best_fixed_depth_is_the_fastest_and_may_be_off():
    slow = Comparison(runs={1: runs([1.0] * 4, [2.0] * 4), 4: runs([1.0] * 4, [0.5] * 4)})
    assert slow.best_fixed(1) == "off"
    assert slow.best_fixed(4) == "fixed:2"
    with pytest.raises(ValueError, match="no fixed depth"):
        Comparison(runs={1: LoadRuns(("learned",))}).best_fixed(1)


def test_rows_hold_each_metric_once_for_each_policy_and_load():
    found = Comparison(runs={1: runs([1.0] * 4, [0.5] * 4), 4: runs([1.0] * 4, [0.5] * 4)})
    rows = found.rows(best_single="fixed:2", table="absent")
    keys = [(row.policy, row.load, row.metric) for row in rows]
    assert len(keys) == len(set(keys))
    by_key = {key: row for key, row in zip(keys, rows, strict=True)}
    assert by_key["off", 1, "ratio_to_best_fixed"].value == pytest.approx(0.5)
    assert by_key["off", 1, "ratio_to_best_single_fixed"].value == pytest.approx(0.5)
    assert by_key["fixed:2", 4, "speedup"].value == pytest.approx(2)
    assert by_key["off", 4, "speedup"].ci_low == 1
    assert ("off", 1, "ratio_to_table") not in by_key
    assert not any(row.metric == "span_s" for row in rows)


def test_loads_that_vary_come_after_the_constant_ones():
    one = runs([1.0] * 4, [0.5] * 4)
    found = Comparison(runs={"varying": one, 8: one, 1: one})
    assert found.loads == [1, 8, "varying"]
    assert found.constant_loads == [1, 8]
    assert found.best_fixed("varying") == "fixed:2"
    assert {row.load for row in found.rows()} == {1, 8, "varying"}
    assert "4 at varying, 4 at load 8, 4 at load 1" in found.describe()[0]


def test_modelled_times_are_told_to_be_exact():
    found = Comparison(runs={1: runs([1.0] * 4, [0.5] * 4)}, clock="virtual")
    served_note, clock_note = found.describe()
    assert "in the same order" in served_note
    assert "for these very ones the modelled times are exact" in served_note
    assert clock_note == "Times are what the cost model says, not measured."


def test_the_gap_is_left_out_where_the_oracle_is_no_faster():
    count = [10] * 4
    for seconds, expected in ((0.5, 1), (2.0, 0)):
        run = LoadRuns(("off", "oracle"))
        run.add(
            range(4), 0, {"off": served(count, [1.0] * 4), "oracle": served(count, [seconds] * 4)}
        )
        rows = Comparison(runs={1: run}).rows(oracle="oracle")
        gaps = [row.value for row in rows if row.metric == "oracle_gap_closed"]
        assert gaps == [0, 1] * expected


def test_descriptions_name_requests_repeats_and_the_clock():
    found = Comparison(runs={1: runs([1.0] * 2, [0.5] * 2)}, clock="cpu")
    few, clock = found.describe()
    assert "2 at load 1 (too few for intervals)" in few
    assert "CPU time" in clock
    assert Comparison(runs={}).describe() == ["No block of requests was completed."]
