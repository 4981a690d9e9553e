"""One cell of a grid: train on one seed and judge the policy, or judge the rules that all are compared with.

Each run has a folder of its own. It is done when `done.json` is there, which holds its results and the
settings that they belong to; anything else in it is left from an attempt that did not end.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdepth.scheduler.files import read_bounded

from .ablate_evaluation import Evaluation
from .ablate_overrides import differences
from .policy_card import git_sha
from .results import ResultRow, write_atomically
from .train_config import TrainConfig

if TYPE_CHECKING:
    from .train import TrainResult

DONE_FILE = "done.json"
ERROR_FILE = "error.txt"
TRAIN_FOLDER = "train"
FORMAT = "specdepth-ablation-run"
FORMAT_VERSION = 1
LEARNED = "learned"
SEARCHED = "searched"
"""Policy of the rows of what a search found, where PPO then started."""
_MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a run left."""

    rows: tuple[ResultRow, ...]
    training: Mapping[str, float]
    """Counts and wall time of the training; "short" is 1 where the wall limit cut it. Empty for rules."""
    settings: Mapping[str, Any]
    git_sha: str


class Run(Protocol):
    """A cell of the grid."""

    @property
    def folder(self) -> Path:
        """Of this run alone."""
        ...

    @property
    def title(self) -> str:
        """For progress and errors."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that its results depend on, as JSON values."""
        ...

    def measure(self) -> tuple[tuple[ResultRow, ...], dict[str, float]]:
        """Do the work: rows, and counts of the training."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Train one variant on one seed, then judge what was exported."""

    folder: Path
    variant: str
    config: TrainConfig
    """With its `out` in `folder`."""
    evaluation: Evaluation
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Variant and seed."""
        return f"{self.variant}, seed {self.config.seed}"

    def measure(self) -> tuple[tuple[ResultRow, ...], dict[str, float]]:
        """Train from the start, whatever an earlier attempt left, and replay the held-out requests.

        What a search before PPO found is judged too: it costs minutes to find and seconds to judge.

        Raises:
            KeyboardInterrupt: training was interrupted.
        """
        import torch

        from .offset_start import SEARCHED_FOLDER
        from .session import set_up_torch
        from .train import train

        if self.config.env == "live":
            set_up_torch(1, self.config.seed)
        else:
            torch.set_num_threads(1)  # without transformers, which replay has no use for
        if self.config.out.exists():
            shutil.rmtree(self.config.out)
        result = train(self.config)
        if result.interrupted:
            raise KeyboardInterrupt
        names = {f"policy:{result.policy_folder}": LEARNED}
        searched = self.config.out / SEARCHED_FOLDER
        if searched.is_dir():
            names[f"policy:{searched}"] = SEARCHED
        judged = self.evaluation.rows(list(names))
        rows = tuple(replace(row, policy=names[row.policy]) for row in judged)
        return rows, {
            "timesteps": result.num_timesteps,
            "updates": result.num_updates,
            "rounds": result.num_rounds,
            "decisions": result.num_decisions,
            "elapsed_s": result.elapsed_s,
            "short": float(_is_short(self.config, result)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """Judge rules that need no training."""

    folder: Path
    names: tuple[str, ...]
    evaluation: Evaluation
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What it is."""
        return "references"

    def measure(self) -> tuple[tuple[ResultRow, ...], dict[str, float]]:
        """Replay the held-out requests under each rule."""
        return self.evaluation.rows(self.names), {}


def _is_short(config: TrainConfig, result: TrainResult) -> bool:
    """Whether the wall limit ended it before its steps, or cut its warm start."""
    warm = result.warm_start
    return result.num_timesteps < (config.timesteps or 0) or (
        warm is not None and warm.num_rounds < config.warm_start.rounds
    )


def execute(run: Run) -> bool:
    """Do a run and write `done.json`, or what went wrong.

    Returns:
        Whether it is done. An error is kept in `error.txt`, its sentence last, so that the rest of a
        grid can go on.
    """
    error_file = run.folder / ERROR_FILE
    error_file.unlink(missing_ok=True)
    try:
        rows, training = run.measure()
    except Exception:
        write_atomically(error_file, traceback.format_exc())
        return False
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "git_sha": git_sha(),
        "settings": run.settings,
        "training": training,
        "rows": [asdict(row) for row in rows],
    }
    write_atomically(run.folder / DONE_FILE, json.dumps(document, indent=1) + "\n")
    return True


def read_done(run: Run) -> Done | None:
    """What `run` left when it was done; None if it is not.

    Raises:
        ValueError: a damaged file, or one of a run with other settings.
    """
    path = run.folder / DONE_FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(read_bounded(path, _MAX_FILE_BYTES).decode("utf-8"))
        if document["format"] != FORMAT or document["format_version"] != FORMAT_VERSION:
            raise ValueError(f"no {FORMAT} of version {FORMAT_VERSION}.")
        done = Done(
            rows=tuple(ResultRow(**row) for row in document["rows"]),
            training=dict(document["training"]),
            settings=dict(document["settings"]),
            git_sha=str(document["git_sha"]),
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot use {path}: {error}; delete it to do the run again.") from error
    changed = differences(done.settings, run.settings)
    if changed:
        raise ValueError(
            f"{run.folder} holds a run with another {', '.join(changed[:3])}"
            f"{' and more' if len(changed) > 3 else ''}; delete it to do it again, or choose another "
            "--out."
        )
    return done
