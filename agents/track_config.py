"""Where Weights & Biases puts a run: the settings that all commands with `--track` share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where Weights & Biases puts a run; used with `track` only."""

    project: str = "specdepth"
    """Project."""
    entity: str | None = None
    """User or team; None is the default one."""
    group: str | None = None
    """Runs that belong together, such as the seeds of one variant. Their policies are the versions of one
    artifact, which is named after it."""
    job_type: str | None = None
    """Kind of run; None is the command's own, "train" or "evaluate"."""
    tags: tuple[str, ...] = ()
    """Besides the package versions."""
