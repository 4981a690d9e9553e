"""An evaluation on Weights & Biases: tables, depths, and results as an artifact that names its policies."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console
from .results import Results, geometric_mean
from .session import config_of
from .track_policies import (
    ARTIFACT,
    PolicyOrigin,
    log_policy,
    policy_folder,
    policy_origin,
)
from .track_run import finish_run, start_run

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

    from .evaluate_command import Options

logger = logging.getLogger(__name__)

SUMMARY = ("throughput_tok_s", "speedup", "ratio_to_best_fixed", "mean_depth", "policy_ms")
"""Numbers of the policy in focus that stand in the run's summary, a key for each load."""
SCORE = "ratio_to_best_fixed"
"""By the geometric mean of this over loads one policy is better than another."""


class EvaluationTracker:
    """Sends results to a W&B run.

    Args:
        run: it.
        split: that policies are judged on. Only "train" may choose among them.
    """

    def __init__(self, run: Run, split: str) -> None:
        self._run, self._split = run, split
        self.logged = False

    def log(
        self, results: Results, files: Sequence[Path], focus: str | None, names: Mapping[str, str]
    ) -> None:
        """Send everything.

        Of several learned policies that were compared on the training split, the best is logged once
        more as a version of `ARTIFACT` with the alias "best". On held-out requests none is: to choose
        there would use them up.

        Args:
            results: the numbers.
            files: to keep as the artifact's content.
            focus: the policy whose depths and summary are shown.
            names: by each policy in `results`, the name that its scheduler was made by.
        """
        from .track_media import depth_counts, depth_histograms, depth_image, load_table, row_table

        shown: dict[str, Any] = {
            "eval/by_load": load_table(results),
            "eval/rows": row_table(results.rows),
        }
        if focus is not None:
            counts = depth_counts(results, focus)
            if counts:
                shown |= depth_histograms(counts)
                shown["depths/heat_map"] = depth_image(counts, focus)
        self._run.log(shown)
        if focus is not None:
            self._run.summary["eval/policy"] = focus
            for key, value in summary(results, focus).items():
                self._run.summary[key] = value
        folders = {
            name: folder
            for name, local in names.items()
            if name in results.policies and (folder := policy_folder(local)) is not None
        }
        origins = {name: policy_origin(folder) for name, folder in folders.items()}
        self._use(origins)
        self._log_files(results, files, origins)
        scores = {
            name: score for name in folders if (score := mean_score(results, name)) is not None
        }
        if self._split == "train" and len(scores) > 1:
            best = max(scores, key=scores.__getitem__)
            metadata = {SCORE: scores[best], **asdict(origins[best])}
            log_policy(self._run, folders[best], ARTIFACT, metadata, ["best"])
        self.logged = True

    def _use(self, origins: Mapping[str, PolicyOrigin]) -> None:
        """Say which artifacts were used, for W&B's graph of them; an offline run cannot."""
        import wandb

        self._run.config["used_policies"] = {k: asdict(v) for k, v in origins.items()}
        if self._run.offline or self._run.disabled:
            return
        for origin in origins.values():
            if origin.artifact is None:
                continue
            try:
                self._run.use_artifact(origin.artifact, type="model")
            except (wandb.errors.Error, ValueError) as error:  # its own run may not be sent yet
                logger.warning("the policy %s is not on W&B: %s", origin.artifact, error)

    def _log_files(
        self, results: Results, files: Sequence[Path], origins: Mapping[str, PolicyOrigin]
    ) -> None:
        import wandb

        artifact = wandb.Artifact(
            f"evaluation-{self._run.id}",
            type="evaluation",
            metadata={
                "command": results.command,
                "split": self._split,
                "policies": {name: asdict(origin) for name, origin in origins.items()},
            },
        )
        for file in files:
            artifact.add_file(str(file), name=file.name)
        self._run.log_artifact(artifact, aliases=["latest"])


@contextmanager
def tracked(options: Options, folder: Path, console: Console) -> Iterator[EvaluationTracker | None]:
    """A W&B run while an evaluation goes on; None without `track`.

    A run whose results were not logged has failed. After an offline run the user is told how to send it.

    Raises:
        ValueError: wandb cannot be imported, or cannot start.
    """
    if not options.track:
        yield None
        return
    name = f"evaluate-{options.mode}__{options.split}__{options.seed}__{folder.name}"
    run = start_run(options.wandb, "evaluate", name, config_of(options), folder)
    tracker = EvaluationTracker(run, options.split)
    try:
        yield tracker
    finally:
        command = finish_run(run, failed=not tracker.logged)
        if command is not None and tracker.logged:
            console.show(f"To send the offline W&B run: {command}")


def summary(results: Results, policy: str) -> dict[str, float]:
    """`SUMMARY` of a policy by load ("eval/speedup_at_4"), and its mean score."""
    found = {
        f"eval/{metric}_at_{load}": row.value
        for metric in SUMMARY
        for load in results.loads
        if (row := results.find(policy, load, metric)) is not None
    }
    score = mean_score(results, policy)
    return found if score is None else found | {f"eval/{SCORE}": score}


def mean_score(results: Results, policy: str) -> float | None:
    """Geometric mean of `SCORE` over loads; None where there is none."""
    rows = [results.find(policy, load, SCORE) for load in results.loads]
    values = [row.value for row in rows if row is not None]
    return geometric_mean(values) if values else None
