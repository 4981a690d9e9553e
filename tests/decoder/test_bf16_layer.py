"""The small operations of a layer in bfloat16 against those of torch that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from specdepth.decoder import bf16_layer
from specdepth.decoder.lean_llama import _rotate_
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.threads import torch_threads

pytestmark = on_each_kernel


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`LlamaRMSNorm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).bfloat16()


def assert_nearly_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same but for the last of 8 bits here and there, where rounding was a close call."""
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
    assert float((got == want).double().mean()) > 0.97


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("width", [16, 64, 576])
def test_the_norm(rows: int, width: int) -> None:
    x = random(rows, width) * torch.logspace(-6, 4, rows)[:, None].bfloat16()
    weight = random(width, seed=1)
    for epsilon in (1e-5, 1e-3):
        got = bf16_layer.norm(x, weight, epsilon)
        assert_nearly_same(got, normed(x, weight, epsilon))
    assert torch.equal(bf16_layer.norm(torch.zeros_like(x), weight, 1e-5), torch.zeros_like(x))


@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("rows", [1, 7])
def test_rotation_and_what_is_kept(rows: int, dim: int) -> None:
    queries, kv = 3, 2
    qkv = random(rows, (queries + 2 * kv) * dim)
    angles = torch.randn(rows, 1, dim // 2, generator=torch.Generator().manual_seed(1))
    cos = torch.cat([angles.cos(), angles.cos()], -1).bfloat16()
    sin = torch.cat([-angles.sin(), angles.sin()], -1).bfloat16()
    want, pool = qkv.clone(), torch.zeros(20, 2 * kv * dim, dtype=torch.bfloat16)
    _rotate_(want.view(rows, -1, dim)[:, : queries + kv], cos, sin)
    places = torch.arange(rows) * 2 + 3
    bf16_layer.rotate_and_keep(qkv, cos, sin, queries + kv, pool, places)
    assert_nearly_same(qkv, want)
    values = (queries + kv) * dim
    assert torch.equal(qkv[:, values:], want[:, values:])  # values are not rotated
    assert torch.equal(pool[places], qkv[:, queries * dim :])
    others = [i for i in range(20) if i not in places.tolist()]
    assert not pool[others].any()


@pytest.mark.parametrize("width", [16, 96, 1536])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_gate(rows: int, width: int) -> None:
    both = 4 * random(rows, 2 * width)
    gate, up = both.chunk(2, 1)
    assert_nearly_same(bf16_layer.gate(both), F.silu(gate) * up)


def test_gates_that_an_exponential_cannot_hold() -> None:
    gate = torch.tensor([-1e4, -200, -90, -0.0, 0.0, 90, 200, 1e4] * 2).bfloat16()[None]
    got = bf16_layer.gate(torch.cat([gate, torch.ones_like(gate)], 1))
    torch.testing.assert_close(got, F.silu(gate))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: bf16_layer.norm(x, random(64, seed=1), 1e-5),
        lambda x: bf16_layer.gate(x),
    ],
    ids=["norm", "gate"],
)
def test_a_row_is_the_same_among_others_and_with_threads(
    run: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = random(40, 64)
    expected = torch.cat([run(x[i : i + 1]) for i in range(40)])
    assert torch.equal(run(x), expected)
    with torch_threads(3):
        assert torch.equal(run(x), expected)


def test_what_it_takes() -> None:
    assert bf16_layer.can_run(random(64))
    assert not bf16_layer.can_run(random(24))
    assert not bf16_layer.can_run(random(64).float())
