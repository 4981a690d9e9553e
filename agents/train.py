"""Training: PPO on the engine, live or on replay, each slot an agent, bounded by time or steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import KVWriter, Logger

from specdepth.decoder.loading import dtype_name
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.envs import LIVE_DECODE, REPLAY_DECODE
from specdepth.envs.workload_config import PromptLike
from specdepth.scheduler.baselines.registry import make_scheduler

from .assembly import connect as connect
from .assembly import make_decoder as make_decoder
from .assembly import make_env as make_env
from .assembly import make_model as make_model
from .assembly import make_replay_env as make_replay_env
from .assembly import starting_point as starting_point
from .callbacks import (
    EpisodeMonitor,
    Progress,
    ReportProgress,
    TimeLimit,
    TrainProgress,
    UpdateCycle,
)
from .checkpoint import MODEL_FILE, Checkpoint, load_checkpoint, save_checkpoint
from .export import export_policy
from .offset_start import search_start
from .policy_card import make_card
from .progress_csv import ProgressCsv
from .replay_engines import make_replay_decoders, pinned
from .results import check_writable, collect_device, command_line, write_atomically
from .slot_vec_env import SlotVecEnv
from .tracking import WandbTracker
from .train_config import CONFIG_FILE, TrainConfig
from .warm_start import WarmStartResult, warm_start

logger = logging.getLogger(__name__)

COMMAND_FILE = "command.txt"
PROGRESS_FILE = "progress.csv"
MONITOR_FILE = "monitor.csv"
POLICY_FOLDER = "policy"
NO_LIMIT = 10**15
ENV_IDS = {"live": LIVE_DECODE, "replay": REPLAY_DECODE}

Decoder = SpeculativeDecoder | ReplayDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training run left."""

    folder: Path
    """Of the run: config.json, command.txt, progress.csv, monitor.csv, model.zip, state.json, policy/."""
    policy_folder: Path
    """What `load_policy` and `LearnedScheduler.load` take."""
    interrupted: bool
    """Whether Ctrl-C ended it; everything is there all the same."""
    num_updates: int
    """Of the policy, earlier sessions included."""
    num_rounds: int
    """Rounds of the engine, warm start and earlier sessions included."""
    num_decisions: int
    """Depths chosen for running sequences in them."""
    num_timesteps: int
    """By stable-baselines3's count: rounds times slots, without the warm start."""
    elapsed_s: float
    """Wall time of this session."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of decoding in the last rollout; see `DecodeStats.as_dict`."""
    warm_start: WarmStartResult | None = None
    """None without one, and in resumed sessions."""
    sync_command: str | None = None
    """Sends an offline W&B run later; show it to the user."""


@dataclass(slots=True)
class _Session:
    """A training session under way."""

    config: TrainConfig
    env: SlotVecEnv
    model: PPO
    num_updates: int
    loads: tuple[int, ...]
    start_s: float
    tracker: WandbTracker | None = None
    warm_start: WarmStartResult | None = None
    interrupted: bool = False

    @property
    def deadline_s(self) -> float | None:
        minutes = self.config.minutes
        return None if minutes is None else self.start_s + 60 * minutes


def train(
    config: TrainConfig,
    decoder: SpeculativeDecoder | None = None,
    progress: Progress | None = None,
    *,
    prompts: Sequence[PromptLike] | None = None,
    resume: bool = False,
) -> TrainResult:
    """Train a policy and export it.

    PPO on the CPU drives the decoder's engine, or with `config.env` "replay" several over a trace,
    through workloads drawn from `config`. Ctrl-C, like the end of the time, leaves a checkpoint and an
    exported policy.

    Args:
        config: everything there is to choose. To go on with a run take `resumed_config`.
        decoder: a live decoder to use instead of the one that `config.decoder` names; its engine must
            be idle.
        progress: told how far training is.
        prompts: instead of those that `config.prompts` names: texts, token lists or `Prompt`s.
        resume: go on with the run in `config.out`: weights, optimiser, normalisation, counts and
            random generators; workloads start anew. Loads pickled objects: for your own runs only.

    Returns:
        Where things are, and how training went.

    Raises:
        ValueError: a setting that does not fit, a folder that holds another run or cannot be written
            to, or with `resume` no run to go on with, or another trace or cost model than it had.
    """
    start_s = time.monotonic()
    folder = config.out
    _claim(folder, resume)
    searches = config.warm_start.search_iterations > 0
    config, driven, env = _assemble(config, decoder, prompts, progress)
    if searches:
        start_s = time.monotonic()  # `minutes` are for what follows
    with _session(config, env, resume, start_s) as session:
        cycle = UpdateCycle(
            session.env,
            session.num_updates,
            session.loads,
            lambda: _save(session, cycle),
            60 * config.checkpoint_minutes,
        )
        try:
            if not resume:
                _warm_start(session, driven, progress)
            _learn(session, cycle, progress)
        except KeyboardInterrupt:
            logger.warning("interrupted; keeping what there is in %s.", folder)
            session.interrupted = True
            cycle.settle()
        _save(session, cycle)
        return _export(session, driven, cycle)


def resumed_config(
    folder: Path, *, minutes: float | None, timesteps: int | None, track: bool = False
) -> TrainConfig:
    """Settings of the run in `folder`, with a new end: `minutes` and `timesteps` are for the new
    session alone.

    Raises:
        ValueError: no run there.
    """
    config = TrainConfig.load(folder)
    return replace(config, out=folder, minutes=minutes, timesteps=timesteps, track=track)


def _assemble(
    config: TrainConfig,
    decoder: SpeculativeDecoder | None,
    prompts: Sequence[PromptLike] | None,
    progress: Progress | None,
) -> tuple[TrainConfig, Decoder, SlotVecEnv]:
    """Settings with what was filled in, one of the decoders, and the slots of all."""
    if config.env == "live":
        decoder = decoder or make_decoder(config)
        return config, decoder, make_env(config, decoder, prompts)
    if decoder is not None or prompts is not None or config.prompts is not None:
        raise ValueError(
            "a trace has its own requests and results: no decoder, no prompts on replay."
        )
    begun_s = time.monotonic()

    def search_progress(share: float) -> None:
        if progress is not None:
            progress(
                TrainProgress(
                    stage="search",
                    fraction=share,
                    elapsed_s=time.monotonic() - begun_s,
                    num_updates=0,
                    num_rounds=0,
                    metrics={},
                )
            )

    decoders = make_replay_decoders(config)
    config = pinned(config, decoders[0])
    if config.warm_start.search_iterations:
        config = search_start(config, decoders[0], search_progress)
    return config, decoders[0], make_replay_env(config, decoders)


def _claim(folder: Path, resume: bool) -> None:
    check_writable(folder / CONFIG_FILE)
    if not resume and (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} already holds a run; choose another --out, or go on with --resume {folder}."
        )
    if resume and not (folder / MODEL_FILE).is_file():
        raise ValueError(f"no run to resume in {folder}: it has no {MODEL_FILE}.")


@contextmanager
def _session(
    config: TrainConfig, env: SlotVecEnv, resume: bool, start_s: float
) -> Iterator[_Session]:
    folder, tracker = config.out, None
    try:
        if resume:
            model, num_updates, loads = load_checkpoint(folder, env)
            connect(model, env)
        else:
            start = starting_point(config)
            model, num_updates, loads = make_model(config.ppo, env, config.seed, start), 0, ()
        config.save(folder)
        write_atomically(folder / COMMAND_FILE, command_line() + "\n")
        outputs: list[KVWriter] = [ProgressCsv(folder / PROGRESS_FILE)]
        if config.track:
            tracker = WandbTracker(config, folder)
            outputs.append(tracker)
        model.set_logger(Logger(str(folder), outputs))
        yield _Session(config, env, model, num_updates, loads, start_s, tracker)
    except BaseException:
        if tracker is not None:
            tracker.fail()
        raise
    finally:
        env.close()


def _save(session: _Session, cycle: UpdateCycle) -> None:
    checkpoint = Checkpoint(session.model, cycle.num_updates, tuple(cycle.loads))
    save_checkpoint(session.config.out, checkpoint, session.env)


def _warm_start(session: _Session, decoder: Decoder, progress: Progress | None) -> None:
    config = session.config.warm_start
    if config.scheduler == "none":
        return
    engine = decoder.engine.config
    make = partial(
        make_scheduler,
        config.scheduler,
        max_num_speculative_tokens=engine.max_num_speculative_tokens,
    )
    minutes = session.config.minutes
    deadline_s = None if minutes is None else session.start_s + 60 * minutes * config.max_share

    def report(share: float) -> None:
        if progress is not None:
            elapsed_s = time.monotonic() - session.start_s
            done = share * config.max_share if minutes is None else elapsed_s / (60 * minutes)
            progress(
                TrainProgress(
                    stage="warm start",
                    fraction=min(done, 1.0),
                    elapsed_s=elapsed_s,
                    num_updates=0,
                    num_rounds=session.env.num_rounds,
                    metrics={},
                )
            )

    # Several engines give as many more decisions a round: the same work, in fewer passes over them.
    epochs = -(-config.epochs // len(session.env.engines))
    session.warm_start = warm_start(
        session.model,
        session.env,
        make,
        replace(config, epochs=epochs),
        seed=session.config.seed,
        deadline_s=deadline_s,
        progress=report,
    )
    logger.info("warm start from %s: %s", config.scheduler, session.warm_start)


def _learn(session: _Session, cycle: UpdateCycle, progress: Progress | None) -> None:
    config, model = session.config, session.model
    first = model.num_timesteps
    limit = config.timesteps or NO_LIMIT
    monitor = EpisodeMonitor(
        str(config.out / MONITOR_FILE), {"t_start": time.time(), "env_id": ENV_IDS[config.env]}
    )

    def fraction() -> float:
        by_steps = (model.num_timesteps - first) / limit
        by_time = 0.0
        if config.minutes is not None:
            by_time = (time.monotonic() - session.start_s) / (60 * config.minutes)
        return max(by_steps, by_time)

    callbacks: list[BaseCallback] = [cycle, TimeLimit(session.deadline_s), monitor]
    if progress is not None:
        callbacks.append(ReportProgress(cycle, progress, session.start_s, fraction))
    try:
        model.learn(
            limit,
            CallbackList(callbacks),
            log_interval=None,  # type: ignore[arg-type] # `UpdateCycle` writes the log
            reset_num_timesteps=False,
        )
    finally:
        monitor.close()


def _export(session: _Session, decoder: Decoder, cycle: UpdateCycle) -> TrainResult:
    config, env, model = session.config, session.env, session.model
    elapsed_s = time.monotonic() - session.start_s
    warm = config.warm_start.scheduler
    training: dict[str, Any] = {
        "command": command_line(),
        "seed": config.seed,
        "minutes": round(elapsed_s / 60, 2),
        "updates": cycle.num_updates,
        "rounds": env.num_rounds,
        "decisions": env.num_decisions,
        "timesteps": model.num_timesteps,
        "warm_start": warm,
        "loads": cycle.loads,
        **_origin(config, decoder),
        "metrics": cycle.metrics,
        "config": config.to_dict(),
    }
    card = make_card(decoder, training, ENV_IDS[config.env])
    shrinkage = None if env.offsets is None else env.offsets.shrinkage
    policy_folder = export_policy(model, config.out / POLICY_FOLDER, card, shrinkage)
    sync_command = None
    if session.tracker is not None:
        session.tracker.log_policy(policy_folder, training, finished=not session.interrupted)
        sync_command = session.tracker.finish()
    return TrainResult(
        folder=config.out,
        policy_folder=policy_folder,
        interrupted=session.interrupted,
        num_updates=cycle.num_updates,
        num_rounds=env.num_rounds,
        num_decisions=env.num_decisions,
        num_timesteps=model.num_timesteps,
        elapsed_s=elapsed_s,
        metrics=cycle.metrics,
        warm_start=session.warm_start,
        sync_command=sync_command,
    )


def _origin(config: TrainConfig, decoder: Decoder) -> dict[str, Any]:
    """Where rounds and their times came from, for the card."""
    if isinstance(decoder, SpeculativeDecoder):
        machine = collect_device(str(decoder.target.device))
        dtype = dtype_name(decoder.target.dtype)
        return {"machine": f"{machine.get('gpu', machine['cpu'])}, {dtype}"}
    info, cost = decoder.trace.info, decoder.engine.cost
    trace: dict[str, Any] = {
        "name": config.replay.trace,
        "sha256": config.replay.trace_sha256,
        "temperature": info.temperature,
        "verification": info.verification,
        "requests": len(
            decoder.trace.rows("train", looping=None if config.replay.looping else False)
        ),
    }
    ground = "measured" if cost.measured else "modelled"
    return {
        "machine": f"replay of the trace {trace['name']} (sha256 {trace['sha256'][:12]}) at the prices "
        f"of the cost model {cost.name}: {cost.device}, {cost.dtype}, {ground}",
        "trace": trace,
        "cost_model": cost.to_dict(),
    }
