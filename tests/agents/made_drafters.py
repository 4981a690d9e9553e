"""The same made-up requests with two drafters of one target, for tests of comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specdepth.agents.advice_search import Drafting
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import DEPTH, make_trace

NUM_TOKENS = 4
KNEE = CostModel.linear(base_s=0.05, token_s=0.01, knee=12, name="knee at 12")
KNEE_WITH_DRAFT = replace(
    KNEE, draft_sequences=(1, 12), draft_s=(0.005, 0.06), name="knee at 12 with a draft model"
)
"""A draft pass is a tenth of a target pass for one sequence, and as long as one for ten."""


def lookup_trace(runs: Any, num_requests: int = 24, **changes: Any) -> Trace:
    """All positions propose K tokens, of which `runs` are right: one number, or one a request."""
    size = num_requests * NUM_TOKENS
    left = np.tile(np.arange(NUM_TOKENS, 0, -1), num_requests)
    each = np.broadcast_to(np.asarray(runs), num_requests).repeat(NUM_TOKENS)
    fields: dict[str, Any] = {
        "info": TraceInfo(
            model_pair="made+prompt-lookup",
            drafter="prompt-lookup",
            max_num_speculative_tokens=DEPTH,
        ),
        "accepted": np.minimum(each, left),
        "match_length": np.full(size, 2),
        "proposal_length": np.full(size, DEPTH),
        "num_matches": np.ones(size, np.int64),
        "num_agreeing": np.ones(size, np.int64),
        "num_prompt": np.ones(num_requests, np.int64),
        "looping": np.zeros(num_requests, np.bool_),
        "held_out": np.arange(num_requests) % 2 == 1,
    }
    return make_trace(num_requests, NUM_TOKENS, **(fields | changes))


def draft_trace(
    runs: Any,
    num_requests: int = 24,
    *,
    name: str = "tiny",
    reads_target: bool = False,
    **changes: Any,
) -> Trace:
    """The same requests with a draft model that is always 0.8 sure."""
    size = num_requests * NUM_TOKENS
    zeros, signals = np.zeros(size, np.int64), np.full((size, DEPTH), 0.8)
    fields: dict[str, Any] = {
        "info": TraceInfo(
            model_pair=f"made+{name}",
            drafter="draft-model",
            max_num_speculative_tokens=DEPTH,
            reads_target=reads_target,
        ),
        "match_length": zeros,
        "num_matches": zeros,
        "num_agreeing": zeros,
        "draft_top1": signals,
        "draft_entropy": signals,
        "draft_margin": signals,
    }
    return lookup_trace(runs, num_requests, **(fields | changes))


def two_drafters(lookup_runs: Any = 1, draft_runs: Any = 3) -> dict[str, Drafting]:
    """By name."""
    return {
        "prompt lookup": Drafting(trace=lookup_trace(lookup_runs), cost=KNEE),
        "draft model tiny": Drafting(trace=draft_trace(draft_runs), cost=KNEE_WITH_DRAFT),
    }
