"""The attention kernel against attention from its definition, and against itself in other company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdepth.decoder.attention import LayerKV, attend, build_layout
from specdepth.decoder.models import PackedModel
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.threads import torch_threads
from tests.decoder.tiny import tiny_llama

CPU = torch.device("cpu")


@dataclass
class Case:
    """A packed pass over a filled pool."""

    rows: torch.Tensor
    layer: LayerKV
    tables: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    block_size: int

    def run(self, window: int | None = None, members: list[int] | None = None) -> torch.Tensor:
        """Attention of all sequences, or of some by themselves."""
        chosen = list(range(len(self.lens))) if members is None else members
        ends = np.cumsum(self.lens)
        rows = torch.cat([self.rows[ends[i] - self.lens[i] : ends[i]] for i in chosen])
        layout = self.layout(chosen, "bf16-kernel")
        return attend(rows, self.layer, layout, self.scale, window)

    def layout(self, chosen: list[int], backend: Any) -> Any:
        parts = (self.tables[chosen], self.starts[chosen], self.lens[chosen])
        return build_layout([self.layer], *parts, self.block_size, CPU, backend)

    @property
    def scale(self) -> float:
        return float(self.rows.shape[-1] ** -0.5)

    def exact(self, window: int | None = None) -> torch.Tensor:
        """The same in float64, from bfloat16 keys and values."""
        wide = LayerKV(self.layer.keys.double(), self.layer.values.double())
        layout = self.layout(list(range(len(self.lens))), "sdpa")
        return attend(self.rows.double(), wide, layout, self.scale, window)


def case(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> Case:
    """Sequences of (queries, keys before them) in blocks in random order, strangers' keys around."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    lens, starts = (np.array(part, np.int64) for part in zip(*shapes, strict=True))
    width = -(-int((lens + starts).max()) // block_size)
    num_blocks = width * len(shapes)
    num_heads, kv_heads = heads
    shape = (num_blocks + 1, block_size, 2 * kv_heads * dim)
    pool = (3 * torch.randn(*shape, generator=generator)).bfloat16()
    rows = torch.randn(int(lens.sum()), num_heads, dim, generator=generator).bfloat16()
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(len(shapes), width)
    layer = LayerKV.side_by_side(pool, kv_heads, dim)
    return Case(rows, layer, tables, starts, lens, block_size)


@on_each_kernel
@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (8, 1), (32, 2)]),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48]),
    window=st.none() | st.integers(1, 300),
    seed=st.integers(0, 999),
)
@example([(1, 255)], (9, 3), 64, 16, None, 0)  # a whole chunk of keys
@example([(1, 256)], (9, 3), 64, 16, None, 0)  # and one key more
@example([(300, 0)], (9, 3), 64, 16, None, 0)  # more queries than go through the keys together
@example([(1, 700)], (9, 3), 64, 16, 1, 0)  # all chunks but the last are out of sight
def test_it_equals_attention_by_definition(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    one = case(shapes, heads, dim, block_size, seed)
    error = one.run(window).double() - one.exact(window)
    # Shares and results are rounded to 8 bits; values are about 3, and scores spread widely.
    assert float(error.abs().max()) < 0.1
    assert float(error.pow(2).mean().sqrt()) < 0.02


@on_each_kernel
@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 600)), min_size=2, max_size=6),
    window=st.none() | st.integers(1, 300),
    seed=st.integers(0, 999),
)
def test_a_sequence_gets_the_same_bits_in_any_company(
    shapes: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    one = case(shapes, seed=seed)
    together = one.run(window)
    alone = [one.run(window, [i]) for i in range(len(shapes))]
    assert torch.equal(together, torch.cat(alone))


@on_each_kernel
@pytest.mark.parametrize("window", [None, 5, 130])
@pytest.mark.parametrize("start", [0, 3, 250, 511])
def test_a_query_gets_the_same_bits_at_any_depth(start: int, window: int | None) -> None:
    whole = case([(17, start)])
    expected = whole.run(window)
    for count in range(1, 17):
        part = Case(
            whole.rows[:count],
            whole.layer,
            whole.tables,
            whole.starts,
            np.array([count]),
            whole.block_size,
        )
        assert torch.equal(part.run(window), expected[:count])
        rest = Case(
            whole.rows[count:],
            whole.layer,
            whole.tables,
            whole.starts + count,
            np.array([17 - count]),
            whole.block_size,
        )
        assert torch.equal(rest.run(window), expected[count:])


@on_each_kernel
def test_threads_change_nothing() -> None:
    one = case([(9, 300), (1, 40), (300, 10), (17, 500)])
    expected = one.run()
    with torch_threads(3):
        assert torch.equal(one.run(), expected)


@on_each_kernel
def test_queries_may_lie_anyhow() -> None:
    one = case([(5, 70)])
    expected = one.run()
    joint = torch.zeros(
        5, 15, 64, dtype=torch.bfloat16
    )  # queries beside keys, as projections give them
    joint[:, :9] = one.rows
    one.rows = joint[:, :9]
    assert torch.equal(one.run(), expected)
    one.rows = one.rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(one.run(), expected)


@on_each_kernel
def test_scores_that_overflow_an_exponential() -> None:
    one = case([(3, 400)])
    assert one.layer.pool is not None
    one.layer.pool.mul_(100)
    got = one.run()
    assert torch.isfinite(got).all()
    assert float((got.double() - one.exact()).abs().max()) < 10  # of 1,000: one key takes all


@on_each_kernel
def test_a_model_takes_it_where_it_fits() -> None:
    wide: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    assert PackedModel(tiny_llama(dtype=torch.bfloat16, **wide)).backend == "bf16-kernel"
    assert PackedModel(tiny_llama(dtype=torch.float32, **wide)).backend == "sdpa"
    assert PackedModel(tiny_llama(dtype=torch.bfloat16)).backend == "sdpa"  # heads of 8


@on_each_kernel
def test_blocks_of_another_size_take_the_other_attention() -> None:
    wide: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    model = PackedModel(tiny_llama(dtype=torch.bfloat16, **wide))
    one = (np.zeros((1, 1), np.int32), np.zeros(1, np.int64), np.ones(1, np.int64))
    for block_size in (8, 16, 24, 32):
        model.allocate(2, block_size)
        assert (model.layout(*one).kernel is None) == (block_size % 16 > 0)
