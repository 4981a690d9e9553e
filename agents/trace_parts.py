"""A recording that can be interrupted: parts in a folder beside the trace, joined at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdepth.decoder.trace import Trace
from specdepth.scheduler.files import write_atomic

from .results import check_writable

SETTINGS_FILE = "settings.json"

Row = Mapping[str, Any]
"""Prompt and output of a request, for the file beside the trace."""


class TraceParts:
    """Parts 0, 1, ... of a recording; each is there whole or not at all.

    Nothing is written before the first part.

    Args:
        out: file of the finished trace.
        settings: JSON values that decide what is recorded; parts made with others do not fit.

    Raises:
        ValueError: `out` exists, cannot be written to, or has parts of another recording.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.parts")
        self.texts_file = out.with_name(f"{out.name.removesuffix('.npz')}.texts.jsonl")
        for file in (out, self.texts_file):
            if file.exists():
                raise ValueError(f"{file} is there already; name another --out, or delete it.")
        check_writable(out)
        self._settings = json.loads(json.dumps(settings))
        if self.folder.exists():
            self._compare()
        self.num_done = 0
        while self._trace(self.num_done).exists():
            self.num_done += 1

    def add(self, trace: Trace, texts: Sequence[Row] | None = None) -> None:
        """Keep the next part.

        Args:
            trace: of its requests.
            texts: kept too, if given; each part or none has them.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            self._write(trace, texts)
        except OSError as error:
            raise ValueError(f"cannot write to {self.folder}: {error.strerror}.") from error

    def _write(self, trace: Trace, texts: Sequence[Row] | None) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            write_atomic(self.folder / SETTINGS_FILE, json.dumps(self._settings, indent=1) + "\n")
        if texts is not None:
            write_atomic(self._texts(self.num_done), _lines(texts))
        trace.save(self._trace(self.num_done))  # last: it says that the part is whole
        self.num_done += 1

    def join(self) -> Trace:
        """Write the parts as one trace, remove them, and return it.

        Raises:
            ValueError: a damaged part; the sentence names it.
            OSError: the trace cannot be written.
        """
        numbers = range(self.num_done)
        trace = Trace.concatenate([Trace.load(self._trace(number)) for number in numbers])
        texts = [self._texts(number) for number in numbers if self._texts(number).exists()]
        if texts:
            write_atomic(self.texts_file, "".join(part.read_text("utf-8") for part in texts))
        trace.save(self.out)
        shutil.rmtree(self.folder)
        return trace

    def _compare(self) -> None:
        file, settings = self.folder / SETTINGS_FILE, self._settings
        try:
            kept = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            kept = None
        if not isinstance(kept, dict):
            raise ValueError(
                f"{self.folder} holds no recording of specdepth; name another --out, or delete it."
            )
        differing = [
            f"{name} {kept.get(name)!r}, now {settings.get(name)!r}"
            for name in sorted({*kept, *settings})
            if kept.get(name) != settings.get(name)
        ]
        if differing:
            raise ValueError(
                f"{self.folder} holds parts recorded with other settings ({'; '.join(differing)}); "
                "use those, name another --out, or delete the folder."
            )

    def _trace(self, number: int) -> Path:
        return self.folder / f"{number:05}.npz"

    def _texts(self, number: int) -> Path:
        return self.folder / f"{number:05}.jsonl"


def _lines(texts: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in texts)
