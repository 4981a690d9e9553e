"""Cost models of GPUs from published figures: a roofline, modelled and not measured.

A pass streams the weights once or is bound by arithmetic, whichever takes longer (Williams et al. 2009,
"Roofline"), and reads the KV of its context besides. To that come a fixed time a layer, where kernels
start and drain, and under tensor parallelism two all-reduces a layer (Shoeybi et al. 2019, "Megatron-LM").
Such a model puts the knee where the hardware has it; an engine is slower here and there. Import its
step times (`CostModel.from_step_times`) where there are any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cost import CostModel

VLLM_GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Pass sizes that vLLM captures by default (vllm/config/vllm.py, `_set_cudagraph_sizes`)."""

PASS_TOKENS = tuple(2**i for i in range(14))
"""Grid up to vLLM's default token budget of a pass on these GPUs, 8192."""

MAX_SEQUENCES = 1024
"""Batch of a draft pass, vLLM's default on these GPUs."""

BYTES_PER_VALUE = 2
"""bfloat16."""
TENSOR_PARALLEL = (1, 2, 4)
MAX_WEIGHT_SHARE = 0.75
"""Of a GPU's memory; the rest is for KV and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Published figures of one GPU, and what share of them passes get."""

    name: str
    memory_bytes: float
    bandwidth: float
    """Bytes a second from memory."""
    flops: float
    """bfloat16 FLOP a second, dense."""
    link_bandwidth: float
    """Bytes a second to other GPUs, in one direction."""

    bandwidth_share: float = 0.8
    """Achieved by matrix-vector kernels. Calculon (Isaev et al. 2023, systems/*.json) takes 0.9 for
    transfers of 100 MB; layers are smaller."""
    flops_share: float = 0.65
    """Achieved by matrix products of some hundred rows. Tuned large ones reach 0.79 on an H100
    (780 TFLOP/s, gist Chillee/2ec89696db8b7ed1c24461159e325405)."""
    layer_s: float = 15e-6
    """Starting and draining a layer's ten or so kernels within a CUDA graph; an assumption."""
    all_reduce_s: float = 8e-6
    """Latency of an all-reduce over NVLink; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Sizes of a dense Llama-class model, from its config.json."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int

    @property
    def body_parameters(self) -> int:
        """Linear layers without the head; norms and biases are too few to count."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.mlp_size)

    @property
    def head_parameters(self) -> int:
        """The output head."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """What a pass streams; the input embedding is only looked up."""
        return BYTES_PER_VALUE * (self.body_parameters + self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token over all layers."""
        return 2 * BYTES_PER_VALUE * self.num_layers * self.num_kv_heads * self.head_size


# NVIDIA H100 and H200 Tensor Core GPU data sheets, SXM column; their 1979 TFLOP/s are with sparsity,
# dense is half of it, and NVLink's 900 GB/s are both directions together.
H100 = Gpu(
    name="H100 SXM", memory_bytes=80e9, bandwidth=3.35e12, flops=989e12, link_bandwidth=450e9
)
H200 = Gpu(
    name="H200 SXM", memory_bytes=141e9, bandwidth=4.8e12, flops=989e12, link_bandwidth=450e9
)

# Llama 3.1: Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3. Llama 3.2 and Qwen2.5: the
# config.json of meta-llama/Llama-3.2-1B, Qwen/Qwen2.5-32B and Qwen/Qwen2.5-0.5B.
LLAMA_8B = Transformer(
    name="Llama-3.1-8B",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    mlp_size=14336,
    vocab_size=128256,
)
LLAMA_70B = Transformer(
    name="Llama-3.1-70B",
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    mlp_size=28672,
    vocab_size=128256,
)
LLAMA_1B = Transformer(
    name="Llama-3.2-1B",
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    mlp_size=8192,
    vocab_size=128256,
)
QWEN_32B = Transformer(
    name="Qwen2.5-32B",
    hidden_size=5120,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_size=128,
    mlp_size=27648,
    vocab_size=152064,
)
QWEN_HALF_B = Transformer(
    name="Qwen2.5-0.5B",
    hidden_size=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
    mlp_size=4864,
    vocab_size=151936,
)

SHIPPED_GPUS = {"h100": H100, "h200": H200}
SHIPPED_MODELS = {
    "llama-8b": (LLAMA_8B, LLAMA_1B),
    "qwen-32b": (QWEN_32B, QWEN_HALF_B),
    "llama-70b": (LLAMA_70B, LLAMA_1B),
}
"""Target and draft model by the name in the file."""


def gpu_cost_model(
    gpu: Gpu,
    target: Transformer,
    draft: Transformer | None = None,
    *,
    tensor_parallel: int = 1,
    cuda_graph_sizes: tuple[int, ...] = VLLM_GRAPH_SIZES,
    overhead_s: float = 1e-3,
) -> CostModel:
    """Model what passes cost in bfloat16.

    Args:
        gpu: each of the GPUs.
        target: model that verifies.
        draft: model that drafts, on one of the GPUs; None: drafting is free.
        tensor_parallel: GPUs that share the target.
        cuda_graph_sizes: pass sizes that are captured; () for none.
        overhead_s: the engine's own seconds between passes; an assumption.

    Raises:
        ValueError: weights that do not fit into the GPUs.
    """
    if target.weight_bytes > gpu.memory_bytes * tensor_parallel:
        raise ValueError(
            f"{target.name} has {target.weight_bytes / 1e9:.0f} GB of weights, {tensor_parallel} "
            f"{gpu.name} hold {gpu.memory_bytes * tensor_parallel / 1e9:.0f} GB; raise tensor_parallel."
        )
    roof = _Roof(gpu, target, tensor_parallel)
    tokens = tuple(sorted({*PASS_TOKENS, *roof.bends()}))
    where = gpu.name if tensor_parallel == 1 else f"{tensor_parallel} x {gpu.name}"
    name = target.name if draft is None else f"{target.name}+{draft.name}"
    draft_roof = None if draft is None else _Roof(gpu, draft, 1)
    sequences = tuple(n for n in PASS_TOKENS if n <= MAX_SEQUENCES) if draft_roof else ()
    return CostModel(
        name=f"{name} (modelled)",
        device=where,
        dtype="bfloat16",
        measured=False,
        tokens=tokens,
        verify_s=tuple(_rounded(roof.pass_s(n, n)) for n in tokens),
        prefill_s=tuple(_rounded(roof.pass_s(n, 1)) for n in tokens),
        context_s=_rounded(roof.context_s),
        draft_sequences=sequences,
        draft_s=tuple(_rounded(draft_roof.pass_s(n, n)) for n in sequences) if draft_roof else (),
        draft_token_s=_rounded(draft_roof.body_token_s) if draft_roof else 0.0,
        overhead_s=overhead_s,
        cuda_graph_sizes=cuda_graph_sizes,
        weight_bytes=target.weight_bytes,
        kv_bytes_per_token=target.kv_bytes_per_token,
        flops_per_token=2.0 * (target.body_parameters + target.head_parameters),
    )


def shipped_gpu_models() -> Iterator[tuple[str, CostModel]]:
    """The modelled cost models that this package ships, by name."""
    for gpu_name, gpu in SHIPPED_GPUS.items():
        for model_name, (target, draft) in SHIPPED_MODELS.items():
            ways = smallest_tensor_parallel(gpu, target)
            suffix = "" if ways == 1 else f"-tp{ways}"
            cost = gpu_cost_model(gpu, target, draft, tensor_parallel=ways)
            yield f"{gpu_name}-{model_name}{suffix}-modelled", cost


def smallest_tensor_parallel(gpu: Gpu, target: Transformer) -> int:
    """Fewest GPUs of 1, 2 and 4 that leave a quarter of their memory for KV and activations.

    Raises:
        ValueError: four are too few.
    """
    for ways in TENSOR_PARALLEL:
        if target.weight_bytes <= MAX_WEIGHT_SHARE * gpu.memory_bytes * ways:
            return ways
    raise ValueError(f"{target.name} does not fit into {TENSOR_PARALLEL[-1]} {gpu.name}.")


def write_gpu_models(folder: str | os.PathLike[str]) -> list[Path]:
    """Write `shipped_gpu_models` into `folder` and return the paths."""
    paths = []
    for name, cost in shipped_gpu_models():
        path = Path(folder) / f"{name}.json"
        cost.save(path)
        paths.append(path)
    return paths


class _Roof:
    """Times of one model on `ways` GPUs."""

    def __init__(self, gpu: Gpu, model: Transformer, ways: int) -> None:
        flops = gpu.flops * gpu.flops_share * ways
        bandwidth = gpu.bandwidth * gpu.bandwidth_share * ways
        self.weights_s = model.weight_bytes / bandwidth
        self.body_token_s = 2 * model.body_parameters / flops
        self.head_row_s = 2 * model.head_parameters / flops
        self.context_s = model.kv_bytes_per_token / bandwidth
        self.fixed_s = model.num_layers * gpu.layer_s
        self.link_token_s = 0.0
        if ways > 1:
            # A ring sends 2 (w - 1) / w of the data over each link.
            sent = 2 * (ways - 1) / ways * model.hidden_size * BYTES_PER_VALUE
            self.fixed_s += 2 * model.num_layers * gpu.all_reduce_s
            self.link_token_s = 2 * model.num_layers * sent / gpu.link_bandwidth

    def pass_s(self, num_tokens: int, num_logit_rows: int) -> float:
        compute_s = num_tokens * self.body_token_s + num_logit_rows * self.head_row_s
        return self.fixed_s + max(self.weights_s, compute_s) + num_tokens * self.link_token_s

    def bends(self) -> set[int]:
        """Pass sizes around the points where arithmetic takes over, with all logits and with one."""
        full = self.weights_s / (self.body_token_s + self.head_row_s)
        one = (self.weights_s - self.head_row_s) / self.body_token_s
        return {int(full), int(full) + 1, int(one), int(one) + 1}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")
