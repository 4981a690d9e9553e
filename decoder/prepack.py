"""Prepacked weights on a CPU: put into their kernel's layout once instead of at every call, and projections
of one input joined into one multiplication. What inductor's freezing does, without its
compile time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .bf16_linear import Bf16Linear, can_multiply
from .huge_pages import HugePages

JOINT_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linear layers that transformers' models call on the same input."""

BATCH_HINT = 8
"""Rows for which oneDNN chooses the layout; 1, 8 and 64 measured alike."""


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether prepacking is available and pays: in bfloat16, and in float32 with AVX-512.

    In float32 the linear layers of the default target take 7 % longer for one token and 2 % for two (bound
    by memory), 0.63 of the time for four, 0.54 for eight and 0.83 for 32.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepacked_dtype(model: nn.Module) -> torch.dtype | None:
    """Number format of a model that was prepacked; None of another."""
    return next((m.dtype for m in model.modules() if isinstance(m, PackedLinear)), None)


class PackedLinear(nn.Module):
    """`nn.Linear` on a weight in the layout of `Bf16Linear`, or of oneDNN. Inference only."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, memory: HugePages | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.kernel = Bf16Linear(weight, bias, memory) if can_multiply(weight) else None
        if self.kernel is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BATCH_HINT)
            self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.kernel is not None:
            return self.kernel(x)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return result


class _JointLinear:
    """Several projections of one input, computed when the first of them is asked for."""

    def __init__(self, linears: list[nn.Linear], memory: HugePages) -> None:
        biases = [linear.bias for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.sizes = [linear.out_features for linear in linears]
        self.packed = PackedLinear(weight, bias, memory)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def part(self, index: int, x: Tensor) -> Tensor:
        # Identity, not equality: the reference kept here also keeps the id from being reused.
        if self._input is not x or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(self.packed(x).split(self.sizes, -1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output


class JointPart(nn.Module):
    """One projection out of a `_JointLinear`; stands where the `nn.Linear` stood."""

    def __init__(self, joint: _JointLinear, index: int) -> None:
        super().__init__()
        self._joint, self._index = joint, index
        self.out_features, self.in_features = joint.sizes[index], joint.packed.in_features

    @property
    def joint(self) -> PackedLinear:
        """All projections of the input in one multiplication, side by side."""
        return self._joint.packed

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]; a view into the joint result."""
        return self._joint.part(self._index, x)


def prepack(model: nn.Module) -> int:
    """Replace the linear layers of `model` in place; returns how many multiplications took their place, 0
    where it was prepacked before.

    The model can no longer be saved or trained afterwards.
    """
    remaining, memory = 0, HugePages()
    for module in list(model.modules()):
        for names in JOINT_PROJECTIONS:
            linears = [getattr(module, name, None) for name in names]
            if not all(type(linear) is nn.Linear for linear in linears):
                continue
            found = [linear for linear in linears if isinstance(linear, nn.Linear)]
            if len({(linear.in_features, linear.bias is None) for linear in found}) > 1:
                continue
            joint = _JointLinear(found, memory)
            for index, name in enumerate(names):
                setattr(module, name, JointPart(joint, index))
            remaining += 1
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child.weight, child.bias, memory))
                remaining += 1
    return remaining
