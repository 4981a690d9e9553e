"""Calls `bf16_linear.c`: linear layers in bfloat16 whose results do not depend on what else is in a pass.

oneDNN chooses among kernels by the number of rows, and those round differently; it also compiles one for each
new number, in 10 ms. For up to 32 rows this is faster as well: 22 to 25 ms over all weights of
SmolLM2-135M, where oneDNN takes 29 to 35.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import bf16_kernels
from .huge_pages import HugePages

MULTIPLE = 32
"""Of inputs and of outputs."""


class Bf16Linear:
    """Packed weights.

    Args:
        weight: [N, K] bfloat16 on the CPU, for which `can_multiply`.
        bias: [N] or None.
        memory: where to put the packed weights.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, memory: HugePages | None = None
    ) -> None:
        kernels = bf16_kernels.load()
        assert kernels is not None
        self._call = kernels.specdepth_bf16_linear
        self._num_outputs, self._num_inputs = weight.shape
        weight = weight.detach().contiguous()
        # Not of torch: the kernel takes lines of 64 bytes, and streams through them.
        self._packed = (memory or HugePages()).zeros((weight.numel(),), weight.dtype)
        kernels.specdepth_bf16_pack(weight.data_ptr(), *weight.shape, self._packed.data_ptr())
        self._bias = None if bias is None else bias.detach().float().contiguous()

    @property
    def pointers(self) -> tuple[int, int | None]:
        """Packed weights, and the bias if there is one."""
        return self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._num_outputs, self._num_inputs

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 to [..., N].

        Raises:
            MemoryError: no memory to work in.
        """
        shape = x.shape[:-1]
        if x.dim() != 2:
            x = x.reshape(-1, self._num_inputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self._num_outputs)
        failed = self._call(
            x.data_ptr(),
            x.stride(0),
            *self.pointers,
            len(x),
            self._num_outputs,
            self._num_inputs,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("a linear layer got no memory for its scratch space.")
        return out.view(*shape, self._num_outputs)


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernel is there and takes such a weight [N, K]."""
    fits = not any(size % MULTIPLE for size in weight.shape)
    fits = fits and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return fits and bf16_kernels.load() is not None
