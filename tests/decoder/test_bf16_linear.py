"""The linear layer in bfloat16 against the definition, and against itself with other numbers of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.bf16_linear import Bf16Linear, can_multiply
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.threads import torch_threads


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@on_each_kernel
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    outputs=st.sampled_from([32, 64, 160]),
    inputs=st.sampled_from([32, 96, 576]),
    has_bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_it_multiplies(rows: int, outputs: int, inputs: int, has_bias: bool, seed: int) -> None:
    weight, x = random(outputs, inputs, seed=seed), random(rows, inputs, seed=seed + 1)
    bias = random(outputs, seed=seed + 2) if has_bias else None
    got = Bf16Linear(weight, bias)(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Sums are taken in float32 and rounded once, to 8 bits.
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-4)


@on_each_kernel
@pytest.mark.parametrize("inputs", [96, 576])
def test_a_row_gets_the_same_bits_among_any_number_of_rows(inputs: int) -> None:
    layer, x = Bf16Linear(random(64, inputs), random(64, seed=1)), random(130, inputs, seed=2)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    for count in (2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 130):
        assert torch.equal(layer(x[:count]), alone[:count])
        assert torch.equal(layer(x[-count:]), alone[-count:])


@on_each_kernel
def test_inputs_of_any_layout_and_shape() -> None:
    layer, x = Bf16Linear(random(64, 32), None), random(6, 32)
    expected = layer(x)
    assert torch.equal(layer(x.view(2, 3, 32)), expected.view(2, 3, 64))
    wide = torch.zeros(6, 80, dtype=torch.bfloat16)
    wide[:, 10:42] = x
    assert torch.equal(layer(wide[:, 10:42]), expected)
    assert torch.equal(layer(x.T.contiguous().T), expected)
    assert layer(x[:0]).shape == (0, 64)


@on_each_kernel
def test_threads_change_nothing() -> None:
    layer, x = Bf16Linear(random(160, 96), random(160, seed=1)), random(70, 96, seed=2)
    expected = layer(x)
    with torch_threads(3):
        assert torch.equal(layer(x), expected)


@on_each_kernel
def test_weights_of_another_view_are_packed_as_they_are_seen() -> None:
    weight, x = random(96, 64), random(5, 96)
    assert torch.equal(Bf16Linear(weight.T, None)(x), Bf16Linear(weight.T.contiguous(), None)(x))


@pytest.mark.parametrize(
    "weight",
    [random(33, 32), random(32, 40), random(32, 32).float()],
    ids=["outputs", "inputs", "float32"],
)
def test_it_refuses_what_it_does_not_take(weight: torch.Tensor) -> None:
    assert not can_multiply(weight)
