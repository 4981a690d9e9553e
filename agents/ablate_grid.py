"""A grid of training runs: a base, and variants that differ from it in named settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdepth.scheduler.files import read_bounded

from .ablate_overrides import with_overrides
from .train_config import TrainConfig

FORMAT = "specdepth-ablation-grid"
FORMAT_VERSION = 1
BASE = "base"
"""Name of the variant without changes, and of its dimension."""
LOADS = (1, 2, 4, 8, 16, 32)
_MAX_FILE_BYTES = 1 << 20
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Raises:
        ValueError: a name that cannot be that of a folder.
    """

    name: str
    """Small letters, digits, "-", "_" and "."; also the name of its folder."""
    dimension: str
    """What is varied; variants of one dimension are shown together."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the base, by dotted path; see `with_overrides`."""

    def __post_init__(self) -> None:
        for what in ("name", "dimension"):
            text = getattr(self, what)
            if not isinstance(text, str) or not text or not set(text) <= _NAME_CHARACTERS:
                raise ValueError(
                    f'the {what} of a variant is made of small letters, digits, "-", "_" and ".", got '
                    f"{text!r}."
                )
        if self.name.startswith("."):
            raise ValueError(f"the name of a variant must not start with a dot, got {self.name!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Variants to train on the same seeds.

    Raises:
        ValueError: two variants of one name, numbers out of range.
    """

    name: str
    variants: tuple[Variant, ...]
    """Besides the base, which every grid has."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all runs, by dotted path."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of training; the same for all variants."""
    timesteps: int = 819_200
    """Of each run, by stable-baselines3's count, unless a variant has its own."""
    minutes: float = 3.0
    """Wall limit of the training of each run, which the timesteps should stay clear of."""
    loads: tuple[int, ...] = LOADS
    """Concurrent requests that policies are judged at, besides a day of all of them."""
    num_requests: int | None = None
    """Held-out requests that they are judged by; None takes all."""

    def __post_init__(self) -> None:
        names = [BASE, *(variant.name for variant in self.variants)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the grid has more than one variant {twice[0]!r}.")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are different whole numbers of at least 0, got {self.seeds}.")
        if self.timesteps < 1 or not self.minutes > 0:
            raise ValueError(
                f"timesteps and minutes must be above 0, got {self.timesteps} and {self.minutes}."
            )
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.num_requests}.")

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """The base, then the others."""
        return (Variant(name=BASE, dimension=BASE), *self.variants)

    def base_config(self, start: TrainConfig) -> TrainConfig:
        """Settings of the base: `start` with what the grid changes in all runs.

        The warm start may take all of the wall limit: cut short by a busy machine, the same seed would
        give another policy.

        Raises:
            ValueError: a setting that does not exist or does not take that value.
        """
        try:
            config = with_overrides(start, self.base)
        except ValueError as error:
            raise ValueError(f"base of grid {self.name}: {error}") from error
        bounds = {"timesteps": self.timesteps, "minutes": self.minutes, "warm_start.max_share": 1.0}
        return with_overrides(config, bounds)

    def configs(self, start: TrainConfig) -> dict[str, TrainConfig]:
        """Settings by variant, all of them made, so that a wrong one is found before the first run.

        Raises:
            ValueError: a setting that does not exist or does not take that value.
        """
        base, found = self.base_config(start), {}
        for variant in self.all_variants:
            try:
                found[variant.name] = with_overrides(base, variant.overrides)
            except ValueError as error:
                raise ValueError(f"variant {variant.name}: {error}") from error
        return found


def read_grid(path: Path) -> Grid:
    """Read a grid from a JSON file.

    Raises:
        ValueError: missing, damaged or foreign file, unknown fields, values out of range.
    """
    try:
        document = json.loads(read_bounded(path, _MAX_FILE_BYTES).decode("utf-8"))
        return grid_from_dict(document)
    except OSError as error:
        raise ValueError(f"cannot read grid {path}: {error.strerror}.") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot use grid {path}: {error}") from error


def grid_from_dict(document: Any) -> Grid:
    """A grid from JSON values, with the format in them.

    Raises:
        ValueError: another format or version, unknown fields, values out of range.
    """
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ValueError(f'this is no grid: the field "format" must be "{FORMAT}".')
    version = document.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise ValueError(f"format version {version!r}, this specdepth reads {FORMAT_VERSION}.")
    values = {k: v for k, v in document.items() if k not in ("format", "format_version")}
    variants = values.pop("variants", None)
    if not isinstance(variants, list):
        raise ValueError('"variants" must be a list of objects.')
    made = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Grid(variants=tuple(_made(Variant, one) for one in variants), **_checked(Grid, made))


def grid_to_dict(grid: Grid) -> dict[str, Any]:
    """What `grid_from_dict` reads."""
    document: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    document |= {one.name: getattr(grid, one.name) for one in fields(grid)}
    document["variants"] = [
        {one.name: getattr(variant, one.name) for one in fields(variant)}
        for variant in grid.variants
    ]
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain


def _made(kind: type[Variant], values: Any) -> Variant:
    return kind(**_checked(kind, values))


def _checked(kind: type, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"a {kind.__name__.lower()} must be an object, got {values!r}.")
    known = [one.name for one in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(
            f'a {kind.__name__.lower()} has no "{unknown[0]}"; it has {", ".join(known)}.'
        )
    return dict(values)
