"""Policies that are fetched from Weights & Biases by name: "wandb:entity/project/name:alias"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.model_folder import CONFIG_FILE
from specdepth.scheduler.policy_file import WEIGHTS_FILE

from .track_policies import write_note
from .track_run import need_wandb

if TYPE_CHECKING:
    from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

PREFIX = "wandb:"
NAME = re.compile(r"wandb:(?:[^/:]+/){0,2}[^/:]+(?::[^/:]+)?")
"""With or without entity, project and alias."""
FILES = (WEIGHTS_FILE, CONFIG_FILE)
_MAX_FILE_BYTES = 1 << 26

Find = Callable[[str], Any]
"""From "entity/project/name:alias" to an artifact of wandb."""


def load_from_wandb(name: str) -> LearnedScheduler:
    """Fetch a policy and load it; nothing is kept.

    Args:
        name: "wandb:entity/project/name:alias"; without alias it is "latest".

    Raises:
        ValueError: as `fetch_policy`, or a policy that `LearnedScheduler.load` refuses.
    """
    with TemporaryDirectory(prefix="specdepth-policy-") as folder:
        return LearnedScheduler.load(fetch_policy(name, Path(folder)))


def fetch_names(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Schedulers' names, with what they name on W&B fetched into a folder of its own below `folder`.

    Returns:
        By each name, the name to make the scheduler by: "policy:FOLDER/..." for "policy:wandb:...".

    Raises:
        ValueError: as `fetch_policy`.
    """

    def fetched(match: re.Match[str]) -> str:
        place = folder / re.sub(r"[^A-Za-z0-9_.-]+", "-", match.group().removeprefix(PREFIX))
        return str(fetch_policy(match.group(), place))

    return {name: NAME.sub(fetched, name) for name in names}


def fetch_policy(name: str, folder: Path, find: Find | None = None) -> Path:
    """Download the two files that a policy is made of, and no other file of the artifact.

    They are data, and nothing of them is trusted: load them as any folder.

    Args:
        name: "wandb:entity/project/name:alias"; without alias it is "latest".
        folder: for them, made if needed.
        find: asks W&B; the real one by default.

    Returns:
        The folder.

    Raises:
        ValueError: no such name, wandb is missing or offline, no such artifact, or none of a policy.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f'no W&B policy {name!r}: expected "wandb:entity/project/name:alias".')
    wandb = need_wandb(f"the policy {name}")
    mode = os.environ.get("WANDB_MODE", "online")
    if find is None and mode not in ("online", "shared"):
        raise ValueError(
            f"cannot fetch {name} while WANDB_MODE is {mode}: unset it, or give the folder of the policy."
        )
    path = name.removeprefix(PREFIX)
    try:
        artifact = (find or _find)(path if ":" in path else f"{path}:latest")
        check_entries(artifact.manifest.entries)
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            artifact.get_entry(file).download(root=str(folder), skip_cache=True)
        # `qualified_name` may end with the alias that was asked for, which moves.
        place = artifact.qualified_name.partition(":")[0]
        found = f"{place}:{artifact.version}"
    except (wandb.errors.Error, ValueError, OSError) as error:  # those of requests are OSErrors
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"cannot fetch {name} from Weights & Biases: {reason}; check the name, the network, and "
            'that you are logged in ("wandb login").'
        ) from error
    write_note(folder, found)
    return folder


def check_entries(entries: Mapping[str, ArtifactManifestEntry]) -> None:
    """Refuse an artifact before its files are fetched.

    Raises:
        ValueError: the files of a policy are not there, are links to elsewhere, or are larger than
            policies are.
    """
    for file in FILES:
        entry = entries.get(file)
        if entry is None:
            raise ValueError(f"it is no policy: it has no {file}")
        if entry.ref is not None:  # would be read from any place that its author named
            raise ValueError(f"its {file} is a reference to another place, which is not followed")
        if (entry.size or 0) > _MAX_FILE_BYTES:
            raise ValueError(f"its {file} is larger than {_MAX_FILE_BYTES} bytes")


def _find(path: str) -> Any:
    import wandb

    return wandb.Api().artifact(path, type="model")
