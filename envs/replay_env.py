"""`specdepth/ReplayDecode-v0`: the same environment on recorded outcomes and a virtual clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.prompts import Split
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace
from specdepth.decoder.workload import Workload
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost

from .arguments import WorkloadLike
from .engine_env import EngineEnv
from .recording_pool import RecordingPool
from .workload_config import WorkloadConfig


class ReplayDecodeEnv(EngineEnv):
    """Choose the draft depth of each sequence in each round, on a recorded trace.

    ## Description
    The engine is the one of `LiveDecodeEnv`, and its rounds are those that the live decoder would do
    with the same depths: what would be accepted at each position of each text is looked up in a
    trace. A cost model says what a round takes. There is no model to load, a step takes less than a
    millisecond, and nothing is left to chance.

    ## Action Space, Observation Space, Rewards, Episode End
    As in `LiveDecodeEnv`. S and K are `max_num_seqs` and `max_num_speculative_tokens` of
    `engine_options`.

    ## Starting State
    A workload is drawn from `np_random`: kinds with equal chances, a recorded request of the kind,
    and arrivals. Each request is as long as it was recorded. The first observation is the first round
    in which a sequence decodes.

    ## Arguments
    With `gymnasium.make("specdepth.envs:specdepth/ReplayDecode-v0", ...)`:

    * `trace`: a `Trace`, its file, or the name of a shipped one.
    * `cost`: a `CostModel`, its file, or the name of a shipped one. It moves the clock and is shown in
      the observation.
    * `workload`: a `WorkloadConfig` or its fields as a mapping, of which each episode draws a new
      one, or a fixed `Workload` made with `ReplayDecoder.requests`. Its temperature is the trace's;
      `max_new_tokens` cuts texts shorter.
    * `split`: requests to draw from, "train" or "held-out"; None for all.
    * `looping`: whether texts that fell into verbatim repetition take part.
    * `engine_options`: fields of `EngineConfig`, for example `{"max_num_seqs": 16}`. A small
      `num_kv_blocks` brings memory pressure, which `lookahead` answers. K is the trace's by default.
    * `max_rounds`, `seconds_per_token`: as in `LiveDecodeEnv`.

    ## Version History
    * v0: first version.
    """

    def __init__(
        self,
        trace: Trace | str | os.PathLike[str],
        cost: CostModel | str | os.PathLike[str],
        *,
        workload: WorkloadLike | None = None,
        split: Split | None = "train",
        looping: bool = True,
        engine_options: Mapping[str, Any] | None = None,
        max_rounds: int | None = None,
        seconds_per_token: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.decoder = _make_decoder(trace, cost, engine_options or {})
        super().__init__(self.decoder.engine, workload, max_rounds, seconds_per_token, render_mode)
        self._pool = RecordingPool(self.decoder, split=split, looping=looping)

    def _draw(self, config: WorkloadConfig) -> Workload:
        return self._pool.workload(config, self.np_random)


def _make_decoder(
    trace: Trace | str | os.PathLike[str],
    cost: CostModel | str | os.PathLike[str],
    options: Mapping[str, Any],
) -> ReplayDecoder:
    if not isinstance(trace, Trace):
        trace = load_trace(trace)
    if not isinstance(cost, CostModel):
        cost = load_cost(cost)
    top = trace.info.max_num_speculative_tokens
    try:
        config = EngineConfig(**({"max_num_speculative_tokens": top} | dict(options)))
    except TypeError as error:
        known = ", ".join(EngineConfig.__dataclass_fields__)
        raise ValueError(f"engine_options: {error}; there are {known}.") from error
    return ReplayDecoder(trace, cost, config)
