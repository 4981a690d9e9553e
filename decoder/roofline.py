"""Arithmetic and memory traffic of passes, and what speculation does to them.

Speculation does more arithmetic a committed token, and moves fewer bytes: a pass streams the
weights once, however many tokens are in it. These are counts; only times are measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdepth.scheduler.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """How much a model is to compute and to stream."""

    num_parameters: int
    weight_bytes: int
    """Bytes of weights that a pass streams; an untied input embedding is only looked up."""
    flops_per_token: float
    """2 x the parameters of linear layers, head included; attention scores left out."""
    kv_bytes_per_token: int
    """Bytes of KV that a context token takes, over all layers."""


def model_size(model: Any) -> ModelSize:
    """Count a decoder-only transformers model, also one on the meta device.

    A weight matrix takes 2 FLOPs a parameter and token (multiply and add); the input embedding is a
    look-up and free, unless it is tied: then the head uses it. Mixtures of experts are counted as
    dense.

    Args:
        model: `PreTrainedModel`.
    """
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    looked_up = {
        id(module.weight)
        for module in model.modules()
        if type(module).__name__.endswith("Embedding") and hasattr(module, "weight")
    }
    if head_weight is not None:
        looked_up.discard(id(head_weight))
    parameters = list(model.parameters())  # each once, tied ones too
    streamed = [p for p in parameters if id(p) not in looked_up]
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    bytes_each = parameters[0].element_size()
    return ModelSize(
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in streamed),
        flops_per_token=2.0 * sum(p.numel() for p in streamed if p.dim() >= 2),
        kv_bytes_per_token=2 * config.num_hidden_layers * num_kv_heads * head_size * bytes_each,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """One pass size."""

    tokens: int
    pass_s: float
    """Seconds of a pass at short context."""
    ratio: float
    """To a pass of one token."""
    flops_per_token: float | None
    bytes_per_token: float | None
    """Weights over the tokens that share them."""
    gflop_s: float | None
    """Achieved, 1e9 FLOP a second."""
    gbyte_s: float | None
    """Achieved, 1e9 weight bytes a second."""


def roofline(cost: CostModel) -> list[RooflineRow]:
    """A row a measured pass size; counts are None where the cost model does not know them."""
    rows = []
    for tokens, seconds in zip(cost.tokens, cost.verify_s, strict=True):
        flops, weights = cost.flops_per_token, cost.weight_bytes
        rows.append(
            RooflineRow(
                tokens=tokens,
                pass_s=seconds,
                ratio=seconds / cost.verify_s[0],
                flops_per_token=flops,
                bytes_per_token=None if weights is None else weights / tokens,
                gflop_s=None if flops is None else flops * tokens / seconds / 1e9,
                gbyte_s=None if weights is None else weights / seconds / 1e9,
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationArithmetic:
    """Work and predicted time a committed token, with speculation and without ("off")."""

    num_sequences: int
    mean_depth: float
    acceptance_length: float
    flops_per_token: float
    flops_per_token_off: float
    bytes_per_token: float
    bytes_per_token_off: float
    time_per_token_s: float
    """Of the batch: a round's passes over the tokens that it commits; from the cost model."""
    time_per_token_off_s: float

    @property
    def flops_ratio(self) -> float:
        """Arithmetic with over without speculation; 1 or more."""
        return self.flops_per_token / self.flops_per_token_off

    @property
    def bytes_ratio(self) -> float:
        """Traffic with over without speculation; below 1 as soon as drafts are accepted."""
        return self.bytes_per_token / self.bytes_per_token_off

    @property
    def time_ratio(self) -> float:
        """Predicted time with over without speculation."""
        return self.time_per_token_s / self.time_per_token_off_s


def speculation_arithmetic(
    cost: CostModel,
    *,
    acceptance_length: float,
    mean_depth: float,
    num_sequences: int = 1,
    context_length: float = 0.0,
    draft_flops_per_token: float = 0.0,
    draft_weight_bytes: float = 0.0,
) -> SpeculationArithmetic:
    """FLOPs, bytes and predicted seconds for each committed token.

    A round of one sequence verifies 1 + d tokens and commits L. So arithmetic is (1 + d) / L times
    that of plain decoding, and a pass's weights are shared by L instead of 1 token a sequence.

    Args:
        cost: with `flops_per_token` and `weight_bytes`.
        acceptance_length: L, accepted + 1, mean over rounds.
        mean_depth: d, tokens verified a sequence and round.
        num_sequences: sequences in a pass.
        context_length: tokens whose KV each sequence reads in a pass.
        draft_flops_per_token: of the draft model; 0 for prompt lookup.
        draft_weight_bytes: of the draft model; 0 for prompt lookup.

    Raises:
        ValueError: unknown FLOPs or bytes, or an acceptance length that `mean_depth` cannot give.
    """
    if cost.flops_per_token is None or cost.weight_bytes is None:
        raise ValueError(
            f"cost model {cost.name} does not know its FLOPs and bytes; profile a model, or set "
            "flops_per_token and weight_bytes."
        )
    if not 1 <= acceptance_length <= 1 + mean_depth + 1e-9:
        raise ValueError(
            f"acceptance_length must be in 1..{1 + mean_depth:g} (1 + mean_depth), "
            f"got {acceptance_length:g}."
        )
    context_bytes = context_length * (cost.kv_bytes_per_token or 0)
    context_tokens = context_length * num_sequences
    flops_off = cost.flops_per_token
    bytes_off = cost.weight_bytes / num_sequences + context_bytes
    flops = (1 + mean_depth) * flops_off + mean_depth * draft_flops_per_token
    streamed = bytes_off + mean_depth * draft_weight_bytes / num_sequences
    time_off_s = cost.pass_s(num_sequences, 0, context_tokens)
    time_s = cost.pass_s(num_sequences * (1 + mean_depth), 0, context_tokens)
    time_s += mean_depth * cost.draft_pass_s(num_sequences)
    return SpeculationArithmetic(
        num_sequences=num_sequences,
        mean_depth=mean_depth,
        acceptance_length=acceptance_length,
        flops_per_token=flops / acceptance_length,
        flops_per_token_off=flops_off,
        bytes_per_token=streamed / acceptance_length,
        bytes_per_token_off=bytes_off,
        time_per_token_s=time_s / (num_sequences * acceptance_length),
        time_per_token_off_s=time_off_s / num_sequences,
    )
