"""A training run on Weights & Biases; nothing here runs, and wandb is not imported, without `track`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.logger import KVWriter

from .progress_csv import is_number
from .track_policies import collection_name, log_policy
from .track_run import finish_run, start_run
from .train_config import TrainConfig

if TYPE_CHECKING:
    from .track_media import DepthCounts

DEPTHS = "depths"
"""Key in stable-baselines3's log of the `DepthCounts` of a rollout."""


class WandbTracker(KVWriter):
    """Sends what stable-baselines3 logs to a W&B run, and in the end the exported policy.

    Numbers are learning curves over time steps; depth counts become histograms, and at the end a heat map.
    Follows `WANDB_MODE`: "offline" writes into the run's folder, "disabled" nothing.

    Args:
        config: becomes the run's configuration.
        folder: of the training run; W&B puts its own files below it.

    Raises:
        ValueError: wandb cannot be imported or used.
    """

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        settings = config.wandb
        self._seed, self._artifact = config.seed, collection_name(settings.group)
        self._step = 0
        self._depths: DepthCounts = {}
        self._run = start_run(
            settings,
            "train",
            f"{config.env}-decode__{settings.group or 'ppo'}__{config.seed}__{folder.name}",
            config.to_dict(),
            folder,
        )

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Send one line of the log."""
        line: dict[str, Any] = {
            key: float(value) for key, value in key_values.items() if is_number(value)
        }
        depths = key_values.get(DEPTHS)
        if depths:
            from .track_media import depth_histograms

            line |= depth_histograms(depths)
            self._depths = depths
        self._step = step
        self._run.log(line, step=step)

    def log_policy(self, folder: Path, metadata: Mapping[str, Any], *, finished: bool) -> None:
        """Send an exported policy as a model artifact, and a map of the depths that led to it.

        Its aliases are "latest" and "run-ID", and if training ran to its end "final" and "seed-N".

        Args:
            folder: of the policy.
            metadata: kept with the artifact.
            finished: whether training ran to its end.
        """
        if self._depths:
            from .track_media import depth_image

            image = depth_image(self._depths, "last rollout")
            self._run.log({"depths/heat_map": image}, step=self._step)
        aliases = ["latest", "final", f"seed-{self._seed}"] if finished else ["latest"]
        log_policy(self._run, folder, self._artifact, metadata, aliases)

    def finish(self) -> str | None:
        """End the run.

        Returns:
            The command that sends an offline run later, to be shown to the user; None otherwise.
        """
        return finish_run(self._run)

    def fail(self) -> None:
        """End the run as one that failed; does nothing after `finish`."""
        finish_run(self._run, failed=True)

    def close(self) -> None:
        """The run goes on until `finish`."""
