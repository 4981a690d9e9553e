"""Weights & Biases, for runs with `track`; nothing here runs, or is imported, without it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.logger import KVWriter

from .progress_csv import is_number
from .results import collect_versions
from .train_config import TrainConfig

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

logger = logging.getLogger(__name__)

ARTIFACT = "draft-depth-policy"


class WandbTracker(KVWriter):
    """Sends what stable-baselines3 logs to a W&B run, and in the end the exported policy.

    Follows `WANDB_MODE`: "offline" writes into the run's folder, "disabled" nothing.

    Args:
        config: becomes the run's configuration.
        folder: of the training run; W&B puts its own files below it.

    Raises:
        ValueError: wandb cannot be imported or used.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("track needs wandb; install it with: pip install wandb.") from error
        versions = [f"{name}-{version}" for name, version in collect_versions().items()]
        settings = config.wandb
        try:
            self._run: Run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                job_type="train",
                name=f"{config.env}-decode__{settings.group or 'ppo'}__{config.seed}__{folder.name}",
                tags=[*settings.tags, *versions],
                config=config.to_dict(),
                dir=str(folder),
                # Read now: wandb reads the environment once in a process.
                mode=os.environ.get("WANDB_MODE"),  # type: ignore[arg-type]
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"Weights & Biases cannot start ({error}); log in, or set WANDB_MODE=offline."
            ) from error

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Send one line of the log."""
        numbers = {key: float(value) for key, value in key_values.items() if is_number(value)}
        self._run.log(numbers, step=step)

    def log_policy(self, folder: Path, metadata: dict[str, Any], *, finished: bool) -> None:
        """Send an exported policy as a model artifact.

        Args:
            folder: of the policy.
            metadata: kept with the artifact.
            finished: whether training ran to its end, which adds the alias "final" to "latest".
        """
        import wandb

        artifact = wandb.Artifact(ARTIFACT, type="model", metadata=metadata)
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=["latest", "final"] if finished else ["latest"])

    def finish(self) -> str | None:
        """End the run.

        Returns:
            The command that sends an offline run later, to be shown to the user; None otherwise.
        """
        folder = str(Path(self._run.dir).parent)  # the run's `dir` is its `files`
        offline = self._run.offline
        self._run.finish()
        return f"wandb sync {folder}" if offline else None

    def fail(self) -> None:
        """End the run as one that failed; does nothing after `finish`."""
        self._run.finish(exit_code=1)

    def close(self) -> None:
        """The run goes on until `finish`."""
