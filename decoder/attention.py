"""Paged attention over a packed row of ragged queries, plugged into transformers' own models.

One pass holds the query tokens of N sequences back to back in a row of T tokens. Linear layers never
see padding; only this function knows where a sequence begins. It writes K and V of the new tokens into
the paged pool and attends per sequence over the pool: `varlen_attn` with a block table on CUDA (fp16,
bf16), SDPA over groups of similar sequences elsewhere.

Legend: T tokens in the row, N sequences, G sequences in a group, Q queries a sequence (padded within a
group), L keys (padded), H query heads, J key/value heads, D head size, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specdepth.scheduler.state import Ints

Backend = Literal["sdpa", "varlen", "varlen-with-cu-seq-k"]
"""Grouped SDPA, or `varlen_attn` in the two ways in which its builds want to be called."""

PAGE_SIZE: dict[Backend, int] = {"sdpa": 16, "varlen": 256, "varlen-with-cu-seq-k": 256}
"""Default tokens a block; FlashAttention 2 takes multiples of 256 only."""

IMPLEMENTATION = "specdepth_paged"
"""Name under which transformers knows `paged_attention`. No mask function is registered with it, so
transformers builds no mask."""

KEY_COST = 4
"""Gathering a key from the pool costs as much as so many queries that attend to it (measured on CPU)."""
GROUP_COST = 2000
"""What one more SDPA call costs, in queries times keys: some 40 us a layer on the same CPU."""


@dataclass(slots=True)
class LayerKV:
    """Paged keys [blocks, B, J, D] and values [blocks, B, J, Dv] of one layer."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class QueryGroup:
    """Sequences that share one SDPA call."""

    gather: Tensor
    """[G * Q] rows of the packed row, padding repeats a real row."""
    scatter: Tensor | None
    """[real rows] indices into G * Q that are no padding; None if all are."""
    rows: Tensor
    """[real rows] where they go in the packed row."""
    blocks: Tensor
    """[G * nb] block ids."""
    query_positions: Tensor
    """[G, Q] position of each query in its sequence."""
    size: int
    num_queries: int
    num_keys: int
    needs_mask: bool
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [G, 1, repeats * Q, L], built once a pass and shared by its layers."""
        if not self.needs_mask and window is None:
            return None
        key = (window, repeats)
        if key not in self.masks:
            key_positions = torch.arange(self.num_keys, device=self.rows.device)
            query = self.query_positions[:, :, None]
            seen = key_positions <= query
            if window is not None:
                seen &= key_positions > query - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask.masked_fill_(~seen, float("-inf"))
            self.masks[key] = mask.repeat(1, repeats, 1).unsqueeze(1)
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
    varlen: VarlenLayout | None = None


def plan_groups(query_lens: Ints, context_lens: Ints) -> list[Ints]:
    """Split sequences into groups that one SDPA call serves with little padding.

    Sequences are sorted by (queries, context); a new group starts where padding the next sequence
    into the current one would cost more than a call.

    Args:
        query_lens: [N] tokens of each sequence in the pass.
        context_lens: [N] keys that it sees.

    Returns:
        Index arrays that partition 0..N-1.
    """
    order = np.lexsort((context_lens, query_lens))
    groups: list[Ints] = []
    start, waste, top_q, top_k, work = 0, 0, 0, 0, 0
    for at, index in enumerate(order.tolist()):
        q, k = int(query_lens[index]) + KEY_COST, int(context_lens[index])
        new_q, new_k, new_work = max(top_q, q), max(top_k, k), work + q * k
        new_waste = (at - start + 1) * new_q * new_k - new_work
        if at > start and new_waste - waste > GROUP_COST:
            groups.append(order[start:at])
            start, waste, top_q, top_k, work = at, 0, q, k, q * k
        else:
            waste, top_q, top_k, work = new_waste, new_q, new_k, new_work
    if len(order):
        groups.append(order[start:])
    return groups


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
    ends = np.cumsum(query_lens)
    firsts = ends - query_lens
    sequence = np.repeat(np.arange(len(starts)), query_lens)
    positions = np.arange(int(ends[-1])) - firsts[sequence] + starts[sequence]
    block = tables[sequence, positions // block_size].astype(np.int64)
    write_index = torch.from_numpy(block * block_size + positions % block_size).to(device)
    if backend != "sdpa":
        width = -(-int(context_lens.max()) // block_size)
        cu = np.concatenate([[0], ends]).astype(np.int32)
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
        _build_group(members, tables, starts, firsts, query_lens, context_lens, block_size, device)
        for members in plan_groups(query_lens, context_lens)
    ]
    return PassLayout(layers, write_index, groups)


def _build_group(
    members: Ints,
    tables: NDArray[np.int32],
    starts: Ints,
    firsts: Ints,
    query_lens: Ints,
    context_lens: Ints,
    block_size: int,
    device: torch.device,
) -> QueryGroup:
    lens, contexts = query_lens[members], context_lens[members]
    num_queries, num_blocks = int(lens.max()), -(-int(contexts.max()) // block_size)
    num_keys = num_blocks * block_size
    offset = np.minimum(np.arange(num_queries), lens[:, None] - 1)
    gather = (firsts[members][:, None] + offset).reshape(-1)
    real = (np.arange(num_queries) < lens[:, None]).reshape(-1)
    # A block beyond a sequence's own table would be a stranger's memory: read block 0, masked anyway.
    owned = np.arange(num_blocks) < -(-contexts // block_size)[:, None]
    blocks = np.where(owned, tables[members, :num_blocks], 0)
    needs_mask = num_queries > 1 or bool((contexts != num_keys).any())
    everything = bool(real.all())
    return QueryGroup(
        gather=torch.from_numpy(gather).to(device),
        scatter=None if everything else torch.from_numpy(np.flatnonzero(real)).to(device),
        rows=torch.from_numpy(gather[real]).to(device),
        blocks=torch.from_numpy(blocks.astype(np.int64).reshape(-1)).to(device),
        query_positions=torch.from_numpy(starts[members][:, None] + offset).to(device),
        size=len(members),
        num_queries=num_queries,
        num_keys=num_keys,
        needs_mask=needs_mask,
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
    layer.keys.flatten(0, 1).index_copy_(0, layout.write_index, key[0].transpose(0, 1))
    layer.values.flatten(0, 1).index_copy_(0, layout.write_index, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)  # [T, H, D]
    scale = rows.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.varlen is not None:
        return _varlen(rows, layer, layout.varlen, scale, sliding_window).unsqueeze(0), None
    out = rows.new_empty(rows.shape[0], rows.shape[1], layer.values.shape[-1])
    for group in layout.groups:
        _attend_group(rows, layer, group, scale, sliding_window, softcap, out)
    return out.unsqueeze(0), None


def _attend_group(
    rows: Tensor,
    layer: LayerKV,
    group: QueryGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> None:
    size, num_queries = group.size, group.num_queries
    kv_heads, head_dim = layer.keys.shape[2:]
    value_dim = layer.values.shape[-1]
    repeats = rows.shape[1] // kv_heads
    keys = layer.keys.index_select(0, group.blocks)
    keys = keys.view(size, -1, kv_heads, head_dim).transpose(1, 2)  # [G, J, L, D]
    values = layer.values.index_select(0, group.blocks)
    values = values.view(size, -1, kv_heads, value_dim).transpose(1, 2)
    # Query heads that share a KV head are folded into the query axis, so K and V are never repeated.
    queries = rows.index_select(0, group.gather).view(
        size, num_queries, kv_heads, repeats, head_dim
    )
    queries = queries.permute(0, 2, 3, 1, 4).reshape(
        size, kv_heads, repeats * num_queries, head_dim
    )
    mask = group.mask(window, repeats, rows.dtype)
    if softcap is None:
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(queries @ keys.transpose(2, 3) * (scale / softcap)) * softcap
        scores = scores if mask is None else scores + mask
        result = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
        result = result.to(values.dtype) @ values
    result = result.view(size, kv_heads, repeats, num_queries, value_dim).permute(0, 3, 1, 2, 4)
    flat = result.reshape(size * num_queries, kv_heads * repeats, value_dim)
    if group.scatter is not None:
        flat = flat.index_select(0, group.scatter)
    out.index_copy_(0, group.rows, flat)


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
