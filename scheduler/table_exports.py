"""A batch-size table as settings of serving engines.

Sources:
    vLLM: `num_speculative_tokens_per_batch_size` of `--speculative-config`, as in
        docs/features/speculative_decoding/dynamic_speculative_decoding.md and
        `vllm/v1/spec_decode/dynamic/utils.py`; what a draft model does under it:
        `vllm/v1/spec_decode/llm_base_proposer.py` and
        `vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py`.
    SGLang: the file of `--speculative-adaptive-config`, as in
        `python/sglang/srt/speculative/adaptive_spec_params.py` and `adaptive_step_router.py` (pull
        request #24055). Read in November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .baselines.table import TableDepth
from .state import DrafterKind

VLLM_KEY = "num_speculative_tokens_per_batch_size"

VLLM_TABLE_LIMITS = (
    "vLLM drops the table with --data-parallel-size above 1, and may run without full CUDA graphs under "
    "it; ranges with depth 0 were slow in some versions (issue #49548), so time them once."
)
"""A sentence on what vLLM makes of `vllm_speculative_config`."""
VLLM_DRAFT_MODEL_LIMITS = (
    "With a draft model, depth 0 still costs a draft pass in vLLM's first model runner; in its second, "
    "the method draft_model drafts to the deepest depth whatever the table says, eagle3 does not."
)
"""What holds besides for a draft model: the passes that a lower depth does not save."""
SGLANG_TABLE_LIMITS = (
    "SGLang follows the bands of such a file only with --speculative-algorithm EAGLE or EAGLE3, "
    "--speculative-eagle-topk 1 and without attention data parallelism; with NGRAM and STANDALONE it "
    "has one depth for all batch sizes (pull requests #23629 and #23519 would change that)."
)
"""A sentence on what SGLang makes of `sglang_adaptive_config`."""


def vllm_ranges(table: TableDepth, max_batch_size: int) -> list[list[int]]:
    """Return the table as vLLM's list of [low, high, depth], ends included.

    vLLM goes on with the last depth above the last range.

    Args:
        table: depths by running sequences.
        max_batch_size: end of the last range; ranges that begin above it are left out.

    Raises:
        ValueError: when `max_batch_size` is below 1.
    """
    _check_size(max_batch_size)
    return [
        [low, min(high, max_batch_size), depth]
        for low, high, depth in table.ranges
        if low <= max_batch_size
    ]


def vllm_speculative_config(
    table: TableDepth,
    *,
    max_batch_size: int,
    drafter: DrafterKind,
    draft_model: str | None = None,
    lookup: Mapping[str, Any] | None = None,
    reads_target: bool = False,
) -> dict[str, Any] | None:
    """Return the JSON object of vLLM's `--speculative-config`.

    Args:
        table: depths by running sequences.
        max_batch_size: see `vllm_ranges`.
        drafter: "prompt-lookup" is vLLM's method "ngram", "draft-model" its "draft_model" or "eagle3".
        draft_model: name or path of the draft model.
        lookup: settings of prompt lookup, `max_ngram` and `min_ngram`; 4 and 1 by default.
        reads_target: whether the draft model reads the target's states, as EAGLE-3 does.

    Returns:
        None where the table drafts nowhere: vLLM has no such setting, it is started without one.

    Raises:
        ValueError: no drafter, or a draft model that is not named.
    """
    ranges = vllm_ranges(table, max_batch_size)
    deepest = max(depth for _, _, depth in ranges)
    if not deepest:
        return None
    config: dict[str, Any]
    if drafter == "prompt-lookup":
        lookup = lookup or {}
        config = {
            "method": "ngram",
            "prompt_lookup_max": int(lookup.get("max_ngram", 4)),
            # vLLM's default is its maximum, which would miss the shorter matches.
            "prompt_lookup_min": int(lookup.get("min_ngram", 1)),
        }
    else:
        method = "eagle3" if reads_target else "draft_model"
        config = {"method": method, "model": _named(drafter, draft_model)}
    return config | {"num_speculative_tokens": deepest, VLLM_KEY: ranges}


def sglang_adaptive_config(table: TableDepth, max_batch_size: int) -> dict[str, Any]:
    """Return the JSON object of SGLang's `--speculative-adaptive-config`.

    Keys are the batch sizes that bands begin at. A band with a single candidate leaves SGLang's moving
    average no choice, so the table holds as it is; a candidate 0 switches drafting off. SGLang looks
    up the size that a batch is padded to (its CUDA graph). See `SGLANG_TABLE_LIMITS`.

    Args:
        table: depths by running sequences.
        max_batch_size: bands that begin above it are left out.

    Raises:
        ValueError: when `max_batch_size` is below 1.
    """
    _check_size(max_batch_size)
    return {
        str(low): {"candidate_steps": [depth]}
        for low, _, depth in table.ranges
        if low <= max_batch_size
    }


def sglang_flags(
    depth: int,
    *,
    drafter: DrafterKind,
    draft_model: str | None = None,
    reads_target: bool = False,
) -> tuple[str, ...]:
    """Return SGLang's options for one depth at all batch sizes, which all its drafters can do.

    SGLang counts the token before the draft among its draft tokens. Its n-gram drafter looks up all
    earlier outputs, not the request's own text alone, and proposes a tree unless the breadth is 1.

    Args:
        depth: drafted tokens a sequence; 0 gives no options.
        drafter: "prompt-lookup" is SGLang's NGRAM, "draft-model" its STANDALONE or EAGLE3.
        draft_model: name or path of the draft model.
        reads_target: see `vllm_speculative_config`.

    Raises:
        ValueError: a negative depth, no drafter, or a draft model that is not named.
    """
    if depth < 0:
        raise ValueError(f"a depth is 0 or more, got {depth}.")
    if not depth:
        return ()
    verified = ("--speculative-num-draft-tokens", str(depth + 1))
    if drafter == "prompt-lookup":
        breadth = ("--speculative-ngram-max-bfs-breadth", "1")
        return ("--speculative-algorithm", "NGRAM", *verified, *breadth)
    return (
        "--speculative-algorithm",
        "EAGLE3" if reads_target else "STANDALONE",
        "--speculative-draft-model-path",
        _named(drafter, draft_model),
        "--speculative-num-steps",
        str(depth),
        "--speculative-eagle-topk",
        "1",
        *verified,
    )


def _check_size(max_batch_size: int) -> None:
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size is 1 or more, got {max_batch_size}.")


def _named(drafter: DrafterKind, draft_model: str | None) -> str:
    if drafter != "draft-model":
        raise ValueError(f"no engine settings for the drafter {drafter}; it proposes nothing.")
    if not draft_model:
        raise ValueError("engine settings for a draft model need its name.")
    return draft_model
