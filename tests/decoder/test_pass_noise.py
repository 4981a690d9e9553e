from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.decoder.pass_noise import MIN_SWEEPS, measure_noise
from tests.decoder.test_profiler import LawTimer


class NoisyTimer(LawTimer):
    """Times off by a factor of law exp(N(0, spread)), on a machine whose slowness drifts."""

    def __init__(self, spread: float, drift: float = 0.0, **options: Any) -> None:
        super().__init__(drafter="prompt-lookup", first_run=1.0, **options)
        self._spread, self._drift = spread, drift

    @property
    def slowness(self) -> float:
        return 1 + self._drift * np.sin(len(self.passes) / 20)

    def disturbed(self, seconds: float) -> float:
        return seconds * self.slowness * np.exp(self._spread * self.rng.standard_normal())

    def probe(self) -> float:
        return 0.005 * self.slowness


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2])
def test_noise_is_what_passes_of_one_shape_scatter(spread: float) -> None:
    timer = NoisyTimer(spread)
    noise = measure_noise(timer, seconds=2000.0, clock=timer.clock)
    assert len(noise) > 2000
    # Quantiles of |exp(s z) - 1|, z standard normal.
    errors = np.abs(np.expm1(spread * np.random.default_rng(1).standard_normal(100_000)))
    assert noise.median == pytest.approx(np.median(errors), rel=0.1, abs=1e-9)
    assert noise.p95 == pytest.approx(np.quantile(errors, 0.95), rel=0.1, abs=1e-9)


def test_a_drift_that_the_probe_sees_is_no_noise() -> None:
    timer = NoisyTimer(0.0, drift=0.3)
    assert measure_noise(timer, seconds=500.0, clock=timer.clock).median > 0.05
    timer = NoisyTimer(0.0, drift=0.3)
    noise = measure_noise(timer, seconds=500.0, clock=timer.clock, probe=timer.probe)
    assert noise.p95 < 0.02


def test_each_shape_is_timed_however_short_the_time() -> None:
    timer, shares = NoisyTimer(0.1), list[float]()
    noise = measure_noise(timer, seconds=1e-6, clock=timer.clock, progress=shares.append)
    shapes = {tuple(query) for _, query, _ in timer.passes}
    assert len(noise) == MIN_SWEEPS * len(shapes) == len(shares)
    assert set(noise.num_running.tolist()) == {1, 4, 16, 32}
    assert set(noise.num_prefill_tokens.tolist()) == {0, 256}
    assert shares[-1] == 1.0


def test_a_small_engine_times_what_fits() -> None:
    # The timer itself asserts that every pass fits.
    timer = NoisyTimer(0.1, max_num_seqs=4, max_pass_tokens=64, max_kv_tokens=1024)
    noise = measure_noise(timer, seconds=1e-6, clock=timer.clock)
    assert set(noise.num_running.tolist()) == {1, 4}
    assert not noise.num_prefill_tokens.any()


def test_the_same_seed_takes_the_same_order() -> None:
    one, other = NoisyTimer(0.1), NoisyTimer(0.1)
    for timer in (one, other):
        measure_noise(timer, seconds=100.0, seed=3, clock=timer.clock)
    assert one.passes == other.passes
