"""`specdepth export`: from a training run's checkpoint to what the decoder runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .console import Console
from .options import CommonOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(CommonOptions):
    """Export a policy from the checkpoint of a training run.

    "specdepth train" exports at its end and on Ctrl-C; this is for a run that was killed, or to put the
    policy elsewhere. Writes policy.safetensors, config.json and a model card. Loads pickled objects,
    so export your own runs only; what it writes is data alone.

    specdepth export runs/mine --out policies/mine
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the training run; the policy goes to its policy/ or to --out."""


def run(options: Options, console: Console) -> None:
    """Export.

    Raises:
        ValueError: no run, a damaged checkpoint, a place that cannot be written to.
    """
    from .policy_card import make_card
    from .results import check_output_folder, command_line
    from .session import set_up_torch
    from .train_config import TrainConfig

    config = TrainConfig.load(options.run)
    folder = options.out if options.out is not None else options.run / "policy"
    check_output_folder(folder)
    set_up_torch(options.threads, config.seed)
    from .checkpoint import load_checkpoint
    from .export import export_policy
    from .train import make_decoder, make_env

    console.say("Loading pickled objects of a run: export your own runs only.")
    decoder = make_decoder(config)
    env = make_env(config, decoder)
    try:
        checkpoint = load_checkpoint(options.run, env)
        training = {
            "command": command_line(),
            "seed": config.seed,
            "updates": checkpoint.num_updates,
            "rounds": env.num_rounds,
            "decisions": env.num_decisions,
            "timesteps": checkpoint.model.num_timesteps,
            "warm_start": config.warm_start.scheduler,
            "loads": list(checkpoint.loads),
            "config": config.to_dict(),
        }
        card = make_card(decoder, training)
        export_policy(checkpoint.model, folder, card)
    finally:
        env.close()
    console.show(f"Policy: {folder}")
    console.finish({"policy": str(folder), "run": str(options.run)})
