"""Machines that do not exist, to train on: cost models drawn at random.

A policy that has seen many prices reads them instead of remembering one machine's (domain
randomisation, Tobin et al. 2017, arXiv 1703.06907).
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.gpu_models import VLLM_GRAPH_SIZES
from specdepth.scheduler.state import Floats

_TOKENS = tuple(2**i for i in range(12))
_SEQUENCES = tuple(2**i for i in range(9))


def random_cost(rng: np.random.Generator, *, draft_model: bool) -> CostModel:
    """Draw a machine.

    A pass is a smooth roofline: weights stream once, or arithmetic takes longer. What is drawn, uniform
    over the logarithm unless it says otherwise: the one-token pass, 5 to 100 ms; the size where
    arithmetic takes as long as streaming, 4 to 400 tokens; the exponent that smooths the corner, 1 to 4;
    context, 0.001 to 0.1 % of the one-token pass a hundred tokens; prompts without logits, 60 to 100 %
    (uniform); a fixed part of a round, 0.1 to 10 %. Every third machine pads passes to the sizes of
    vLLM's CUDA graphs. A draft pass takes 2 to 30 % of the one-token pass and has a corner of its own.

    Args:
        rng: where it comes from.
        draft_model: whether drafting costs passes.
    """
    base_s = _log_uniform(rng, 5e-3, 0.1)
    verify = _roofline(rng, base_s, _TOKENS, corner=_log_uniform(rng, 4, 400))
    prompts = float(rng.uniform(0.6, 1.0))
    draft_sequences: tuple[int, ...] = ()
    draft: Floats = np.zeros(0)
    if draft_model:
        draft_sequences = _SEQUENCES
        share = _log_uniform(rng, 0.02, 0.3)
        draft = _roofline(rng, share * base_s, _SEQUENCES, corner=_log_uniform(rng, 8, 400))
    padded = rng.random() < 1 / 3
    return CostModel(
        name="random",
        tokens=_TOKENS,
        verify_s=tuple(verify.tolist()),
        # The smallest passes have nothing to leave out.
        prefill_s=tuple((verify * (1 - (1 - prompts) * (1 - 1 / np.array(_TOKENS)))).tolist()),
        context_s=base_s * _log_uniform(rng, 1e-7, 1e-5),
        draft_sequences=draft_sequences,
        draft_s=tuple(draft.tolist()),
        draft_token_s=float(draft[0]) * _log_uniform(rng, 1e-3, 0.1) if draft_model else 0.0,
        overhead_s=base_s * _log_uniform(rng, 1e-3, 0.1),
        cuda_graph_sizes=VLLM_GRAPH_SIZES if padded else (),
    )


def _roofline(
    rng: np.random.Generator, base_s: float, sizes: tuple[int, ...], corner: float
) -> Floats:
    """Seconds of passes of `sizes`; both sides are equal at `corner`, and one alone far from it."""
    power = _log_uniform(rng, 1.0, 4.0)
    seconds: Floats = base_s * (1 + (np.array(sizes) / corner) ** power) ** (1 / power)
    return seconds


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
