"""The compiled race of `gumbel_argmax` against the torch code that it stands in for."""

import math
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdepth.decoder import gumbel_race, native
from specdepth.decoder.gumbel_race import can_race, load, race
from specdepth.decoder.sampling import (
    Stream,
    _absorb,
    _race_dense,
    _row_keys,
    _to_unit_,
    gumbel_argmax,
)
from tests.decoder.threads import torch_threads

needs_kernel = pytest.mark.skipif(load() is None, reason="no AVX-512 or no C compiler")
KEYS = st.integers(-(2**63), 2**63 - 1)
BITS = 2**64
P_VALUE = 1e-6
"""Seeds are fixed and not tuned; a right kernel fails one such test in a million."""


def weights_of(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, decades: float, zeros: float
) -> Tensor:
    """Weights log-uniform over `decades`, a share `zeros` of them 0, but none of the rows all."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * -decades
    weights = (10**exponents).to(dtype)
    weights[torch.rand(shape, generator=generator) < zeros] = 0.0
    kept = torch.randint(shape[1], (shape[0], 1), generator=generator)
    return weights.scatter_(1, kept, 10 ** exponents.gather(1, kept).to(dtype))


def some_keys(count: int) -> Tensor:
    return _row_keys(torch.full((count,), 9), torch.arange(count), Stream.GUMBEL)


@needs_kernel
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(KEYS, min_size=1, max_size=4),
    st.one_of(st.integers(1, 40), st.integers(1, 3000)),
    st.sampled_from([(torch.float32, 37.0), (torch.float64, 300.0)]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_the_kernel_draws_what_torch_draws(seed, keys, vocab_size, kind, spread, zeros):
    dtype, decades = kind
    weights = weights_of(seed, (len(keys), vocab_size), dtype, decades * spread, zeros)
    at = torch.tensor(keys)
    assert can_race(weights)
    assert torch.equal(race(weights, at), _race_dense(weights, at))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_mass_gives_its_token_wherever_it_lies(dtype):
    weights = torch.eye(45, dtype=dtype) * 1e-30
    assert race(weights, some_keys(45)).tolist() == list(range(45))


@needs_kernel
def test_of_infinite_arrival_times_the_first_wins():
    weights = torch.zeros(3, 30, dtype=torch.float64)
    weights[:, 17:] = 5e-324
    assert race(weights, some_keys(3)).tolist() == [17, 17, 17]


@needs_kernel
def test_a_row_of_zeros_gives_some_token_of_the_vocabulary():
    assert race(torch.zeros(2, 11), some_keys(2)).tolist() == [10, 10]


def unmixed(bits: int) -> int:
    """State that SplitMix64 turns into `bits`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = bits
        for _ in range(64 // shift):
            shifted = bits ^ (shifted >> shift)
        bits = shifted * pow(factor, -1, BITS) % BITS
    return bits


@needs_kernel
@pytest.mark.parametrize("late", [9, 16, 100])
@pytest.mark.parametrize("cell", [0, 1, 2**26, 2**40])
@pytest.mark.parametrize("ratio", [1 - 1e-14, 1 + 1e-14])
def test_an_id_that_the_bound_hardly_lets_pass_is_judged_by_its_time(late, cell, ratio):
    """Cells of u are counted from 1; in the third the bound is closest to -log(u), 1.5e-8 below."""
    key = (unmixed((2**52 - 1 - cell) << 12) - late * 0x9E3779B97F4A7C15) % BITS
    at = torch.tensor([key - BITS if key >= BITS // 2 else key])
    draws = _to_unit_(_absorb(at, torch.tensor([0, late])))
    assert draws[1] == 1 - (cell + 0.5) * 2**-52
    weights = torch.zeros(1, 101, dtype=torch.float64)
    weights[0, late] = 0.3
    weights[0, 0] = 0.3 * ratio * math.log(draws[0]) / math.log(draws[1])
    assert race(weights, at).item() == (0 if ratio > 1 else late)


@needs_kernel
def test_times_a_hundredth_of_a_trillionth_apart_are_told_apart():
    keys, ids = some_keys(30), torch.arange(1000)
    ranks = torch.rand(30, 1000, generator=torch.Generator().manual_seed(0)).argsort(-1)
    times = -_to_unit_(_absorb(keys[:, None], ids)).log()
    assert torch.equal(race(times / (1 + 1e-14 * ranks.double()), keys), ranks.argmin(-1))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_weights(dtype):
    generator = torch.Generator().manual_seed(2)
    law = torch.rand(45, generator=generator, dtype=dtype) ** 3
    law[::7] = 0.0
    count = 50_000
    ids = race(law.expand(count, -1), some_keys(count))
    counts, positive = np.bincount(ids.numpy(), minlength=45), law.numpy() > 0
    assert counts[~positive].sum() == 0
    expected = law.double().numpy()[positive]
    assert stats.chisquare(counts[positive], count * expected / expected.sum()).pvalue > P_VALUE


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


@needs_kernel
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_threads_share_the_rows_and_change_nothing(num_rows):
    weights, keys = weights_of(3, (33, 1001), torch.float32, 5, 0.3), some_keys(33)
    expected = _race_dense(weights, keys)[:num_rows]
    assert torch.equal(race(weights[:num_rows], keys[:num_rows]), expected)


@needs_kernel
def test_rows_may_lie_in_memory_in_any_way():
    weights, keys = weights_of(4, (12, 60), torch.float32, 5, 0.3), some_keys(120)[::2]
    views = (weights.T, weights[:, ::2], weights[::3], weights[:, 5:], weights[2].expand(12, -1))
    for view in views:
        at = keys[: len(view)]
        assert torch.equal(race(view, at), _race_dense(view, at))


@needs_kernel
@pytest.mark.parametrize("zeros", [0.2, 0.99])
def test_without_the_kernel_the_draws_are_the_same(monkeypatch, zeros):
    weights = weights_of(5, (9, 3000), torch.float32, 4, zeros)
    seed, position = torch.arange(9) - 4, torch.arange(9) * 100
    expected = gumbel_argmax(weights, seed, position)
    monkeypatch.setattr(gumbel_race, "load", lambda: None)
    monkeypatch.setattr("specdepth.decoder.sampling.race", None)
    assert not can_race(weights)
    assert torch.equal(gumbel_argmax(weights, seed, position), expected)


def test_no_compiler_and_no_instructions_mean_no_kernel(monkeypatch, caplog):
    def fails(*_, **__):
        raise subprocess.SubprocessError("gcc could not compile")

    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(("avx512f", "avx512dq")))
    monkeypatch.setattr(native, "compiled", fails)
    assert load.__wrapped__() is None
    assert "gcc could not compile" in caplog.text
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(("avx512f",)))
    monkeypatch.setattr(native, "compiled", None)
    assert load.__wrapped__() is None


def test_the_kernel_takes_only_what_it_can_read():
    assert not can_race(torch.ones(1, 4, dtype=torch.float16))
    assert not can_race(torch.ones(1, 4, device="meta"))
