"""Exported policies as W&B artifacts, and the note in a policy's folder that says which one it is.

A policy trained offline has no version number yet. It is named by the alias "run-ID", which the run that
made it gives it, and which is there once that run has been sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdepth.scheduler.files import read_bounded, write_atomic
from specdepth.scheduler.model_folder import CONFIG_FILE, UNREADABLE
from specdepth.scheduler.policy_file import POLICY, WEIGHTS_FILE

from .policy_card import CARD_FILE

if TYPE_CHECKING:
    from wandb import Artifact
    from wandb.sdk.wandb_run import Run

ARTIFACT = "draft-depth-policy"
NOTE_FILE = "wandb.json"
DESCRIPTION = ("model_pair", "drafter", "max_num_speculative_tokens", "weights_sha256")
"""Of a policy's configuration, what its artifact says as well."""
_MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOrigin:
    """Which policy a folder holds."""

    weights_sha256: str
    artifact: str | None = None
    """As W&B names it, "entity/project/name:alias"; None if it was never sent."""


def collection_name(group: str | None) -> str:
    """Name of the artifact whose versions are the policies of `group`."""
    if group is None:
        return ARTIFACT
    return f"{ARTIFACT}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', group)}"[:128]


def policy_artifact(folder: Path, name: str, metadata: Mapping[str, Any]) -> Artifact:
    """The policy in `folder` as an artifact that can be logged.

    It holds weights, configuration and card and nothing else, so that one policy is one version,
    whoever logs it.

    Raises:
        ValueError: no policy there.
    """
    import wandb

    config = _config(folder)
    made_for = {key: config[key] for key in DESCRIPTION}
    artifact = wandb.Artifact(name, type="model", metadata={**metadata, **made_for})
    for file in (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE):
        if (folder / file).is_file():
            artifact.add_file(str(folder / file), name=file)
    return artifact


def log_policy(
    run: Run, folder: Path, name: str, metadata: Mapping[str, Any], aliases: list[str]
) -> None:
    """Send a policy, named by `aliases` and by its run, and leave a note of it in `folder`.

    A note that is there stays: it says where the policy comes from.

    Raises:
        ValueError: no policy there.
    """
    made_by = f"run-{run.id}"
    run.log_artifact(policy_artifact(folder, name, metadata), aliases=[*aliases, made_by])
    if not run.disabled and policy_origin(folder).artifact is None:
        place = "/".join(part for part in (run.entity, run.project) if part)
        write_note(folder, f"{place}/{name}:{made_by}")


def write_note(folder: Path, artifact: str) -> None:
    """Say in `folder` that its policy is `artifact`."""
    origin = PolicyOrigin(artifact=artifact, weights_sha256=policy_origin(folder).weights_sha256)
    write_atomic(folder / NOTE_FILE, json.dumps(asdict(origin), indent=1) + "\n")


def policy_origin(folder: Path) -> PolicyOrigin:
    """What policy `folder` holds, and which artifact it is; a note of other weights does not count.

    Raises:
        ValueError: no policy there.
    """
    sha256 = str(_config(folder)["weights_sha256"])
    try:
        note = json.loads(read_bounded(folder / NOTE_FILE, _MAX_NOTE_BYTES).decode("utf-8"))
        found = PolicyOrigin(**note)
    except (OSError, TypeError, ValueError, RecursionError):
        return PolicyOrigin(weights_sha256=sha256)
    known = found.weights_sha256 == sha256 and isinstance(found.artifact, str)
    return found if known else PolicyOrigin(weights_sha256=sha256)


def policy_folder(name: str) -> Path | None:
    """Folder of the policy that a scheduler's name stands for, a guard around it or not; None for rules."""
    place = Path(name.removeprefix("guarded:").removeprefix("policy:"))
    return place if (place / WEIGHTS_FILE).is_file() else None


def _config(folder: Path) -> dict[str, Any]:
    try:
        return POLICY.read_config(folder)
    except UNREADABLE as error:
        raise POLICY.refusal(folder, error) from error
