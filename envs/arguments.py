"""Arguments of the environment, checked: each gives a value of one kind or a clear refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdepth.decoder.workload import Workload

from .workload_config import WorkloadConfig

WorkloadLike = Workload | WorkloadConfig | Mapping[str, Any]


def checked_workload(workload: WorkloadLike) -> Workload | WorkloadConfig:
    """Return `workload`, fields made into a `WorkloadConfig`.

    Raises:
        ValueError: unknown fields, values out of range, or something else.
    """
    if isinstance(workload, Mapping):
        try:
            return WorkloadConfig(**workload)
        except TypeError as error:
            known = ", ".join(WorkloadConfig.__dataclass_fields__)
            raise ValueError(f"workload: {error}; its fields are {known}.") from error
    if not isinstance(workload, Workload | WorkloadConfig):
        raise ValueError(f"workload must be a Workload or a WorkloadConfig, got {workload!r}.")
    return workload


def checked_rounds(max_rounds: int | None) -> int | None:
    """Return `max_rounds`, None or at least 1.

    Raises:
        ValueError: anything else.
    """
    if max_rounds is not None and max_rounds < 1:
        raise ValueError(f"max_rounds must be at least 1, got {max_rounds}.")
    return max_rounds


def checked_price(seconds: float | None) -> float | None:
    """Return seconds per token, None or a finite number of at least 0.

    Raises:
        ValueError: anything else.
    """
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds_per_token must be 0 or more, got {seconds}.")
    return None if seconds is None else float(seconds)
