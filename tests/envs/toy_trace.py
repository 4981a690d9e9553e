"""A made-up trace: no model behind it, runs drawn at random."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import DrafterKind

COST = CostModel.linear(base_s=0.05, token_s=0.003)
KINDS = ("chat", "code")


def toy_trace(
    num_requests: int = 24,
    *,
    longest: int = 30,
    top: int = 4,
    accept: float = 0.7,
    drafter: DrafterKind = "prompt-lookup",
    seed: int = 0,
    **info: Any,
) -> Trace:
    """Texts of `longest` // 2 to `longest` tokens. Each drafted token is right with probability
    `accept`. Every third text ends by itself, every fifth loops, every fourth is "code"; a quarter is
    held out.
    """
    rng = np.random.default_rng(seed)
    index = np.arange(num_requests)
    num_tokens = rng.integers(longest // 2, longest + 1, num_requests)
    stopped = index % 3 == 0
    size = int(num_tokens.sum())
    ends = np.repeat(np.cumsum(num_tokens), num_tokens)
    offered = rng.integers(0, top + 1, size) if drafter == "prompt-lookup" else np.full(size, top)
    runs = np.minimum(rng.geometric(1.0 - accept, size) - 1, offered)
    matched = np.where(offered > 0, rng.integers(1, 5, size), 0)
    draft: dict[str, Any] = {}
    if drafter == "draft-model":
        top1 = rng.uniform(0.2, 1.0, (size, top))
        draft = {"draft_top1": top1, "draft_entropy": 2 * (1 - top1), "draft_margin": top1 / 2}
        matched = np.zeros(size, np.int64)
    return Trace(
        info=TraceInfo(
            model_pair="toy + toy", drafter=drafter, max_num_speculative_tokens=top, **info
        ),
        ids=tuple(f"toy-{i}" for i in range(num_requests)),
        kinds=tuple(KINDS[i % 4 == 3] for i in range(num_requests)),
        held_out=(index // 4) % 4 == 3,
        num_prompt=rng.integers(3, 12, num_requests),
        num_tokens=num_tokens,
        max_new_tokens=np.where(stopped, longest, num_tokens),
        stopped=stopped,
        looping=index % 5 == 0,
        accepted=np.minimum(runs, ends - np.arange(size)),
        proposal_length=offered,
        match_length=matched,
        num_matches=np.minimum(matched, 1),
        num_agreeing=np.minimum(matched, 1),
        match_tokens=matched,
        match_distance=5 * matched,
        match_in_output=matched > 2,
        agreement=np.where(matched > 0, 255, 0).astype(np.uint8)[:, None].repeat(top, 1),
        target_top1=rng.uniform(0.3, 1.0, size),
        target_entropy=rng.uniform(0.0, 2.0, size),
        **draft,
    )


def toy_replay(
    trace: Trace | None = None, cost: CostModel = COST, *, max_num_seqs: int = 4, **options: Any
) -> ReplayDecoder:
    trace = trace or toy_trace()
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_speculative_tokens=trace.info.max_num_speculative_tokens,
    )
    return ReplayDecoder(trace, cost, replace(config, **options))
