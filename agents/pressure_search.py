"""What a policy of offsets does about memory pressure, searched on replay in pools too small for the load.

Everything else about the policy stays as it is: where there is room, it decides as before.

Legend: M parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyWeights
from specdepth.scheduler.state import Floats

from .offset_search import SearchConfig, ascend
from .pressure_weights import PRESSURE_SCALES, pressure_weights
from .rule_tuning import TrainingReplay
from .scarce_pool import scarce_pool


def search_pressure(
    trace: Trace,
    cost: CostModel,
    policy: LearnedScheduler,
    loads: Sequence[int],
    pool_shares: Sequence[float],
    config: SearchConfig | None = None,
    progress: Callable[[float], None] | None = None,
) -> PolicyWeights:
    """Search the parameters of `pressure_weights` on the training split; deterministic.

    Args:
        trace: whose training requests are replayed.
        cost: prices of the machine.
        policy: of offsets.
        loads: concurrent requests; those that no pool can be short for are left out.
        pool_shares: sizes of pools, see `scarce_pool`. Loads and pools are taken in turn.
        config: see `SearchConfig`.
        progress: called with the share that is done, 0..1.

    Returns:
        The policy with sight of memory, or as it was where that gains nothing in the mean over all
        replays. A preemption more or less moves a replay by more than these parameters do, and the search
        takes steps of a given length: without a slope to follow it ends anywhere.

    Raises:
        ValueError: no policy of offsets, or shares out of range.
    """
    config = config or SearchConfig()
    if not pool_shares or any(not 0 < share < 1 for share in pool_shares):
        raise ValueError(f"pool_shares must be above 0 and below 1, got {list(pool_shares)}.")
    pools = [(load, scarce_pool(trace, load, share)) for load in loads for share in pool_shares]
    replays = [
        TrainingReplay(
            trace, cost, [load], num_requests=config.num_requests, config=engine, seed=seed
        )
        for seed in range(config.seed, config.seed + config.num_replays)
        for load, engine in pools
        if engine is not None
    ]
    if not replays:
        return policy.weights

    def score(values: Floats, step: int) -> float:
        scheduler = LearnedScheduler(pressure_weights(policy.weights, values), policy.card)
        return _score(scheduler, replays[step % len(replays)])

    report = progress or (lambda share: None)
    values = ascend(score, config, config.seed, report, num_values=len(PRESSURE_SCALES))
    gains = [score(values, at) - _score(policy, replay) for at, replay in enumerate(replays)]
    return pressure_weights(policy.weights, values) if np.mean(gains) > 0 else policy.weights


def _score(scheduler: LearnedScheduler, replay: TrainingReplay) -> float:
    (load,) = replay.loads
    return float(np.log(replay.throughput(scheduler, load)))
