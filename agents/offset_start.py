"""Before PPO on offsets: the search that finds a better start than the rule, and keeps it as a rival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specdepth.decoder.replay import ReplayDecoder
from specdepth.envs import REPLAY_DECODE
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.baselines.registry import make_scheduler
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import save_policy

from .offset_search import SearchConfig, search_offsets
from .offset_weights import FLAGS
from .policy_card import make_card
from .pressure_search import search_pressure
from .train_config import TrainConfig

SEARCHED_FOLDER = "searched"


def search_start(
    config: TrainConfig,
    decoder: ReplayDecoder,
    progress: Callable[[float], None] | None = None,
) -> TrainConfig:
    """Search offsets at the workload's loads, save them as a policy in the run's folder, and start there.

    Args:
        config: with `warm_start.search_iterations` above 0.
        decoder: trace and prices to search on; its training requests alone.
        progress: called with the share that is done, of each search in turn.

    Returns:
        The settings with the searched policy as `warm_start.scheduler`, and no search to do.

    Raises:
        ValueError: the scheduler is no greedy rule, or no load of the workload can be searched.
    """
    start = config.warm_start
    top = decoder.config.max_num_speculative_tokens
    rule = make_scheduler(start.scheduler, max_num_speculative_tokens=top)
    if not isinstance(rule, CappedGreedyDepth):
        raise ValueError(f"a search starts at a greedy rule, such as rule:NAME, got {rule!r}.")
    workload = config.workload
    asked: tuple[int, ...] = (workload.concurrency,)
    if workload.arrivals != "constant":
        asked = tuple(sorted(set(workload.concurrencies)))
    loads = [load for load in asked if load in FLAGS]
    settings = SearchConfig(iterations=start.search_iterations, seed=config.seed)
    trace, cost = decoder.trace, decoder.engine.cost
    weights = search_offsets(trace, cost, rule, loads, settings, progress)
    training = {
        "method": "offsets of a greedy rule searched on replay",
        "search": {
            "iterations": settings.iterations,
            "pools": list(start.search_pools),
            "seed": settings.seed,
            "loads": loads,
        },
        "rule": start.scheduler,
        "trace_sha256": config.replay.trace_sha256,
        "cost_sha256": config.replay.cost_sha256,
    }
    card = make_card(decoder, training, REPLAY_DECODE)
    if start.search_pools:
        policy = LearnedScheduler(weights, card)
        weights = search_pressure(
            trace, cost, policy, loads, start.search_pools, settings, progress
        )
    folder = save_policy(config.out / SEARCHED_FOLDER, weights, card)
    return replace(
        config,
        warm_start=replace(start, scheduler=f"policy:{folder}", search_iterations=0),
    )
