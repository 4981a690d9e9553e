"""Calls `bf16_layer.c`, a decoder layer of Llama in one call: in torch the small operations of a layer alone
take a quarter of a round of few tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bf16_kernels
from .bf16_attention import HEAD_MULTIPLE, KernelPass
from .bf16_linear import Bf16Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Of one layer, and what it is."""

    input_norm: Tensor
    """[hidden] bfloat16, contiguous, as the other."""
    input_epsilon: float
    post_norm: Tensor
    post_epsilon: float
    qkv: Bf16Linear
    """Queries, keys and values of all heads."""
    out: Bf16Linear
    gate_up: Bf16Linear
    """Gates, then what they let through."""
    down: Bf16Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """A multiple of `HEAD_MULTIPLE`."""
    scale: float
    """Factor on attention scores."""


class _Linear(ctypes.Structure):
    """`Linear` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs")),
    )


_LINEARS = ("qkv", "out", "gate_up", "down")
_NUMBERS = ("input_epsilon", "post_epsilon", "scale")
_SIZES = ("num_heads", "num_kv_heads", "head_dim")


class _Layer(ctypes.Structure):
    """`Layer` of the C source."""

    _fields_ = (
        *((name, _Linear) for name in _LINEARS),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm")),
        *((name, ctypes.c_float) for name in _NUMBERS),
        *((name, ctypes.c_int64) for name in _SIZES),
    )


class LlamaLayerKernel:
    """`LlamaDecoderLayer` over a paged pool."""

    def __init__(self, weights: LayerWeights) -> None:
        assert weights.head_dim % HEAD_MULTIPLE == 0
        kernels = bf16_kernels.load()
        assert kernels is not None
        self._call = kernels.specdepth_bf16_layer
        self._weights = weights  # keeps the memory that the structure points at
        self._struct = _Layer(
            input_norm=weights.input_norm.data_ptr(),
            post_norm=weights.post_norm.data_ptr(),
            **{name: getattr(weights, name) for name in (*_NUMBERS, *_SIZES)},
        )
        for name in _LINEARS:
            linear: Bf16Linear = getattr(weights, name)
            setattr(self._struct, name, _Linear(*linear.pointers, *linear.shape))

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
        places: Tensor,
        tokens: KernelPass,
    ) -> Tensor:
        """Run the layer, and write the keys and values of its tokens into the pool.

        Args:
            x: [T, hidden] bfloat16, contiguous.
            cos: [T, 1, D] cosines, contiguous.
            sin: [T, 1, D] sines, the first half negative.
            pool: [blocks * B, keys and values of all heads] contiguous.
            places: int64 [T] place of each token in it.
            tokens: which sequences they are of.

        Returns:
            [T, hidden].

        Raises:
            MemoryError: no memory to work in.
        """
        out = torch.empty_like(x)
        failed = self._call(
            ctypes.byref(self._struct),
            tokens.pointer,
            x.data_ptr(),
            len(x),
            cos.data_ptr(),
            sin.data_ptr(),
            pool.data_ptr(),
            places.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("a decoder layer got no memory for its scratch space.")
        return out
