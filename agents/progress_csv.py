"""The learning curve: `progress.csv`, a line an update, which goes on when a run is resumed."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter

from .results import write_atomically


class ProgressCsv(KVWriter):
    """A logger output. stable-baselines3's own CSV output empties the file when it is opened.

    Args:
        path: read first if it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self._rows = list(csv.DictReader(file))

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Add a line; the file is replaced as a whole, so that it can be read at any time."""
        self._rows.append(
            {key: f"{value}" for key, value in sorted(key_values.items()) if is_number(value)}
        )
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self.path, text.getvalue())

    def close(self) -> None:
        """Nothing is open."""


def is_number(value: Any) -> bool:
    """Whether a logged value is one number (numpy's included)."""
    return hasattr(value, "__float__") and not isinstance(value, bool)
