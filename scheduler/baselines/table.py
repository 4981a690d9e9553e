"""A depth for each batch size: what serving engines offer today.

Sources: vLLM's `num_speculative_tokens_per_batch_size` (#32374; `v1/spec_decode/dynamic/utils.py`)
and the `disable_by_batch_size` of its first engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specdepth.scheduler.files import read_bounded, write_atomic
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE

OPEN_END = 2**31 - 1
"""End of a range without one."""
_MAX_FILE_BYTES = 1 << 20
_MAX_RANGES = 4096


class TableDepth:
    """Depth by the number of running sequences, the same for all of them.

    As in vLLM: ranges are inclusive, a gap between two of them and everything above the last one
    inherit the depth below, and depths are cut to K. Only decoding sequences count: counting
    prefills too makes the depth flap (vLLM #49548).

    Args:
        ranges: (low, high, num_speculative_tokens), in any order, the lowest from 1 on.

    Raises:
        ValueError: no range, a range that is none, overlaps, a start other than 1, negative depth.
    """

    lawful_under = EVERY_RULE

    def __init__(self, ranges: Iterable[Sequence[int]]) -> None:
        self.ranges = _checked(ranges)
        """Sorted (low, high, depth)."""
        self._lows = np.array([low for low, _, _ in self.ranges], np.int64)
        self._depths = [depth for _, _, depth in self.ranges]

    @classmethod
    def disable_by_batch_size(
        cls, num_speculative_tokens: int, disable_by_batch_size: int
    ) -> TableDepth:
        """Draft `num_speculative_tokens` while fewer than `disable_by_batch_size` sequences run.

        Raises:
            ValueError: when the threshold is below 2, as in vLLM.
        """
        if disable_by_batch_size < 2:
            raise ValueError(f"disable_by_batch_size is 2 or more, got {disable_by_batch_size}.")
        return cls(
            [
                (1, disable_by_batch_size - 1, num_speculative_tokens),
                (disable_by_batch_size, OPEN_END, 0),
            ]
        )

    @classmethod
    def parse(cls, text: str) -> TableDepth:
        """Read "1-4=4,5-16=2,17-=0": ranges of batch sizes, the last one open, and their depths.

        Raises:
            ValueError: anything else; the sentence shows the form.
        """
        ranges = []
        for part in text.split(","):
            sizes, _, depth = part.partition("=")
            low, dash, high = sizes.partition("-")
            try:
                end = int(high) if high.strip() else OPEN_END if dash else int(low)
                ranges.append((int(low), end, int(depth)))
            except ValueError:
                raise ValueError(
                    f'"{part}" is no entry of a batch-size table; write "1-4=4,5-16=2,17-=0".'
                ) from None
        return cls(ranges)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> TableDepth:
        """Read vLLM's list of [low, high, depth], alone or under its key in a JSON object.

        Raises:
            ValueError: missing, oversized or damaged file, or no valid table; names the file.
        """
        path = Path(path)
        try:
            data = read_bounded(path, _MAX_FILE_BYTES)
            values: Any = json.loads(data.decode("utf-8"))
            if isinstance(values, dict):
                if "num_speculative_tokens_per_batch_size" not in values:
                    raise ValueError("it lacks the key num_speculative_tokens_per_batch_size.")
                values = values["num_speculative_tokens_per_batch_size"]
            if not isinstance(values, list):
                raise ValueError("it holds no list of [low, high, depth].")
            return cls(values)
        except OSError as error:
            raise ValueError(f"cannot read table {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot use table {path}: {error}") from error

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write vLLM's list to `path`, whole or not at all."""
        write_atomic(Path(path), json.dumps([list(entry) for entry in self.ranges]) + "\n")

    def depth_at(self, batch_size: int) -> int:
        """Depth for `batch_size` running sequences, before it is cut to K."""
        # Above a range's end its depth goes on until the next range starts, so starts decide alone.
        index = int(np.searchsorted(self._lows, batch_size, side="right"))
        return self._depths[max(index - 1, 0)]

    def choose(self, state: RoundState) -> Ints:
        """Return the table's depth for each sequence, int64 [R]."""
        depth = min(self.depth_at(state.num_running), state.max_num_speculative_tokens)
        return np.full(state.num_running, depth, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"TableDepth({list(self.ranges)})"


def _checked(ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    entries = []
    for entry in ranges:
        is_entry = isinstance(entry, Sequence | np.ndarray) and len(entry) == 3
        if not is_entry or not all(
            isinstance(value, int | np.integer) and not isinstance(value, bool) for value in entry
        ):
            raise ValueError(
                f"batch-size table: each entry is (low, high, depth), whole numbers, got {entry!r}."
            )
        low, high, depth = (int(value) for value in entry)
        if not 1 <= low <= high <= OPEN_END or depth < 0:
            raise ValueError(
                f"batch-size table: expected 1 <= low <= high and a depth of 0 or more, "
                f"got ({low}, {high}, {depth})."
            )
        entries.append((low, high, depth))
    entries.sort()
    if not 0 < len(entries) <= _MAX_RANGES:
        raise ValueError(f"batch-size table: 1 to {_MAX_RANGES} ranges, got {len(entries)}.")
    if entries[0][0] != 1:
        raise ValueError(
            f"batch-size table: the lowest range must start at 1, not at {entries[0][0]}."
        )
    for (low, high, _), (next_low, next_high, _) in pairwise(entries):
        if next_low <= high:
            raise ValueError(f"batch-size table: {low}-{high} and {next_low}-{next_high} overlap.")
    return tuple(entries)
