"""Starts and ends a Weights & Biases run; wandb is imported here and nowhere earlier."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .results import collect_versions
from .track_config import TrackConfig

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


def need_wandb(purpose: str) -> ModuleType:
    """The package wandb.

    Raises:
        ValueError: it cannot be imported; says that `purpose` needs it.
    """
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"{purpose} needs wandb; install it with: pip install wandb.") from error
    return wandb


def start_run(
    settings: TrackConfig, job_type: str, name: str, config: Mapping[str, Any], folder: Path
) -> Run:
    """Start a run, with the package versions as tags.

    Follows `WANDB_MODE`: "offline" writes into `folder`, "disabled" nothing.

    Args:
        settings: where it goes.
        job_type: kind of run, unless `settings` name another.
        name: for people.
        config: settings of the command; what JSON cannot hold becomes text.
        folder: of the command's own files, made if needed; W&B puts its files below it.

    Raises:
        ValueError: wandb cannot be imported, or cannot start.
    """
    wandb = need_wandb("track")
    versions = [f"{package}-{version}" for package, version in collect_versions().items()]
    try:
        folder.mkdir(parents=True, exist_ok=True)  # wandb takes another place if it is not there
        run: Run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            job_type=settings.job_type or job_type,
            name=name,
            tags=[*settings.tags, *versions],
            config=json.loads(json.dumps(dict(config), default=str)),
            dir=str(folder.resolve()),  # it is W&B's own process that writes, wherever that may be
            # Read now: wandb reads the environment once in a process.
            mode=os.environ.get("WANDB_MODE"),
        )
    except (wandb.errors.Error, OSError) as error:
        raise ValueError(
            f"Weights & Biases cannot start ({error}); log in, or set WANDB_MODE=offline."
        ) from error
    return run


def finish_run(run: Run, *, failed: bool = False) -> str | None:
    """End a run; does nothing if it has ended.

    Returns:
        The command that sends an offline run later, to be shown to the user; None otherwise.
    """
    folder = str(Path(run.dir).parent)  # the run's `dir` is its `files`
    offline = run.offline and not run.disabled
    run.finish(exit_code=int(failed))
    return f"wandb sync {shlex.quote(folder)}" if offline else None
