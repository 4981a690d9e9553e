"""Keyed draws, the sampling law, inverse-CDF and Gumbel sampling."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdepth.decoder.sampling import (
    Stream,
    _to_unit_,
    argmax,
    gumbel_argmax,
    round_uniforms,
    sample,
    token_probs,
    uniform,
)

BITS = 2**64
GRID = torch.arange(300)
P_VALUE = 1e-6
"""Seeds are fixed and not tuned; a right generator fails one such test in a million."""


def splitmix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % BITS
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % BITS
    return state ^ (state >> 31)


def reference_bits(*keys: int) -> int:
    stream, *rest = keys
    state = stream * 0xD1B54A32D192ED03 % BITS
    for key in rest:
        state = splitmix((state + key * 0x9E3779B97F4A7C15) % BITS)
    return state


def as_unit(bits: int) -> float:
    return ((bits >> 12) + 0.5) / 2**52


# Keyed draws


def test_the_hash_is_splitmix64():
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # published first output for seed 0


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
    st.sampled_from(list(Stream)),
)
def test_a_draw_is_the_documented_function_of_its_key(seed, position, attempt, stream):
    draw = uniform(torch.tensor(seed), torch.tensor(position), torch.tensor(attempt), stream)
    assert draw.item() == as_unit(reference_bits(stream, seed, position, attempt))


def test_draws_never_reach_zero_or_one():
    extremes = _to_unit_(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert (extremes > 0).all()
    assert (extremes < 1).all()


def test_draws_are_uniform_over_each_part_of_the_key():
    seeds, positions, attempts = GRID[:60, None, None], GRID[:60, None], GRID[:60]
    for stream in Stream:
        draws = uniform(seeds, positions, attempts, stream)
        assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > P_VALUE
        for fixed in ((0,), (slice(None), 0), (slice(None), slice(None), 0)):
            assert stats.kstest(draws[fixed].flatten().numpy(), "uniform").pvalue > P_VALUE


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 7])
def test_draws_of_neighbouring_keys_are_independent(axis, distance):
    draws = uniform(GRID[:60, None, None], GRID[:60, None], GRID[:60], Stream.ACCEPT).numpy()
    first = np.take(draws, range(60 - distance), axis).ravel()
    second = np.take(draws, range(distance, 60), axis).ravel()
    cells = np.histogram2d(first, second, bins=16, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(cells.ravel()).pvalue > P_VALUE
    for bit in range(1, 9):  # low-order structure that the cells would miss
        fractions = (first * 2**bit % 1 < 0.5) ^ (second * 2**bit % 1 < 0.5)
        assert abs(fractions.mean() - 0.5) < 5 * 0.5 / len(first) ** 0.5


def test_streams_are_independent():
    draws = [uniform(GRID[:, None], GRID, torch.tensor(0), s).flatten().numpy() for s in Stream]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 5 / len(draws[0]) ** 0.5


def test_swapping_seed_position_and_attempt_gives_other_draws():
    keys = [torch.tensor(key) for key in ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2))]
    draws = {uniform(key[0], key[1], key[2], Stream.DRAFT).item() for key in keys}
    assert len(draws) == len(keys)


def test_no_two_of_a_million_keys_share_a_draw():
    draws = uniform(GRID[:100, None, None], GRID[:100, None], GRID[:100], Stream.FINAL)
    assert len(draws.flatten().unique()) == 10**6


def test_round_uniforms_are_the_draws_of_their_positions():
    seed, position, attempt = torch.tensor([5, 6]), torch.tensor([10, 20]), torch.tensor([1, 2])
    accept, final = round_uniforms(seed, position, attempt, 3)
    assert accept.shape == (2, 3)
    assert accept[1, 2] == uniform(seed[1], position[1] + 2, attempt[1], Stream.ACCEPT)
    assert final[0] == uniform(seed[0], position[0], attempt[0], Stream.FINAL)
    assert round_uniforms(seed, position, attempt, 0)[0].shape == (2, 0)


# The sampling law


def reference_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """One row, by sorting, in float64."""
    values = logits.double().numpy()
    if temperature == 0:
        return np.eye(len(values))[values.argmax()]
    weights = np.exp((values - values.max()) / temperature)
    if 0 < top_k < len(weights):
        weights[weights < np.sort(weights)[-top_k]] = 0
    probs = weights / weights.sum()
    if top_p < 1:
        ordered = np.sort(probs)[::-1]
        before = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
        probs[probs < ordered[before < top_p].min()] = 0
    return probs / probs.sum()


def rows_of(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 40),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 1.7]),
            st.integers(0, 45),
            st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        ),
        max_size=6,
    ),
)
def test_probs_match_a_row_by_row_reference(seed, vocab_size, settings_of_rows):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(
        len(settings_of_rows), vocab_size, generator=generator, dtype=torch.float64
    )
    columns = list(zip(*settings_of_rows, strict=True)) or [(), (), ()]
    probs = token_probs(
        logits, rows_of(columns[0]), torch.tensor(columns[1]).long(), rows_of(columns[2])
    )
    assert probs.shape == logits.shape
    for row, (probs_row, setting) in enumerate(zip(probs, settings_of_rows, strict=True)):
        np.testing.assert_allclose(
            probs_row.numpy(), reference_probs(logits[row], *setting), atol=1e-12
        )


@pytest.mark.parametrize("vocab_size", [4096, 5000, 49152])
def test_wide_rows_match_the_reference_whether_the_cut_lies_inside_the_prefilter_or_beyond(
    vocab_size,
):
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(8, vocab_size, generator=generator, dtype=torch.float64)
    scale = rows_of([9.0, 6.0, 3.0, 1.0, 0.2, 3.0, 3.0, 0.0])[:, None]
    temperature = rows_of([0.7] * 8)
    top_k = torch.tensor([0, 0, 0, 0, 0, 50, 300, 0])
    top_p = rows_of([0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 0.7, 0.5])
    logits = noise * scale
    probs = token_probs(logits, temperature, top_k, top_p)
    counts = (probs > 0).sum(-1)
    assert (counts < 64).any()
    assert (counts > 1000).any()
    for row in range(8):
        expected = reference_probs(logits[row], 0.7, int(top_k[row]), float(top_p[row]))
        np.testing.assert_allclose(probs[row].numpy(), expected, atol=1e-12)


def test_ties_at_the_cut_are_all_kept():
    one = torch.ones(1)
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert token_probs(logits, one, torch.tensor([2]), one).count_nonzero() == 4
    assert token_probs(logits, one, torch.tensor([0]), one * 0.5).count_nonzero() == 4


def test_ties_that_cross_the_prefilter_are_all_kept():
    logits = torch.full((1, 8192), -3.0, dtype=torch.float64)
    logits[0, torch.arange(0, 8000, 80)] = 5.0  # 100 equal tokens, more than the prefilter holds
    probs = token_probs(logits, rows_of([1.0]), torch.tensor([10]), rows_of([1.0]))
    assert probs.count_nonzero() == 100
    probs = token_probs(logits, rows_of([1.0]), torch.tensor([0]), rows_of([0.2]))
    assert probs.count_nonzero() == 100


def test_top_p_counts_the_mass_that_top_k_left():
    logits = rows_of([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the top two, the first holds 0.571: more than half, so it stays alone.
    probs = token_probs(logits, rows_of([1.0]), torch.tensor([2]), rows_of([0.55]))
    assert probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_temperature_zero_is_a_point_mass_at_the_first_largest_logit():
    logits = torch.tensor([[1.0, 5.0, 5.0], [7.0, 5.0, 7.0]])
    probs = token_probs(logits, torch.zeros(2), torch.tensor([2, 0]), torch.tensor([0.5, 1.0]))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_tiny_temperatures_stay_finite(temperature):
    logits = torch.tensor([[1.0, 50.0, -1e4, 49.0]])
    probs = token_probs(logits, rows_of([temperature]), torch.tensor([0]), torch.tensor([1.0]))
    assert probs.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_masked_logits_get_probability_zero():
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    probs = token_probs(logits, torch.tensor([0.5]), torch.tensor([0]), torch.tensor([0.99]))
    assert probs[0, 1] == 0
    assert probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_give_float32(dtype):
    logits = torch.tensor([[1.0, 2.0]], dtype=dtype)
    for temperature in (0.0, 0.5):
        probs = token_probs(
            logits, torch.tensor([temperature]), torch.tensor([0]), torch.tensor([1.0])
        )
        assert probs.dtype == torch.float32


def test_a_row_does_not_depend_on_the_other_rows_and_logits_are_left_alone():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, 9000, generator=generator) * torch.linspace(0.1, 9, 24)[:, None]
    before = logits.clone()
    temperature = torch.linspace(0, 2, 24)
    top_k, top_p = torch.arange(24) * 5 % 90, torch.linspace(0.3, 1, 24)
    together = token_probs(logits, temperature, top_k, top_p)
    for row in range(24):
        at = slice(row, row + 1)
        alone = token_probs(logits[at], temperature[at], top_k[at], top_p[at])
        assert torch.equal(alone[0], together[row])
    assert torch.equal(logits, before)


def test_argmax_takes_the_first_largest_entry_in_each_dtype():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 1.0, 2.0]], dtype=dtype)
        assert argmax(logits).tolist() == [1, 0]
    assert argmax(torch.zeros(0, 3)).shape == (0,)


# Inverse CDF


def measured_law(probs: Tensor) -> Tensor:
    """Measure of the uniforms that give each token, [N, V], by bisecting `sample` itself."""
    num_rows, vocab_size = probs.shape
    edges = [torch.zeros(num_rows, dtype=torch.float64)]
    for token in range(vocab_size):
        low, high = edges[0], torch.ones(num_rows, dtype=torch.float64)
        for _ in range(45):
            middle = (low + high) / 2
            below = sample(probs, middle) <= token
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        edges.append(low)
    return torch.stack(edges).diff(dim=0).T


def test_sample_gives_each_token_exactly_its_probability():
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(6, 7, generator=generator, dtype=torch.float64)
    probs[0, [0, 3, 6]] = 0.0
    probs[1, :6] = 0.0
    assert torch.allclose(measured_law(probs), probs / probs.sum(-1, keepdim=True), atol=1e-12)


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 1000])
def test_sample_is_exact_across_its_blocks(vocab_size):
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(1, vocab_size, generator=generator, dtype=torch.float64)
    probs /= probs.sum()
    edges = probs[0].cumsum(0)
    middles = torch.cat([edges[:1] / 2, (edges[1:] + edges[:-1]) / 2])
    expected = torch.arange(vocab_size)
    assert torch.equal(sample(probs.expand(vocab_size, -1), middles), expected)
    for shift in (-1e-12, 1e-12):
        shifted = sample(probs.expand(vocab_size - 1, -1), edges[:-1] + shift)
        assert torch.equal(shifted, expected[:-1] + (shift > 0))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 600), st.sampled_from([torch.float32, torch.float64]))
def test_sample_never_returns_a_token_of_probability_zero(seed, vocab_size, dtype):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(1, vocab_size, generator=generator, dtype=dtype) ** 8
    probs[torch.rand(1, vocab_size, generator=generator) < 0.9] = 0.0
    probs[0, seed % vocab_size] += 1e-7
    uniforms = torch.tensor([0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    rows = probs.expand(len(uniforms), -1)
    ids = sample(rows, uniforms)
    assert (rows.gather(1, ids[:, None]) > 0).all()
    assert (ids.diff() >= 0).all()


def test_sample_of_no_rows_is_empty():
    assert sample(torch.zeros(0, 5), torch.zeros(0)).shape == (0,)


# Gumbel


def test_gumbel_argmax_is_the_documented_function_of_its_key():
    probs = torch.tensor([[0.2, 0.3, 0.0, 0.5]], dtype=torch.float64)
    for seed, position in ((0, 0), (3, 17), (-5, 2)):
        scores = [
            np.log(p) - np.log(-np.log(as_unit(reference_bits(Stream.GUMBEL, seed, position, x))))
            for x, p in enumerate([0.2, 0.3, 1e-300, 0.5])
        ]
        assert gumbel_argmax(probs, torch.tensor([seed]), torch.tensor([position])).item() == (
            int(np.argmax(scores))
        )


LAW = torch.tensor([0.5, 0.0, 0.2, 0.15, 0.1, 0.04, 0.01])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gumbel_argmax_draws_from_the_law_over_consecutive_positions(seed):
    count = 20_000
    ids = gumbel_argmax(
        LAW.expand(count, -1), torch.full((count,), seed), torch.arange(count)
    ).numpy()
    positive = LAW > 0
    counts = np.bincount(ids, minlength=len(LAW))
    assert counts[~positive].sum() == 0
    expected = LAW[positive].double().numpy()
    assert stats.chisquare(counts[positive], count * expected / expected.sum()).pvalue > P_VALUE


@pytest.mark.parametrize("key", ["seed", "position"])
def test_gumbel_argmax_draws_of_neighbouring_keys_are_independent(key):
    count = 40_000
    varying, fixed = torch.arange(count), torch.full((count,), 2)
    keys = (varying, fixed) if key == "seed" else (fixed, varying)
    law = torch.tensor([0.5, 0.3, 0.2])
    ids = gumbel_argmax(law.expand(count, -1), *keys).numpy()
    pairs = np.bincount(3 * ids[:-1] + ids[1:], minlength=9)
    expected = np.outer(law.double(), law.double()).ravel()
    assert stats.chisquare(pairs, pairs.sum() * expected / expected.sum()).pvalue > P_VALUE


def test_shared_noise_agrees_at_least_as_often_as_the_bound_for_couplings_without_communication():
    generator = torch.Generator().manual_seed(5)
    target = torch.rand(6, generator=generator).softmax(-1)
    draft = torch.rand(6, generator=generator).mul(2).softmax(-1)
    distance = 0.5 * (target - draft).abs().sum().item()
    count = 20_000
    keys = (torch.full((count,), 1), torch.arange(count))
    agree = gumbel_argmax(target.expand(count, -1), *keys) == gumbel_argmax(
        draft.expand(count, -1), *keys
    )
    bound = (1 - distance) / (1 + distance)  # Daliri et al. 2024
    assert agree.double().mean() > bound - 5 * 0.5 / count**0.5


def test_gumbel_argmax_of_a_point_mass_is_its_token():
    probs = torch.eye(5)
    assert gumbel_argmax(probs, torch.arange(5), torch.arange(5)).tolist() == list(range(5))


def test_gumbel_argmax_of_a_row_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(6, 3000, generator=generator)
    sparse = dense * (torch.rand(6, 3000, generator=generator) < 0.01)
    seeds, positions = torch.arange(6), torch.arange(6) * 10
    alone = torch.cat(
        [gumbel_argmax(sparse[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(6)]
    )
    # Packed, alone and together; then hashed whole, because the other rows are dense.
    assert torch.equal(gumbel_argmax(sparse, seeds, positions), alone)
    mixed = gumbel_argmax(torch.cat([sparse, dense]), seeds.repeat(2), positions.repeat(2))
    assert torch.equal(mixed[:6], alone)


def test_gumbel_argmax_ignores_the_scale_of_a_row():
    probs = torch.rand(50, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = torch.arange(50), torch.zeros(50, dtype=torch.int64)
    assert torch.equal(gumbel_argmax(probs, *keys), gumbel_argmax(probs * 4, *keys))


def test_gumbel_argmax_of_no_rows_is_empty():
    empty = torch.zeros(0, dtype=torch.int64)
    assert gumbel_argmax(torch.zeros(0, 5), empty, empty).shape == (0,)


@pytest.mark.gpu
def test_cuda_draws_the_same_as_the_cpu():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 9000, generator=generator, dtype=torch.float64)
    temperature, top_k, top_p = torch.linspace(0, 1.5, 16), torch.arange(16), torch.full((16,), 0.9)
    keys = torch.arange(16), torch.arange(16) * 3
    draws = uniform(*keys, keys[0], Stream.ACCEPT)
    probs = token_probs(logits, temperature, top_k, top_p)
    cuda_keys = [key.cuda() for key in keys]
    cuda_probs = token_probs(logits.cuda(), temperature, top_k, top_p)
    cuda_draws = uniform(cuda_keys[0], cuda_keys[1], cuda_keys[0], Stream.ACCEPT)
    assert torch.equal(cuda_draws.cpu(), draws)
    assert torch.allclose(cuda_probs.cpu(), probs, atol=1e-12)
    assert torch.equal(sample(cuda_probs, draws.cuda()).cpu(), sample(probs, draws))
    assert torch.equal(gumbel_argmax(cuda_probs, *cuda_keys).cpu(), gumbel_argmax(probs, *keys))
