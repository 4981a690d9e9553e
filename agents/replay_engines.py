"""What training on replay runs on: engines over one trace, and what pins a run to its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.replay import ReplayDecoder, prices_for
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost

from .train_config import TrainConfig


def make_replay_decoders(config: TrainConfig) -> tuple[ReplayDecoder, ...]:
    """Engines over the trace that `config.replay` names, priced by `config.decoder.cost`.

    Raises:
        ValueError: no trace or cost model, files that cannot be used or are not those that the run was
            made with, or a K deeper than recorded.
    """
    replay, decoder = config.replay, config.decoder
    if replay.trace is None:
        raise ValueError("--env replay needs a trace; name one with --trace.")
    if decoder.cost is None:
        raise ValueError(
            "--env replay needs a cost model, which says what rounds take; name one with --cost, "
            "`specdepth profile` writes it."
        )
    trace = load_trace(replay.trace)
    cost = prices_for(trace, load_cost(decoder.cost))
    _check_content(f"trace {replay.trace}", trace, replay.trace_sha256)
    _check_content(f"cost model {decoder.cost}", cost, replay.cost_sha256)
    engine = EngineConfig(
        max_num_seqs=decoder.max_num_seqs,
        max_num_speculative_tokens=trace.info.depth_limit(decoder.max_num_speculative_tokens),
        num_kv_blocks=replay.num_kv_blocks,
        lookahead=replay.lookahead,
    )
    return tuple(ReplayDecoder(trace, cost, engine) for _ in range(replay.num_engines))


def pinned(config: TrainConfig, decoder: ReplayDecoder) -> TrainConfig:
    """`config` with the content of `decoder`'s trace and cost model, so that no other will do."""
    return replace(
        config,
        replay=replace(
            config.replay,
            trace_sha256=content_sha256(decoder.trace),
            cost_sha256=content_sha256(decoder.engine.cost),
        ),
    )


def content_sha256(value: Trace | CostModel) -> str:
    """Digest of what is in a trace or cost model, wherever and however compressed it lies."""
    digest = hashlib.sha256()
    for name, content in _content(value):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def _content(value: Any) -> Iterator[tuple[str, bytes]]:
    """Fields at their defaults are left out, so that one more in a later version changes nothing."""
    for one in fields(value):
        item = getattr(value, one.name)
        if is_dataclass(item):
            yield from _content(item)
        elif one.init and isinstance(item, np.ndarray):
            yield one.name, f"{item.dtype}{item.shape}".encode() + item.tobytes()
        elif one.init and item not in (one.default, {}):
            yield one.name, json.dumps(item, sort_keys=True).encode()


def _check_content(what: str, value: Trace | CostModel, wanted: str) -> None:
    found = content_sha256(value)
    if wanted and found != wanted:
        raise ValueError(
            f"the {what} has changed since the run was made (sha256 {found[:12]}, was {wanted[:12]}); "
            "put the old one back, or start a new run."
        )
