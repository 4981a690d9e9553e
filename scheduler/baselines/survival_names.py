"""`make_survival`: from a name on a command line to a survival estimator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specdepth.checkpoints import shipped_names, shipped_path
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.survival import SurvivalEstimator
from specdepth.scheduler.survival_estimators import (
    EmaSurvival,
    MatchLengthSurvival,
    PositionSurvival,
)

SIMPLE: dict[str, Callable[[], SurvivalEstimator]] = {
    "match": MatchLengthSurvival,
    "positions": PositionSurvival,
    "ema": EmaSurvival,
    "confidence": ConfidenceSurvival,
}
"""Estimators that learn while they run."""


def shipped_survival_models() -> tuple[str, ...]:
    """Names of the fitted models in the package."""
    return shipped_names("survival")


def shipped_survival_for(model_pair: str, drafter: str) -> str | None:
    """Name of a shipped model that was fitted for this pair and drafter; None if there is none."""
    for name in shipped_survival_models():
        try:
            make_survival(name, model_pair=model_pair, drafter=drafter)
        except ValueError:
            continue
        return name
    return None


def make_survival(
    name: str, *, model_pair: str | None = None, drafter: str | None = None
) -> SurvivalEstimator:
    """Return the estimator that `name` means: one of `SIMPLE`, a shipped model, or a model's folder.

    Args:
        name: of the estimator.
        model_pair: refuse a model that was fitted for another pair.
        drafter: refuse a model that was fitted for another drafter.

    Raises:
        ValueError: an unknown name, or a model that does not fit.
    """
    if name in SIMPLE:
        return SIMPLE[name]()
    from specdepth.scheduler.survival_model import SurvivalModel  # the others need no safetensors

    def load(path: Path) -> SurvivalModel:
        return SurvivalModel.load(path, model_pair=model_pair, drafter=drafter)

    shipped = shipped_survival_models()
    if name in shipped:
        with shipped_path("survival", name) as path:
            return load(path)
    if name and Path(name).is_dir():
        return load(Path(name))
    known = ", ".join([*SIMPLE, *shipped])
    raise ValueError(
        f'unknown survival estimator "{name}"; there are {known}, and folders of fitted models.'
    )
