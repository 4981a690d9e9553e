"""Policies by name: those that come with specdepth, and folders."""

from __future__ import annotations

import os
from pathlib import Path

from specdepth.checkpoints import shipped_names, shipped_path

from .learned import LearnedScheduler
from .model_folder import CONFIG_FILE
from .policy_file import WEIGHTS_FILE


def shipped_policies() -> tuple[str, ...]:
    """Names of the policies that come with specdepth."""
    return shipped_names("policies")


def find_policy(
    path_or_name: str | os.PathLike[str],
    *,
    model_pair: str | None = None,
    drafter: str | None = None,
    max_num_speculative_tokens: int | None = None,
) -> LearnedScheduler:
    """Load the policy in a folder, or the shipped one of this name; a folder wins.

    Args:
        path_or_name: folder or name.
        model_pair: refuse a policy for another target and draft model; None takes any.
        drafter: refuse a policy for another kind of drafter; None takes any.
        max_num_speculative_tokens: refuse a policy for another K; None takes any.

    Raises:
        ValueError: neither; or what `LearnedScheduler.load` refuses.
    """

    def load(folder: Path) -> LearnedScheduler:
        return LearnedScheduler.load(
            folder,
            model_pair=model_pair,
            drafter=drafter,
            max_num_speculative_tokens=max_num_speculative_tokens,
        )

    folder, names = Path(path_or_name), shipped_policies()
    if folder.is_dir():
        return load(folder)
    if os.fspath(path_or_name) not in names:
        raise ValueError(
            f"no policy {os.fspath(path_or_name)!r}: expected a folder with {WEIGHTS_FILE} and "
            f"{CONFIG_FILE}, or one of these names: {', '.join(names) or '(none yet)'}."
        )
    with shipped_path("policies", os.fspath(path_or_name)) as shipped:
        return load(shipped)
