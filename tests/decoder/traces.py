"""Small traces for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdepth.decoder.trace import Trace, TraceInfo


def toy_trace(
    sizes: tuple[int, ...] = (5, 3, 9, 1),
    *,
    seed: int = 0,
    drafter: str = "prompt-lookup",
    top: int = 8,
    **changed: Any,
) -> Trace:
    """A trace of random, possible numbers and texts of `sizes`; request i is held out if i is odd."""
    rng = np.random.default_rng(seed)
    lengths, num = np.array(sizes), len(sizes)
    size = int(lengths.sum())
    left = np.concatenate([np.arange(length, 0, -1) for length in sizes])
    proposal = rng.integers(0, top + 1, size)
    matches = rng.integers(0, 70000, size)
    fields: dict[str, Any] = {
        "info": TraceInfo(model_pair="a+b", drafter=drafter, max_num_speculative_tokens=top),  # type: ignore[arg-type]
        "ids": tuple(f"request {i}" for i in range(num)),
        "kinds": tuple("chat" if i % 3 else "code" for i in range(num)),
        "held_out": np.arange(num) % 2 == 1,
        "num_prompt": rng.integers(1, 300, num),
        "num_tokens": lengths,
        "max_new_tokens": lengths + rng.integers(0, 3, num),
        "stopped": rng.random(num) < 0.5,
        "looping": rng.random(num) < 0.5,
        "accepted": rng.integers(0, np.minimum(proposal, left) + 1),
        "proposal_length": proposal,
        "match_length": rng.integers(0, 5, size),
        "num_matches": matches,
        "num_agreeing": rng.integers(0, matches + 1),
        "match_tokens": rng.integers(0, 17, size),
        "match_distance": rng.integers(0, 70000, size),
        "match_in_output": rng.random(size) < 0.5,
        "agreement": np.sort(rng.integers(0, 256, (size, top)).astype(np.uint8))[:, ::-1],
        "target_top1": np.where(rng.random(size) < 0.2, np.nan, rng.random(size)),
        "target_entropy": 12 * rng.random(size),
    }
    if drafter == "draft-model":
        for name, scale in (("draft_top1", 1), ("draft_entropy", 12), ("draft_margin", 1)):
            fields[name] = scale * rng.random((size, top))
    return Trace(**(fields | changed))
