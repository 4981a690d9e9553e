"""Tuned greedy rules on disk: JSON with the name of an estimator and the shrinkage by load."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdepth.checkpoints import shipped_names, shipped_path
from specdepth.scheduler.files import read_bounded, write_atomic

from .capped_greedy import CappedGreedyDepth, Shrinkage
from .survival_names import make_survival

FORMAT = "specdepth-greedy-rule"
FORMAT_VERSION = 1
_MAX_FILE_BYTES = 1 << 20


def shipped_rules() -> tuple[str, ...]:
    """Names of the tuned rules in the package."""
    return shipped_names("rules", ".json")


def save_greedy(
    path: str | os.PathLike[str], survival: str, rule: CappedGreedyDepth, **notes: Any
) -> None:
    """Write `rule` to `path`, whole or not at all.

    Args:
        path: a JSON file.
        survival: name of its estimator, for `make_survival`.
        rule: whose shrinkage is written.
        **notes: how it was tuned; kept, not read.
    """
    shrinkage = {str(load): asdict(rule.shrinkage[load]) for load in sorted(rule.shrinkage)}
    values = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "survival": survival,
        "shrinkage": shrinkage,
        "notes": notes,
    }
    write_atomic(Path(path), json.dumps(values, indent=1, allow_nan=False) + "\n")


def load_greedy(name: str, **fits: Any) -> CappedGreedyDepth:
    """Read a shipped rule or a file.

    Args:
        name: of a shipped rule, or a path.
        **fits: what the estimator must fit; see `make_survival`.

    Raises:
        ValueError: unknown, missing, oversized, damaged or foreign file; the sentence names it.
    """
    if name in shipped_rules():
        with shipped_path("rules", name, ".json") as path:
            return _load(path, fits)
    return _load(Path(name), fits)


def _load(path: Path, fits: dict[str, Any]) -> CappedGreedyDepth:
    try:
        values = json.loads(read_bounded(path, _MAX_FILE_BYTES).decode("utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'the field "format" must be "{FORMAT}".')
        if values.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format version {values.get('format_version')!r}, this specdepth reads "
                f"{FORMAT_VERSION}; tune it again."
            )
        shrinkage = {int(load): Shrinkage(**one) for load, one in values["shrinkage"].items()}
        return CappedGreedyDepth(make_survival(str(values["survival"]), **fits), shrinkage)
    except OSError as error:
        raise ValueError(f"cannot read rule {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot use rule {path}: {error}") from error
