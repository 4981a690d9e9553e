"""A trace with a known law: the chance that a drafted token is accepted goes by match length alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdepth.decoder.trace import Trace, TraceInfo

RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Chance of each token, given those before it, by match length."""
DEPTH = 4


def make_trace(
    num_requests: int = 40, num_tokens: int = 40, seed: int = 0, **changes: Any
) -> Trace:
    """Random runs; two requests in three train, one is held out; every fifth loops."""
    rng = np.random.default_rng(seed)
    size = num_requests * num_tokens
    left = np.tile(np.arange(num_tokens, 0, -1), num_requests)
    match_length = rng.integers(0, 5, size)
    accepts = rng.random((size, DEPTH)) < np.array(RATES)[match_length, None]
    runs = np.cumprod(accepts, axis=1).sum(axis=1)
    each = np.arange(num_requests)
    fields: dict[str, Any] = {
        "info": TraceInfo(
            model_pair="made + prompt-lookup",
            drafter="prompt-lookup",
            max_num_speculative_tokens=DEPTH,
        ),
        "ids": tuple(f"made-{i}" for i in each),
        "kinds": ("made",) * num_requests,
        "held_out": each % 3 == 2,
        "num_prompt": np.full(num_requests, 20),
        "num_tokens": np.full(num_requests, num_tokens),
        "max_new_tokens": np.full(num_requests, num_tokens),
        "stopped": np.zeros(num_requests, np.bool_),
        "looping": each % 5 == 4,
        "accepted": np.minimum(runs, left),
        "proposal_length": np.where(match_length > 0, DEPTH, 0),
        "match_length": match_length,
        "num_matches": np.minimum(match_length, 1),
        "num_agreeing": np.minimum(match_length, 1),
        "match_tokens": match_length,
        "match_distance": 5 * match_length,
        "match_in_output": np.zeros(size, np.bool_),
        "agreement": np.where(match_length > 0, 255, 0).astype(np.uint8)[:, None].repeat(DEPTH, 1),
        "target_top1": rng.random(size),
        "target_entropy": rng.random(size),
    }
    return Trace(**(fields | changes))
