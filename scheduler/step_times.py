"""Step times of another engine, read from CSV and fitted into a `CostModel`.

One row is one forward pass. The first line names the columns, in any order, separated by commas,
semicolons or tabs:

| column | also called | meaning |
|---|---|---|
| sequences | num_seqs, num_sequences, batch, batch_size, num_running | sequences in the pass |
| tokens | num_tokens, num_pass_tokens, num_scheduled_tokens, num_batched_tokens | tokens in the pass |
| depth | k, num_speculative_tokens | drafted tokens a sequence: tokens are sequences x (1 + depth) |
| context | context_length, context_len, seq_len | mean context length of a sequence, in tokens |
| context_tokens | num_context_tokens, total_context | the same, summed over the sequences |
| ms | time_ms, step_ms, step_time_ms, latency_ms | milliseconds of the pass |
| kind | phase | verify (the default; also decode), prefill, or draft |

`ms` and one of `sequences` and `tokens` are needed. Without `tokens` a sequence has one token, or 1 + depth;
without `sequences` each token is a sequence of its own. Without a context column the times are taken as
they are. Blank lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .cost import CostModel
from .cost_checks import MAX_PASS_TOKENS, MAX_SECONDS
from .curve import Curve
from .files import read_bounded

PassKind = Literal["verify", "prefill", "draft"]

SYNONYMS = {
    "sequences": ("num_seqs", "num_sequences", "batch", "batch_size", "num_running"),
    "tokens": ("num_tokens", "num_pass_tokens", "num_scheduled_tokens", "num_batched_tokens"),
    "depth": ("k", "num_speculative_tokens"),
    "context": ("context_length", "context_len", "seq_len"),
    "context_tokens": ("num_context_tokens", "total_context"),
    "ms": ("time_ms", "step_ms", "step_time_ms", "latency_ms"),
    "kind": ("phase",),
}
"""Column by its other names; upper case, blanks and hyphens do not matter."""

MAX_FILE_BYTES = 1 << 26
MAX_CONTEXT_TOKENS = 1 << 34
MAX_PAIRED = 256
"""Distinct contexts of one pass size that are compared with each other."""

_MAX_CONTEXT_SHARE = 0.95
"""A pass streams weights as well, so that context is never more than this part of its time, whatever a
noisy fit says."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One forward pass of an engine."""

    kind: PassKind
    sequences: int
    tokens: int
    context_tokens: int
    """Sum over the sequences."""
    seconds: float


def read_step_times(path: Path) -> list[StepTime]:
    """Read a CSV file of step times; the module describes its columns.

    Raises:
        ValueError: missing, oversized or empty file, unknown or missing columns, a cell that is no
            number or out of range; the sentence names the file, the line and the column.
    """
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read step times {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"cannot use step times {path}: {error}") from error
    rows = list(_rows(text))
    if len(rows) < 2:
        raise ValueError(
            f"step times {path} hold no passes; give a line of column names and a line a pass."
        )
    try:
        columns = _columns(rows[0][1])
        return [_step_time(_Row(line, cells, columns)) for line, cells in rows[1:]]
    except ValueError as error:
        raise ValueError(f"cannot use step times {path}: {error}") from error


def fit_step_times(steps: list[StepTime], *, name: str, device: str = "imported") -> CostModel:
    """Fit a cost model to measured passes.

    The price of a context token is the median slope of time over context among passes of one size
    (Theil 1950, Sen 1968; pairs weighted by their distance), which outliers do not move. What is left
    of each time is its pass size's; a size costs the median over its passes.

    A size that only verification passes or only prefill passes have takes the other price from its
    neighbours, so both kinds share one grid.

    Args:
        steps: at least one of the kind "verify".
        name: of the cost model.
        device: where they ran, for the record.

    Raises:
        ValueError: no verification pass, or times that `CostModel` refuses.
    """
    by_kind = {kind: [s for s in steps if s.kind == kind] for kind in get_args(PassKind)}
    verify, prefill, draft = by_kind["verify"], by_kind["prefill"], by_kind["draft"]
    if not verify:
        raise ValueError(f"step times {name}: none of the {len(steps)} passes is of kind verify.")
    context_s = _context_slope(verify)
    sizes, verify_s = _medians([s.tokens for s in verify], _without_context(verify, context_s))
    prefill_s: tuple[float, ...] = ()
    if prefill:
        verified = Curve(sizes, verify_s)
        own_sizes, own_s = _medians(
            [s.tokens for s in prefill], _without_context(prefill, context_s), first=0
        )
        prefilled = Curve(own_sizes, own_s)
        sizes = tuple(sorted({*sizes, *own_sizes}))
        verify_s = tuple(verified.at(n) for n in sizes)
        prefill_s = tuple(
            prefilled.at(n) if n >= own_sizes[0] else min(verified.at(n), own_s[0]) for n in sizes
        )
    draft_sequences, draft_s = _medians(
        [s.sequences for s in draft], np.array([s.seconds for s in draft])
    )
    return CostModel(
        name=name,
        device=device,
        dtype="unknown",
        measured=True,
        tokens=sizes,
        verify_s=verify_s,
        prefill_s=prefill_s,
        context_s=context_s,
        draft_sequences=draft_sequences,
        draft_s=draft_s,
    )


# ------------------------------------------------------------------------ reading


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that say something, with their numbers from 1 on."""
    lines = text.splitlines()
    header = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)
    for cells in reader:
        if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
            yield reader.line_num, [cell.strip() for cell in cells]


def _columns(header: list[str]) -> dict[str, int]:
    """Index of each known column."""
    names = {other: name for name, others in SYNONYMS.items() for other in (name, *others)}
    found: dict[str, int] = {}
    for index, cell in enumerate(header):
        name = names.get(cell.lower().replace(" ", "_").replace("-", "_"))
        if name is None:
            continue
        if name in found:
            raise ValueError(f"the columns {header[found[name]]!r} and {cell!r} mean the same.")
        found[name] = index
    if "ms" not in found or not {"sequences", "tokens"} & set(found):
        raise ValueError(
            'columns "ms" and "sequences" or "tokens" are needed, the first line has '
            f"{', '.join(map(repr, header))}."
        )
    if "depth" in found and "tokens" not in found and "sequences" not in found:
        raise ValueError('a column "depth" needs a column "sequences".')
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    cells: list[str]
    columns: dict[str, int]

    def text(self, column: str) -> str | None:
        """What stands in `column`; None if the file has no such column."""
        index = self.columns.get(column)
        if index is None:
            return None
        if index >= len(self.cells):
            raise ValueError(f"line {self.line} has no column {column!r}.")
        return self.cells[index]

    def number(self, column: str, low: float, high: float, whole: bool = True) -> float | None:
        text = self.text(column)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = np.nan
        if not low <= value <= high or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            raise ValueError(
                f"line {self.line}, column {column!r}: expected {kind} in {low:g}..{high:g}, "
                f"got {text!r}."
            )
        return value


def _step_time(row: _Row) -> StepTime:
    kind = (row.text("kind") or "verify").lower()
    kind = "verify" if kind == "decode" else kind
    if kind not in get_args(PassKind):
        raise ValueError(
            f"line {row.line}, column 'kind': expected verify, prefill or draft, got {kind!r}."
        )
    tokens = row.number("tokens", 1, MAX_PASS_TOKENS)
    sequences = row.number("sequences", 1, MAX_PASS_TOKENS)
    if sequences is None:
        sequences = tokens
    assert sequences is not None
    if tokens is None:
        tokens = sequences * (1 + (row.number("depth", 0, 1024) or 0))
    total = row.number("context_tokens", 0, MAX_CONTEXT_TOKENS)
    if total is None:
        mean = row.number("context", 0, MAX_CONTEXT_TOKENS, whole=False)
        total = (mean or 0) * sequences
    ms = row.number("ms", 1e-6, 1e3 * MAX_SECONDS, whole=False)
    assert ms is not None
    return StepTime(
        kind=kind,  # type: ignore[arg-type]
        sequences=int(sequences),
        tokens=int(tokens),
        context_tokens=round(total),
        seconds=ms / 1e3,
    )


# ------------------------------------------------------------------------ fitting


def _without_context(steps: list[StepTime], context_s: float) -> Floats:
    """Seconds of each pass less its context, float64 [n]."""
    seconds = np.array([s.seconds for s in steps])
    context = np.array([s.context_tokens for s in steps])
    return np.maximum(seconds - context_s * context, (1 - _MAX_CONTEXT_SHARE) * seconds)


def _medians(
    sizes: list[int], seconds: Floats, first: int = 1
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Median seconds of each size, ascending; the smallest one's stands for `first` too."""
    found = np.array(sizes, np.int64)
    grid = sorted(set(sizes))
    medians = [float(np.median(seconds[found == size])) for size in grid]
    if grid and first and grid[0] > first:
        return (first, *grid), (medians[0], *medians)
    return tuple(grid), tuple(medians)


def _context_slope(steps: list[StepTime]) -> float:
    """Seconds a context token, at least 0; 0 where no size was measured at two contexts."""
    sizes = np.array([s.tokens for s in steps])
    context = np.array([s.context_tokens for s in steps], np.float64)
    seconds = np.array([s.seconds for s in steps])
    slopes, weights = [np.zeros(0)], [np.zeros(0)]
    for size in np.unique(sizes):
        x, y = _by_context(context[sizes == size], seconds[sizes == size])
        i, j = np.triu_indices(len(x), 1)
        slopes.append((y[j] - y[i]) / (x[j] - x[i]))
        weights.append(x[j] - x[i])
    every, weight = np.concatenate(slopes), np.concatenate(weights)
    if not len(every):
        return 0.0
    order = np.argsort(every)
    middle = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return max(float(every[order][middle]), 0.0)


def _by_context(context: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Median seconds by distinct context, ascending; thinned out evenly to `MAX_PAIRED`."""
    distinct = np.unique(context)
    if len(distinct) > MAX_PAIRED:
        distinct = distinct[np.linspace(0, len(distinct) - 1, MAX_PAIRED).astype(np.int64)]
    return distinct, np.array([np.median(seconds[context == c]) for c in distinct])
