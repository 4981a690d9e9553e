"""Calls `bf16_layer.c`, a decoder layer of Llama or of EAGLE-3 in one call: in torch the small operations of
a layer alone take a quarter of a round of few tokens, and half of a pass of the draft model.
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
    beside_norm: Tensor | None = None
    """Of what the projections see before the input: in EAGLE-3 the embeddings, the input being states."""
    beside_epsilon: float = 0.0
    qkv: Bf16Linear | None
    """Queries, keys and values of all heads; None, as of the others, where the kernel does not take it."""
    out: Bf16Linear | None
    gate_up: Bf16Linear | None
    """Gates, then what they let through."""
    down: Bf16Linear | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on attention scores."""

    @property
    def fit(self) -> bool:
        """Whether the kernel takes all of them."""
        linears = (self.qkv, self.out, self.gate_up, self.down)
        fit = None not in linears and self.head_dim % HEAD_MULTIPLE == 0
        return fit and self.input_norm.dtype == torch.bfloat16


class _Linear(ctypes.Structure):
    """`Linear` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs")),
    )


_LINEARS = ("qkv", "out", "gate_up", "down")
_NUMBERS = ("input_epsilon", "post_epsilon", "beside_epsilon", "scale")
_SIZES = ("num_heads", "num_kv_heads", "head_dim")


class _Layer(ctypes.Structure):
    """`Layer` of the C source."""

    _fields_ = (
        *((name, _Linear) for name in _LINEARS),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "beside_norm")),
        *((name, ctypes.c_float) for name in _NUMBERS),
        *((name, ctypes.c_int64) for name in _SIZES),
    )


class LayerKernel:
    """`LlamaDecoderLayer` or `EagleLayer` over a paged pool, for weights that fit."""

    def __init__(self, weights: LayerWeights) -> None:
        assert weights.fit
        kernels = bf16_kernels.load()
        assert kernels is not None
        self._call = kernels.specdepth_bf16_layer
        self._weights = weights  # keeps the memory that the structure points at
        self._struct = _Layer(
            input_norm=weights.input_norm.data_ptr(),
            post_norm=weights.post_norm.data_ptr(),
            beside_norm=None if weights.beside_norm is None else weights.beside_norm.data_ptr(),
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
        beside: Tensor | None = None,
    ) -> Tensor:
        """Run the layer, and write the keys and values of its tokens into the pool.

        Args:
            x: [T, hidden] bfloat16, contiguous.
            cos: [T, 1, D] cosines, contiguous.
            sin: [T, 1, D] sines, the first half negative.
            pool: [blocks * B, keys and values of all heads] contiguous.
            places: int64 [T] place of each token in it.
            tokens: which sequences they are of.
            beside: [T, hidden] as x, where there are weights for it.

        Returns:
            [T, hidden].

        Raises:
            MemoryError: no memory to work in.
        """
        assert (beside is None) == (self._weights.beside_norm is None)
        out = torch.empty_like(x)
        failed = self._call(
            ctypes.byref(self._struct),
            tokens.pointer,
            x.data_ptr(),
            None if beside is None else beside.data_ptr(),
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


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Rows [T, hidden] bfloat16, contiguous, over their root mean square, rounded, times `weight`
    [hidden]: as a layer does it. `hidden` is a multiple of 16.
    """
    kernels = bf16_kernels.load()
    assert kernels is not None
    num_tokens, width = x.shape
    out = torch.empty_like(x)
    kernels.specdepth_bf16_norm(
        x.data_ptr(),
        width,
        weight.data_ptr(),
        epsilon,
        num_tokens,
        width,
        out.data_ptr(),
        width,
        torch.get_num_threads(),
    )
    return out
