"""KV pools too small for a load, so that the engine preempts."""

from __future__ import annotations

import math

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.replay import BLOCK_SIZE
from specdepth.decoder.trace import Trace


def scarce_pool(trace: Trace, load: int, share: float) -> EngineConfig | None:
    """Settings of an engine whose pool holds a share of what `load` sequences take at their full length.

    Args:
        trace: its training requests say how long sequences get.
        load: slots of the engine.
        share: above 0. Sequences are at half of their new tokens on average, so somewhat below 1 the pool
            begins to be short.

    Returns:
        None where the pool would not hold the longest request that the trace may ask for.
    """
    rows = trace.rows("train")
    each = float((trace.num_prompt[rows] + trace.num_tokens[rows]).mean()) / BLOCK_SIZE
    longest = int((trace.num_prompt + trace.max_new_tokens).max())
    num_blocks = math.ceil(share * load * each)
    if num_blocks * BLOCK_SIZE < longest:
        return None
    return EngineConfig(
        max_num_speculative_tokens=trace.info.max_num_speculative_tokens,
        max_num_seqs=load,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
    )
