"""Grouped paged attention against dense attention, and the plan that makes the groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.attention import LayerKV, build_layout, paged_attention, plan_groups

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=7)


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One sequence, head by head, from the definition: query [Q, H, D], keys [L, J, D]."""
    num_queries, num_heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    out = torch.zeros(num_queries, num_heads, values.shape[-1], dtype=query.dtype)
    for q in range(num_queries):
        position = length - num_queries + q
        first = 0 if window is None else max(position - window + 1, 0)
        seen = slice(first, position + 1)
        for head in range(num_heads):
            group = head // (num_heads // kv_heads)
            scores = keys[seen, group] @ query[q, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[q, head] = torch.softmax(scores, 0) @ values[seen, group]
    return out


@settings(max_examples=60)
@given(
    shapes=lengths,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    dims=st.sampled_from([(4, 4), (4, 6)]),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.floats(0.5, 5),
    block_size=st.sampled_from([1, 3, 4]),
    side_by_side=st.booleans(),
    seed=st.integers(0, 999),
)
def test_it_equals_dense_attention_for_any_ragged_batch(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    block_size: int,
    side_by_side: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    queries = np.array([q for q, _ in shapes])
    starts = np.array([before for _, before in shapes])
    contexts = starts + queries
    (num_heads, kv_heads), (key_dim, value_dim) = heads, dims
    width = -(-int(contexts.max()) // block_size)
    num_blocks = len(shapes) * width

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tables = rng.permutation(num_blocks).astype(np.int32).reshape(len(shapes), width)
    # What the pool held before must not matter: strangers' keys, and a block past each context.
    if side_by_side:
        pool = 10 * random(num_blocks + 1, block_size, kv_heads * (key_dim + value_dim))
        layer = LayerKV.side_by_side(pool, kv_heads, key_dim)
    else:
        layer = LayerKV(
            10 * random(num_blocks + 1, block_size, kv_heads, key_dim),
            10 * random(num_blocks + 1, block_size, kv_heads, value_dim),
        )
    keys = [random(int(n), kv_heads, key_dim) for n in contexts]
    values = [random(int(n), kv_heads, value_dim) for n in contexts]
    for table, start, key, value in zip(tables, starts, keys, values, strict=True):
        for position in range(start):  # computed in earlier passes
            at = int(table[position // block_size]), position % block_size
            layer.keys[at], layer.values[at] = key[position], value[position]
    rows = [random(int(q), num_heads, key_dim) for q in queries]
    layout = build_layout(
        [layer], tables, starts, queries, block_size, torch.device("cpu"), backend="sdpa"
    )
    module: Any = SimpleNamespace(layer_idx=0)
    new_keys = torch.cat([key[start:] for key, start in zip(keys, starts, strict=True)])
    new_values = torch.cat([value[start:] for value, start in zip(values, starts, strict=True)])
    got, weights = paged_attention(
        module,
        torch.cat(rows).transpose(0, 1)[None],
        new_keys.transpose(0, 1)[None],
        new_values.transpose(0, 1)[None],
        layout=layout,
        scaling=0.7,
        sliding_window=window,
        softcap=softcap,
    )
    assert weights is None
    wanted = torch.cat(
        [dense(*each, 0.7, window, softcap) for each in zip(rows, keys, values, strict=True)]
    )
    torch.testing.assert_close(got[0], wanted, rtol=1e-9, atol=1e-9)
    for table, key in zip(tables, keys, strict=True):  # this pass's keys are in the pool
        stored = layer.keys[table.astype(np.int64)].flatten(0, 1)[: len(key)]
        torch.testing.assert_close(stored, key, rtol=0, atol=0)


def test_the_default_scale_is_one_over_the_root_of_the_head_size() -> None:
    generator = torch.Generator().manual_seed(0)
    key, value, query = (
        torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    results = []
    for scaling in (None, 0.5):
        layer = LayerKV(torch.zeros(2, 4, 2, 4).double(), torch.zeros(2, 4, 2, 4).double())
        layout = build_layout(
            [layer],
            np.zeros((1, 1), np.int32),
            np.array([0]),
            np.array([3]),
            4,
            torch.device("cpu"),
            backend="sdpa",
        )
        module: Any = SimpleNamespace(layer_idx=0)
        results.append(
            paged_attention(module, query, key, value, layout=layout, scaling=scaling)[0]
        )
    torch.testing.assert_close(results[0], results[1])


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3000)), min_size=1, max_size=40))
def test_groups_are_runs_that_cover_all(shapes: list[tuple[int, int]]) -> None:
    queries = np.array([q for q, _ in shapes], np.int64)
    contexts = queries + np.array([before for _, before in shapes], np.int64)
    groups = plan_groups(queries, contexts)
    members = [i for start, stop in groups for i in range(start, stop)]
    assert members == list(range(len(shapes)))
    assert all(start < stop for start, stop in groups)


def test_sequences_share_a_call_while_strange_keys_cost_less_than_a_call() -> None:
    # A sequence with one query and 150 keys beside n like it: 2 * 150 * n strange pairs, at most 1000.
    ones = np.ones(8, np.int64)
    assert plan_groups(ones, 150 * ones) == [(0, 4), (4, 8)]
    # 20 queries and 150 keys: 2 * 20 * 150 are too many.
    assert plan_groups(20 * ones[:2], 150 * ones[:2]) == [(0, 1), (1, 2)]


def test_a_long_prompt_has_a_call_of_its_own() -> None:
    groups = plan_groups(np.array([1, 1, 500, 1]), np.array([150, 150, 500, 150]))
    assert groups == [(0, 2), (2, 3), (3, 4)]
