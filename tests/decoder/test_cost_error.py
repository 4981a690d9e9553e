from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdepth.decoder import cost_error
from specdepth.decoder.clock import PassWork, VirtualClock
from specdepth.decoder.cost_error import (
    BLOCK_ROUNDS,
    PROBE_EVERY,
    CostError,
    _medians,
    measure_cost_error,
)
from specdepth.decoder.engine import Engine
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import build_decoder, tiny_llama

COST = CostModel.linear(
    base_s=0.01, token_s=0.001, knee=4, context_s=1e-5, overhead_s=0.002, draft_base_s=0.001
)
PROMPTS = [[1, 2, 3, 4] * 3, [5, 6, 7] * 9, [8, 9] * 20]


def rounds(predicted: list[float], measured: list[float]) -> CostError:
    each = np.arange(len(predicted))
    return CostError(np.array(predicted), np.array(measured), each + 1, each % 2)


def test_errors_are_relative_to_what_was_measured() -> None:
    error = rounds([1.1, 0.9, 2.0], [1.0, 1.0, 1.0])
    assert error.errors.tolist() == pytest.approx([0.1, 0.1, 1.0])
    assert error.median == pytest.approx(0.1)
    assert error.bias == pytest.approx(0.1)


def test_both_figures_have_to_be_within_their_bars() -> None:
    good = [1.0] * 99
    assert rounds([*good, 3.0], [1.0] * 100).is_within_bars
    assert not rounds([1.06] * 100, [1.0] * 100).is_within_bars
    assert not rounds([1.0] * 90 + [1.3] * 10, [1.0] * 100).is_within_bars


def test_rounds_can_be_picked() -> None:
    error = rounds([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert error.where(error.num_prefill_tokens > 0).predicted_s.tolist() == [2.0]


def test_the_machines_speed_goes_and_the_models_error_stays() -> None:
    slow = np.array([1.0] * 10 + [1.5] * 10)  # the machine slows down half-way
    error = CostError(
        predicted_s=np.full(20, 1.1),
        measured_s=slow,
        num_running=np.ones(20, np.int64),
        num_prefill_tokens=np.zeros(20, np.int64),
        probe_s=0.005 * slow,
    )
    assert error.p95 > 0.2
    steady = error.at_speed(0.005)
    assert steady.errors == pytest.approx(np.full(20, 0.1))
    assert error.at_speed(0.01).bias == pytest.approx(1.1 / 2 - 1)
    assert steady.where(steady.predicted_s > 0).probe_s is not None


def test_a_single_slow_probe_does_not_count() -> None:
    probes = np.full(9, 0.005)
    probes[4] = 0.05
    ones, none = np.ones(9), np.zeros(9, np.int64)
    error = CostError(ones, ones, none + 1, none, probes)
    assert (error.at_speed(0.005).errors == 0).all()


def test_without_probes_times_are_as_measured() -> None:
    error = rounds([1.1, 0.9], [1.0, 1.0])
    assert error.at_speed(123.0) is error


def check(engine: Engine, cost: CostModel, **changes: Any) -> CostError:
    ticks = iter(range(10_000))
    options: dict[str, Any] = {
        "seconds": 1.5,
        "loads": (1, 2, 4, 64),
        "clock": lambda: float(next(ticks)),
    }
    return measure_cost_error(engine, cost, PROMPTS, **(options | changes))


def make_engine() -> Engine:
    """A tiny real model on a clock that COST moves."""
    return build_decoder(tiny_llama(), clock=VirtualClock(COST)).engine


@pytest.fixture
def engine() -> Engine:
    return make_engine()


def test_the_model_that_moves_the_clock_is_never_off(engine) -> None:
    error = check(engine, COST)
    assert error.errors.max() < 1e-6
    assert error.is_within_bars


class SweptClock(VirtualClock):
    """The round right after a probe takes a second more: it finds its caches swept."""

    swept = False

    def pass_times(self, work: PassWork, draft_s: float, verify_s: float) -> tuple[float, float]:
        draft_s, verify_s = super().pass_times(work, draft_s, verify_s)
        more, self.swept = float(self.swept), False
        self._now += more
        return draft_s, verify_s + more

    def probe(self) -> float:
        self.swept = True
        return 0.005


def test_what_a_probe_does_to_the_next_round_does_not_count() -> None:
    clock = SweptClock(COST)
    engine = build_decoder(tiny_llama(), clock=clock).engine
    error = check(engine, COST, probe=clock.probe)
    assert len(error) % PROBE_EVERY == 0
    assert error.errors.max() < 1e-6
    assert error.probe_s is not None
    assert (error.probe_s == 0.005).all()


def test_a_model_that_is_too_cheap_has_a_bias_below_zero(engine) -> None:
    error = check(engine, replace(COST, verify_s=tuple(0.8 * s for s in COST.verify_s)))
    assert -0.2 < error.bias < -0.05


def test_rounds_are_of_mixed_loads_and_some_hold_prompts(engine) -> None:
    error = check(engine, COST)
    assert len(error) % (3 * BLOCK_ROUNDS) == 0  # a load of 64 does not fit
    assert {1, 2, 4} <= set(error.num_running.tolist())
    assert 0 < (error.num_prefill_tokens > 0).sum() < len(error)


def test_the_engine_is_left_idle(engine) -> None:
    check(engine, COST)
    assert not engine.has_work
    assert engine.take_finished() == []


def test_the_same_seed_runs_the_same_rounds() -> None:
    one, other = (check(make_engine(), COST, seed=3) for _ in range(2))
    assert one.measured_s.tolist() == other.measured_s.tolist()


def test_rounds_that_run_again_are_the_same_rounds(engine) -> None:
    error = check(engine, COST, repeats=3)
    assert error.errors.max() < 1e-6
    assert len(error) % (3 * BLOCK_ROUNDS) == 0
    assert not engine.has_work
    once = check(make_engine(), COST)
    first = slice(0, 3 * BLOCK_ROUNDS)
    assert error.predicted_s[first].tolist() == once.predicted_s[first].tolist()
    assert error.num_running[first].tolist() == once.num_running[first].tolist()


def test_a_round_counts_with_the_median_of_its_times() -> None:
    first = [(1.0, 1.1, 2, 0, 0.3), (2.0, 2.5, 2, 5, 0.1), (3.0, 3.0, 1, 0, 0.1)]
    second = [(1.0, 9.0, 2, 0, 0.2), (2.0, 2.0, 2, 5, 0.2), (3.5, 3.0, 1, 0, 0.1)]
    third = [(1.0, 0.9, 2, 0, 0.1), (2.0, 2.1, 2, 5, 0.3), (3.0, 3.0, 1, 0, 0.1)]
    # The third round did not come out alike.
    assert _medians([first, second, third]) == [(1.0, 1.1, 2, 0, 0.2), (2.0, 2.1, 2, 5, 0.2)]
    assert _medians([first]) == first
    assert _medians([first, second[:1]]) == [(1.0, 5.05, 2, 0, 0.25)]


def test_a_check_needs_a_repeat_and_rounds_that_come_out_alike(engine, monkeypatch) -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        check(engine, COST, repeats=0)
    monkeypatch.setattr(cost_error, "_medians", lambda sweeps: [])
    with pytest.raises(RuntimeError, match="No round came out alike in 2 repeats"):
        check(engine, COST, repeats=2)
    assert not engine.has_work


def test_a_check_needs_prompts(engine) -> None:
    with pytest.raises(ValueError, match="needs prompts"):
        measure_cost_error(engine, COST, [], seconds=1.0)
