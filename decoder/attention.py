"""Paged attention over a packed row of ragged queries, plugged into transformers' own models.

One pass holds the query tokens of N sequences back to back in a row of T tokens. Linear layers never
see padding; only this function knows where a sequence begins. It writes K and V of the new tokens into
the paged pool and attends per sequence over the pool: `varlen_attn` with a block table on CUDA (fp16,
bf16), a kernel of our own on CPUs with AMX or AVX-512 (bf16), SDPA over groups of neighbouring sequences
elsewhere.

Legend: T tokens in the row, N sequences, Q queries and L keys of a group, H query heads, J key/value heads,
D and Dv head sizes, B block size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specdepth.scheduler.state import Ints

from .bf16_attention import KernelPass
from .packing import Spans, pack

Backend = Literal["sdpa", "bf16-kernel", "varlen", "varlen-with-cu-seq-k"]
"""Grouped SDPA, `bf16_attention`, or `varlen_attn` in the two ways in which its builds want to be called."""

PAGE_SIZE: dict[Backend, int] = {
    "sdpa": 16,
    "bf16-kernel": 16,
    "varlen": 256,
    "varlen-with-cu-seq-k": 256,
}
"""Default tokens a block; FlashAttention 2 takes multiples of 256 only."""

IMPLEMENTATION = "specdepth_paged"
"""Name under which transformers knows `paged_attention`. No mask function is registered with it, so
transformers builds no mask."""

GROUP_COST = 1000
"""What one more SDPA call costs, in pairs of a query and a key that it need not look at (measured on CPU)."""


@dataclass(slots=True)
class LayerKV:
    """Paged keys [blocks, B, J, D] and values [blocks, B, J, Dv] of one layer."""

    keys: Tensor
    values: Tensor
    pool: Tensor | None = None
    """[blocks, B, J * D + J * Dv] both, where they lie side by side: one token's K, then its V."""
    rows: Tensor | None = None
    """[blocks * B, J * D + J * Dv] the same."""

    @classmethod
    def side_by_side(cls, pool: Tensor, num_heads: int, key_dim: int) -> LayerKV:
        """View `pool` [blocks, B, J * (D + Dv)] as keys and values."""
        split = num_heads * key_dim
        return cls(
            pool[..., :split].view(*pool.shape[:2], num_heads, -1),
            pool[..., split:].view(*pool.shape[:2], num_heads, -1),
            pool,
            pool.flatten(0, 1),
        )


@dataclass(slots=True)
class QueryGroup:
    """Neighbours in the packed row that share one SDPA call: their keys are laid end to end, and a mask
    keeps each to its own. Nothing is padded.
    """

    start: int
    """First row of the packed row."""
    stop: int
    blocks: Tensor
    """[blocks] ids of the blocks of all."""
    query_sequence: Tensor
    """[Q] which of the group each query belongs to."""
    query_positions: Tensor
    """[Q] position of each query in its sequence."""
    key_sequence: Tensor
    """[L]"""
    key_positions: Tensor
    """[L] position of each key in its sequence."""
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [Q * repeats, L], built once a pass and shared by its layers."""
        key = (window, repeats)
        if key not in self.masks:
            query = self.query_positions[:, None]
            seen = (self.key_positions <= query) & (
                self.key_sequence == self.query_sequence[:, None]
            )
            if window is not None:
                seen &= self.key_positions > query - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask.masked_fill_(~seen, float("-inf"))
            self.masks[key] = mask.repeat_interleave(repeats, 0)
        return self.masks[key]


@dataclass(slots=True)
class VarlenLayout:
    """Arguments of `varlen_attn`."""

    cu_seq_q: Tensor
    """[N + 1] int32."""
    cu_seq_k: Tensor | None
    """[N + 1] int32; without meaning beside a block table, but some builds of the kernel want it."""
    seqused_k: Tensor
    """[N] int32 context lengths, this pass included."""
    block_table: Tensor
    """[N, blocks] int32."""
    max_q: int
    max_k: int


@dataclass(slots=True)
class PassLayout:
    """Where the tokens of one pass live; made once, used by every layer."""

    layers: list[LayerKV]
    write_index: Tensor
    """[T] flat row of the pool (block * B + offset) of each token."""
    groups: list[QueryGroup]
    """Of SDPA; the other two do not need them."""
    varlen: VarlenLayout | None = None
    kernel: KernelPass | None = None


def plan_groups(query_lens: Ints, context_lens: Ints) -> list[tuple[int, int]]:
    """Split sequences into runs that one SDPA call serves.

    A run ends where the queries of the next sequence with the keys before it, and the other way
    round, would cost more than a call.

    Args:
        query_lens: [N] tokens of each sequence in the pass.
        context_lens: [N] keys that it sees.

    Returns:
        First sequence of each run and the one behind its last; together 0..N-1.
    """
    bounds: list[int] = []
    queries = keys = 0
    for at, (q, k) in enumerate(zip(query_lens.tolist(), context_lens.tolist(), strict=True)):
        if at == 0 or queries * k + q * keys > GROUP_COST:
            bounds.append(at)
            queries = keys = 0
        queries, keys = queries + q, keys + k
    return list(itertools.pairwise([*bounds, len(query_lens)]))


def build_layout(
    layers: list[LayerKV],
    tables: NDArray[np.int32],
    starts: Ints,
    query_lens: Ints,
    block_size: int,
    device: torch.device,
    backend: Backend,
) -> PassLayout:
    """Lay out a pass of N sequences.

    Args:
        layers: paged K and V of each layer.
        tables: [N, W] block ids of each sequence.
        starts: [N] position of the first query of each sequence; its keys before that are in the pool.
        query_lens: [N] queries of each sequence, at least 1.
        block_size: tokens a block.
        device: where the pass runs.
        backend: which attention will run.
    """
    context_lens = starts + query_lens
    spans = pack(starts, query_lens)
    sequence, positions = spans.sequence, spans.positions
    block = tables[sequence, positions // block_size].astype(np.int64)
    write_index = torch.from_numpy(block * block_size + positions % block_size).to(device)
    if backend == "bf16-kernel":
        kernel = KernelPass(tables, starts, query_lens, block_size)
        return PassLayout(layers, write_index, [], kernel=kernel)
    if backend != "sdpa":
        width = -(-int(context_lens.max()) // block_size)
        cu = np.concatenate([[0], spans.ends]).astype(np.int32)
        cu_k = np.concatenate([[0], np.cumsum(context_lens)]).astype(np.int32)
        varlen = VarlenLayout(
            torch.from_numpy(cu).to(device),
            None if backend == "varlen" else torch.from_numpy(cu_k).to(device),
            torch.from_numpy(context_lens.astype(np.int32)).to(device),
            torch.from_numpy(np.ascontiguousarray(tables[:, :width])).to(device),
            int(query_lens.max()),
            int(context_lens.max()),
        )
        return PassLayout(layers, write_index, [], varlen)
    groups = [
        _build_group(slice(*run), tables, spans, context_lens, block_size, device)
        for run in plan_groups(query_lens, context_lens)
    ]
    return PassLayout(layers, write_index, groups)


def _build_group(
    members: slice,
    tables: NDArray[np.int32],
    spans: Spans,
    context_lens: Ints,
    block_size: int,
    device: torch.device,
) -> QueryGroup:
    num_blocks = -(-context_lens[members] // block_size)
    of_block = np.repeat(np.arange(len(num_blocks)), num_blocks)
    column = np.arange(len(of_block)) - (np.cumsum(num_blocks) - num_blocks)[of_block]
    key_positions = column[:, None] * block_size + np.arange(block_size)
    stop = int(spans.ends[members][-1])
    start = stop - int(spans.lengths[members].sum())
    return QueryGroup(
        start=start,
        stop=stop,
        blocks=torch.from_numpy(tables[members][of_block, column].astype(np.int64)).to(device),
        query_sequence=torch.from_numpy(spans.sequence[start:stop] - members.start).to(device),
        query_positions=torch.from_numpy(spans.positions[start:stop]).to(device),
        key_sequence=torch.from_numpy(np.repeat(of_block, block_size)).to(device),
        key_positions=torch.from_numpy(key_positions.reshape(-1)).to(device),
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    layout: PassLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' convention.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [1, H, T, D] packed row.
        key: [1, J, T, D].
        value: [1, J, T, Dv].
        attention_mask: always None, see `IMPLEMENTATION`.
        layout: where the tokens live, from the `layout` keyword of the model's forward.
        scaling: factor on scores; None is D ** -0.5.
        sliding_window: a query sees this many last keys, itself included.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        **_: what else a model hands its attention; `models.probe_attention` has vetted it.

    Returns:
        [1, T, H, Dv] and None (no weights).
    """
    layer = layout.layers[module.layer_idx]  # type: ignore[index]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if layer.rows is None:
        layer.keys.flatten(0, 1).index_copy_(0, layout.write_index, keys)
        layer.values.flatten(0, 1).index_copy_(0, layout.write_index, values)
    else:
        new = torch.cat([keys.flatten(1), values.flatten(1)], 1)
        layer.rows.index_copy_(0, layout.write_index, new)
    rows = query[0].transpose(0, 1)  # [T, H, D]
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.varlen is not None:
        return _varlen(rows, layer, layout.varlen, scale, sliding_window).unsqueeze(0), None
    return attend(rows, layer, layout, scale, sliding_window, softcap).unsqueeze(0), None


def attend(
    rows: Tensor,
    layer: LayerKV,
    layout: PassLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the packed row on a CPU; K and V of the pass are in the pool.

    Args:
        rows: [T, H, D] queries.
        layer: where keys and values are.
        layout: where the tokens live.
        scale: factor on scores.
        window: see `paged_attention`.
        softcap: see `paged_attention`.

    Returns:
        [T, H, Dv].
    """
    if layout.kernel is not None:
        assert layer.pool is not None
        return layout.kernel.attend(rows, layer.pool, scale, window)
    num_tokens, num_heads, head_dim = rows.shape
    kv_heads = layer.keys.shape[2]
    repeats = num_heads // kv_heads
    # Query heads that share a KV head are folded into the query axis, so K and V are never repeated.
    rows = rows.view(num_tokens, kv_heads, repeats, head_dim).transpose(1, 2)
    folded = rows.reshape(1, num_tokens * repeats, kv_heads, head_dim).transpose(1, 2)
    parts = []
    for group in layout.groups:
        queries = folded.narrow(2, group.start * repeats, (group.stop - group.start) * repeats)
        keys, values = _gather(layer, group.blocks)
        mask = group.mask(window, repeats, rows.dtype)
        if softcap is None:
            part = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scale
            )
        else:
            scores = torch.tanh(queries @ keys.transpose(2, 3) * (scale / softcap)) * softcap + mask
            wide = torch.promote_types(scores.dtype, torch.float32)
            part = torch.softmax(scores, -1, dtype=wide).to(values.dtype) @ values
        parts.append(part.transpose(1, 2))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # [1, T * repeats, J, Dv]
    out = out.view(num_tokens, repeats, kv_heads, -1).transpose(1, 2)
    return out.reshape(num_tokens, num_heads, -1)


def _gather(layer: LayerKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [1, J, L, D] and values [1, J, L, Dv] in `blocks`; one view each, since small passes are
    bound by the number of calls.
    """
    block_size, kv_heads, key_dim = layer.keys.shape[1:]
    value_dim, num_keys = layer.values.shape[3], len(blocks) * block_size
    if layer.pool is None:
        keys, values = (part.index_select(0, blocks) for part in (layer.keys, layer.values))
        key_width, value_width, first_value = kv_heads * key_dim, kv_heads * value_dim, 0
    else:
        keys = values = layer.pool.index_select(0, blocks)
        first_value = kv_heads * key_dim
        key_width = value_width = first_value + kv_heads * value_dim
    return (
        keys.as_strided((1, kv_heads, num_keys, key_dim), (0, key_dim, key_width, 1)),
        values.as_strided(
            (1, kv_heads, num_keys, value_dim), (0, value_dim, value_width, 1), first_value
        ),
    )


def _varlen(
    rows: Tensor, layer: LayerKV, layout: VarlenLayout, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        rows.contiguous(),
        layer.keys,
        layer.values,
        layout.cu_seq_q,
        layout.cu_seq_k,
        layout.max_q,
        layout.max_k,
        scale=scale,
        # (W, 0) lets a query see W keys to its left besides its own.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=rows.shape[1] != layer.keys.shape[2],
        seqused_k=layout.seqused_k,
        block_table=layout.block_table,
        # One split gives the same bits in every batch. With splits of its own choice FlashAttention 2
        # mixes up packed paged rows (pytorch issue 194167).
        num_splits=1,
    )
    assert isinstance(result, Tensor)
    return result


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
