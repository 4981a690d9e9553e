"""How the demo trains: on replay, from a greedy rule by a short search and PPO from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specdepth.decoder.replay import ReplayDecoder
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.baselines import make_scheduler

from .callbacks import TrainProgress
from .demo_ground import Ground
from .demo_pace import ReplayPace
from .offset_search import SearchConfig
from .offset_start import search_start
from .offset_weights import FLAGS
from .profile_command import COST_FILE
from .replay_engines import make_replay_decoders, pinned
from .train import TrainResult, train
from .train_config import (
    DecoderConfig,
    PPOConfig,
    ReplayConfig,
    RewardConfig,
    TrainConfig,
    WarmStartConfig,
)

if TYPE_CHECKING:
    from .demo import Options

SEARCH_SHARE = 0.5
"""Of training, at most."""
MIN_ITERATIONS = 2
"""A search of one step is a jump in the dark."""
LEAST_TRAIN_S = 1.0
"""That PPO gets if the search took longer than it should."""


def train_on_replay(
    options: Options,
    ground: Ground,
    folder: Path,
    seconds: float,
    progress: Callable[[TrainProgress], None],
) -> TrainResult:
    """Search, train and export into `folder`/train.

    Args:
        options: of the demo.
        ground: trace and rule.
        folder: of the demo, with the prices of the machine in it.
        seconds: wall time for everything.
        progress: told how far it is.
    """
    start_s = time.monotonic()
    config = train_config(options, ground, folder)
    decoder = make_replay_decoders(replace(config, replay=replace(config.replay, num_engines=1)))[0]
    iterations = search_iterations(config, ground, decoder, SEARCH_SHARE * seconds)
    if iterations:
        wanted = replace(config.warm_start, search_iterations=iterations)
        searching = replace(pinned(config, decoder), warm_start=wanted)

        def report(share: float) -> None:
            done_s = time.monotonic() - start_s
            progress(
                TrainProgress(
                    stage="search",
                    fraction=min(done_s / seconds, 1.0),
                    elapsed_s=done_s,
                    num_updates=0,
                    num_rounds=0,
                    metrics={},
                )
            )

        config = search_start(searching, decoder, report)
    left_s = max(start_s + seconds - time.monotonic(), LEAST_TRAIN_S)
    return train(replace(config, minutes=left_s / 60), progress=progress)


def train_config(options: Options, ground: Ground, folder: Path) -> TrainConfig:
    """Offsets from the rule, paid by what they gain over it where drafting is free."""
    drafts_free = ground.trace.info.drafter == "prompt-lookup"
    return TrainConfig(
        env="replay",
        action="offset",
        out=folder / "train",
        seed=options.seed,
        decoder=DecoderConfig(
            target=options.target,
            draft=options.draft,
            max_num_speculative_tokens=options.top,
            max_num_seqs=options.max_num_seqs,
            dtype=options.dtype,
            device=options.device,
            verification=options.verification,
            cost=folder / COST_FILE,
        ),
        replay=ReplayConfig(trace=ground.trace_name),
        workload=WorkloadConfig(concurrencies=tuple(sorted(set(options.loads))), num_requests=96),
        warm_start=WarmStartConfig(scheduler=ground.rules[0]),
        reward=RewardConfig(form="relative" if drafts_free else "difference"),
        ppo=PPOConfig(
            discount=0.0,
            gae_lambda=0.0,
            ent_coef=0.0,
            learning_rate=1e-4,
            batch_size=2048,
            n_steps=256,
        ),
    )


def search_iterations(
    config: TrainConfig, ground: Ground, decoder: ReplayDecoder, seconds: float
) -> int:
    """Steps a load that a search makes in `seconds`, by how long replays of the rule take; 0 for none."""
    loads = [load for load in config.workload.concurrencies if load in FLAGS]
    if not loads:
        return 0
    search = SearchConfig()
    pace = ReplayPace(ground.trace, decoder.engine.cost, loads, make_scheduler(ground.rules[0]))
    step_s = 2 * search.pairs * pace.seconds(search.num_requests)
    iterations = min(int(seconds / step_s), search.iterations)
    return iterations if iterations >= MIN_ITERATIONS else 0
