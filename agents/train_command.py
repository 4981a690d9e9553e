"""`specdepth train`: PPO on the running decoder, or on a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .console import Console, Interrupted
from .train_config import TrainConfig

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

    from .callbacks import TrainProgress
    from .train import TrainResult

PROFILE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Train a policy with PPO while the decoder serves training prompts, live or replayed, and export it.

    All sequences share one policy, so it works for any batch size. The run's folder gets settings,
    learning curve, checkpoint, pass times, and in policy/ what the decoder runs. Ctrl-C keeps what
    there is; --resume goes on.

    specdepth train --minutes 20 --out runs/mine --warm-start.scheduler table:1-2=4,3-8=2,9-=1

    specdepth train --env replay --trace my.npz --cost cost.json --minutes 5 --out runs/replayed

    specdepth evaluate --policies policy:runs/mine/policy
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """Settings of the run."""
    trace: str | None = None
    """The same as --replay.trace: file or shipped name of a trace."""
    cost: Path | None = None
    """The same as --decoder.cost: file or shipped name of a cost model."""
    resume: Path | None = None
    """Go on with the run in this folder, by its own settings; only --minutes, --timesteps and --track
    are taken from here. Loads pickled objects, so resume your own runs only."""
    device: str | None = None
    """The same as --decoder.device: "cpu", "cuda" or "cuda:1"."""
    threads: int = 1
    """Threads of torch on the CPU; one is steadier than two where cores are shared."""
    json: bool = False
    """Print the result as one JSON document on stdout, and everything else on stderr."""
    quiet: bool = False
    """No progress, results only."""
    debug: bool = False
    """Show where an error came from."""

    def __post_init__(self) -> None:
        if self.resume is not None:
            return
        trace, cost = self.trace or self.config.replay.trace, self.cost or self.config.decoder.cost
        if self.config.env == "live" and trace is not None:
            raise ValueError("--trace is for training on replay; add --env replay.")
        if self.config.env == "replay" and (trace is None or cost is None):
            raise ValueError("--env replay needs a trace and a cost model: --trace and --cost.")


def run(options: Options, console: Console) -> None:
    """Train and export.

    Raises:
        ValueError: bad options, a folder that holds another run.
        Interrupted: after Ctrl-C; checkpoint and policy are kept.
    """
    config = settings(options)
    if options.resume is not None:
        console.say("Loading pickled objects of a run: resume your own runs only.")
    else:
        check_new_run(config.out)
    decoder = None
    if config.env == "live":
        config, decoder = _prepare_live(config, options, console)
    else:
        _set_up_policy(options.threads, config.seed)
    from .train import train

    with console.progress("Training") as update:
        result = train(
            config,
            decoder,
            progress=lambda at: update(at.fraction, describe(at)),
            resume=options.resume is not None,
        )
    _conclude(console, result)


def settings(options: Options) -> TrainConfig:
    """Settings of the run that `options` ask for; those of the run to resume, if there is one.

    Raises:
        ValueError: no run to resume.
    """
    config = options.config
    if options.resume is not None:
        from .train import resumed_config

        return resumed_config(
            options.resume,
            minutes=config.minutes,
            timesteps=config.timesteps,
            track=config.track,
        )
    decoder, replay = config.decoder, config.replay
    if options.device is not None:
        decoder = replace(decoder, device=options.device)
    if options.cost is not None:
        decoder = replace(decoder, cost=options.cost)
    if options.trace is not None:
        replay = replace(replay, trace=options.trace)
    return replace(config, decoder=decoder, replay=replay)


def _prepare_live(
    config: TrainConfig, options: Options, console: Console
) -> tuple[TrainConfig, SpeculativeDecoder]:
    """Load the decoder, and measure its passes if nobody did."""
    from specdepth.decoder.default_model import default_model_path

    from .profile_command import COST_FILE, measure_cost
    from .session import make_folder, set_up_torch

    set_up_torch(options.threads, config.seed)
    from .train import make_decoder

    if config.decoder.target == "default":
        default_model_path(progress=console.say)
    cost_file = config.out / COST_FILE
    if options.resume is not None and cost_file.is_file():
        # Where the run is now, which may not be where it was made.
        config = replace(config, decoder=replace(config.decoder, cost=cost_file))
    decoder = make_decoder(config)
    if options.resume is None and config.decoder.cost is None:
        with console.progress("Measuring passes") as update:
            cost = measure_cost(decoder, PROFILE_SECONDS, config.seed, update)
        make_folder(config.out)
        cost.save(cost_file)
        config = replace(config, decoder=replace(config.decoder, cost=cost_file))
    return config, decoder


def _set_up_policy(threads: int, seed: int) -> None:
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}.")
    import torch  # all that a policy needs; no transformers

    torch.set_num_threads(threads)
    torch.manual_seed(seed)


def check_new_run(folder: Path) -> None:
    """Refuse a folder that cannot take a new run, before any work.

    Raises:
        ValueError: it cannot be written to, or holds a run.
    """
    from .results import check_output_folder
    from .train_config import CONFIG_FILE

    check_output_folder(folder, CONFIG_FILE)
    if (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} already holds a run; choose another --out, or go on with --resume {folder}."
        )


def describe(at: TrainProgress) -> str:
    """How far training is, in a few words."""
    speed = at.metrics.get("throughput_tok_s")
    shown = "" if speed is None else f", {speed:.0f} tok/s"
    return f"{at.stage}, {at.num_updates} updates, {at.num_rounds} rounds{shown}"


def _conclude(console: Console, result: TrainResult) -> None:
    console.show(
        f"{result.num_updates} updates on {result.num_decisions} decisions in {result.num_rounds} "
        f"rounds, {result.elapsed_s:.0f} s. Policy: {result.policy_folder}"
    )
    if result.sync_command is not None:
        console.show(f"To send the offline W&B run: {result.sync_command}")
    console.finish(
        {
            "folder": str(result.folder),
            "policy": str(result.policy_folder),
            "interrupted": result.interrupted,
            "num_updates": result.num_updates,
            "num_rounds": result.num_rounds,
            "num_decisions": result.num_decisions,
            "num_timesteps": result.num_timesteps,
            "elapsed_s": result.elapsed_s,
            "metrics": result.metrics,
        }
    )
    if result.interrupted:
        raise Interrupted(
            f"interrupted; checkpoint and policy are in {result.folder}, go on with "
            f"--resume {result.folder}."
        )
    console.say(f"Compare it with: specdepth evaluate --policies policy:{result.policy_folder}")
