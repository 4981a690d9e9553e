"""What commands print: progress to stderr, results to stdout, one JSON document with `--json`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from .tables import Grid

PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""
PLAIN_STEP = 0.1
"""Share between two progress lines where there is no terminal."""


class Update(Protocol):
    """Says how far something is."""

    def __call__(self, share: float, detail: str = "") -> None:
        """Take the share that is done, 0..1, and what is going on."""
        ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after what there was has been kept; the message says what."""


class Console:
    """Where a command writes.

    Args:
        as_json: stdout gets the JSON of `finish` and nothing else; what a person reads goes to
            stderr.
        quiet: no progress, results only.
        stdout, stderr: streams; those of the process by default.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.stdout, self.stderr = stdout or sys.stdout, stderr or sys.stderr
        self._results = self.stderr if as_json else self.stdout

    def say(self, text: str) -> None:
        """A line about what is going on."""
        if not self.quiet:
            print(text, file=self.stderr, flush=True)

    def show(self, text: str) -> None:
        """A line of the result."""
        if not (self.quiet and self.as_json):
            print(text, file=self._results, flush=True)

    def write(self, text: str) -> None:
        """A piece of the result, as it is."""
        if not (self.quiet and self.as_json):
            self._results.write(text)
            self._results.flush()

    def table(self, grid: Grid) -> None:
        """A table of the result."""
        if not (self.quiet and self.as_json):
            self._rich(self._results).print(grid.as_rich())

    def finish(self, result: Mapping[str, Any]) -> None:
        """The machine-readable result, last; nothing without `as_json`."""
        if self.as_json:
            print(json.dumps(result, allow_nan=False), file=self.stdout, flush=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Update]:
        """Show how far something is; yields a function of the share, 0..1, and a detail.

        A bar on a terminal; elsewhere, and where CI is set, a line at every tenth.
        """
        if self.quiet:
            yield _ignore
        elif self.stderr.isatty() and not os.environ.get("CI"):
            with self._bar(title) as update:
                yield update
        else:
            yield self._lines(title)

    def _lines(self, title: str) -> Update:
        start_s = time.monotonic()
        self.say(f"{title} ...")
        last = 0.0

        def update(share: float, detail: str = "") -> None:
            nonlocal last
            if share - last >= PLAIN_STEP - 1e-9:
                last = share
                text = f", {detail}" if detail else ""
                self.say(f"{title}: {share:.0%} after {time.monotonic() - start_s:.0f} s{text}")

        return update

    @contextmanager
    def _bar(self, title: str) -> Iterator[Update]:
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        with Progress(*columns, console=self._rich(self.stderr)) as bar:
            task = bar.add_task(escape(title), total=1.0, detail="")

            def update(share: float, detail: str = "") -> None:
                bar.update(task, completed=min(share, 1.0), detail=escape(detail))

            yield update

    def _rich(self, stream: TextIO) -> RichConsole:
        from rich.console import Console as RichConsole

        width = None if stream.isatty() else PLAIN_WIDTH
        return RichConsole(file=stream, width=width, highlight=False)


def _ignore(share: float, detail: str = "") -> None:
    """Progress that nobody wants to see."""
