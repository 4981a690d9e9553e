"""CUDA graphs of the packed pass, one a bucket of tokens.

A 1B model launches some thousand kernels a pass; on a fast GPU the launches, not the weights, would set the
pass time and show a knee that is not there. A graph replays them in one launch, over buffers of fixed
size: a pass is padded to the next bucket, so its cost is a staircase, which the profiler sees.

Padding tokens write their KV to the scratch block that `PackedModel.allocate` adds, belong to no
sequence, and their logits are dropped.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention import PassLayout, VarlenLayout

if TYPE_CHECKING:
    from .models import PackedModel

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640)
WARM_UP_PASSES = 3


def bucket_of(num_tokens: int, buckets: Iterable[int]) -> int:
    """Smallest of the ascending `buckets` that holds so many tokens; 0 if none does."""
    return next((size for size in buckets if size >= num_tokens), 0)


class _Buffers:
    """Inputs of one graph at fixed addresses."""

    def __init__(
        self, model: PackedModel, size: int, num_seqs: int, width: int, max_q: int
    ) -> None:
        device = model.device
        scratch = model.layers[0].keys.shape[0] * model.block_size - 1
        self.scratch = scratch
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.layout = PassLayout(
            model.layers,
            torch.full((size,), scratch, dtype=torch.int64, device=device),
            [],
            VarlenLayout(
                torch.zeros(num_seqs + 1, dtype=torch.int32, device=device),
                None
                if model.backend == "varlen"
                else torch.zeros(num_seqs + 1, dtype=torch.int32, device=device),
                torch.zeros(num_seqs, dtype=torch.int32, device=device),
                torch.zeros(num_seqs, width, dtype=torch.int32, device=device),
                max_q,
                width * model.block_size,
            ),
        )

    def fill(self, token_ids: Tensor, positions: Tensor, layout: PassLayout) -> None:
        """Copy a pass in; what is left over becomes padding."""
        given, static = layout.varlen, self.layout.varlen
        assert given is not None
        assert static is not None
        count, seqs = len(token_ids), len(given.seqused_k)
        self.token_ids[:count].copy_(token_ids)
        self.positions[:count].copy_(positions)
        self.layout.write_index.fill_(self.scratch)
        self.layout.write_index[:count].copy_(layout.write_index)
        static.cu_seq_q.fill_(count)  # sequences beyond the batch are empty
        static.cu_seq_q[: seqs + 1].copy_(given.cu_seq_q)
        if static.cu_seq_k is not None and given.cu_seq_k is not None:
            static.cu_seq_k.copy_(given.cu_seq_k[-1].expand_as(static.cu_seq_k))
            static.cu_seq_k[: seqs + 1].copy_(given.cu_seq_k)
        static.seqused_k.zero_()
        static.seqused_k[:seqs].copy_(given.seqused_k)
        static.block_table[:seqs, : given.block_table.shape[1]].copy_(given.block_table)


class GraphedPass:
    """Replays the forward pass of one `PackedModel`.

    Args:
        model: on CUDA, with varlen attention, its pool allocated.
        forward: its eager pass, returning logits of every row.
        max_num_seqs: sequences in a pass.
        max_query: longest query of a sequence; passes with longer ones (prefill) run eagerly.
        max_model_len: longest sequence.
    """

    def __init__(
        self,
        model: PackedModel,
        forward: Callable[[Tensor, Tensor, PassLayout], Tensor],
        max_num_seqs: int,
        max_query: int,
        max_model_len: int,
    ) -> None:
        self._model, self._forward = model, forward
        self._most_tokens = max_num_seqs * max_query
        self._num_seqs, self._max_query = max_num_seqs, max_query
        self._width = -(-max_model_len // model.block_size)
        self._graphs: dict[int, tuple[_Buffers, torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def fits(self, num_tokens: int, layout: PassLayout) -> bool:
        """Whether a pass can be replayed."""
        varlen = layout.varlen
        return (
            varlen is not None
            and varlen.max_q <= self._max_query
            and len(varlen.seqused_k) <= self._num_seqs
            and bucket_of(num_tokens, self._graphs) > 0
        )

    def capture(self, token_ids: Tensor, positions: Tensor, layout: PassLayout) -> None:
        """Capture every bucket that rounds can need, with a small real pass as the example; none is
        captured later, inside a round that is being timed.
        """
        for size in TOKEN_BUCKETS[: bisect.bisect_left(TOKEN_BUCKETS, self._most_tokens) + 1]:
            if size >= len(token_ids):
                self._graphs[size] = self._capture(size, token_ids, positions, layout)

    def run(self, token_ids: Tensor, positions: Tensor, layout: PassLayout) -> Tensor:
        """Replay the pass of [T] tokens.

        Returns:
            [T, V] logits; a view that the next replay of this bucket overwrites.
        """
        buffers, graph, logits = self._graphs[bucket_of(len(token_ids), self._graphs)]
        buffers.fill(token_ids, positions, layout)
        graph.replay()
        return logits[: len(token_ids)]

    def _capture(
        self, size: int, token_ids: Tensor, positions: Tensor, layout: PassLayout
    ) -> tuple[_Buffers, torch.cuda.CUDAGraph, Tensor]:
        logger.info("capturing a CUDA graph of %d tokens", size)
        buffers = _Buffers(self._model, size, self._num_seqs, self._width, self._max_query)
        buffers.fill(token_ids, positions, layout)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_PASSES):
                self._forward(buffers.token_ids, buffers.positions, buffers.layout)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(buffers.token_ids, buffers.positions, buffers.layout)
        self._pool = self._pool or graph.pool()
        return buffers, graph, logits
