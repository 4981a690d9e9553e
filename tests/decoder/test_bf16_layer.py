"""The small operations of a layer in bfloat16 against those of torch that they stand for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdepth.decoder import bf16_kernels
from specdepth.decoder.bf16_layer import rms_norm
from specdepth.decoder.lean_llama import _rotate_
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.threads import torch_threads

pytestmark = on_each_kernel


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def call(name: str, *arguments: torch.Tensor | int | float) -> None:
    """Run an operation of the layer, which by itself nobody calls but the layer."""
    function = getattr(bf16_kernels.load(), f"specdepth_bf16_{name}")
    function.restype = None
    function(*map(_as_c, arguments), _as_c(torch.get_num_threads()))


def _as_c(argument: torch.Tensor | int | float) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def gate(both: torch.Tensor) -> torch.Tensor:
    rows, width = both.shape
    out = both.new_empty(rows, width // 2)
    call("gate", both, rows, width // 2, out)
    return out


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
        got = rms_norm(x, weight, epsilon)
        assert_nearly_same(got, normed(x, weight, epsilon))
    assert torch.equal(rms_norm(torch.zeros_like(x), weight, 1e-5), torch.zeros_like(x))


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
    first, width = queries * dim, pool.shape[1]
    call(
        *("rotate", qkv, qkv.shape[1], cos, sin, rows, queries + kv, dim, first),
        *(pool, places, width),
    )
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
    gates, up = both.chunk(2, 1)
    assert_nearly_same(gate(both), F.silu(gates) * up)


def test_gates_that_an_exponential_cannot_hold() -> None:
    gates = torch.tensor([-1e4, -200, -90, -0.0, 0.0, 90, 200, 1e4] * 2).bfloat16()[None]
    got = gate(torch.cat([gates, torch.ones_like(gates)], 1))
    torch.testing.assert_close(got, F.silu(gates))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: rms_norm(x, random(64, seed=1), 1e-5),
        gate,
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
