"""Ragged rows: many sequences' token spans laid back to back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdepth.scheduler.state import Ints


@dataclass(frozen=True, slots=True)
class Spans:
    """N spans of a packed row of T tokens: sequence i computes positions
    `starts[i] .. starts[i] + lengths[i] - 1`.
    """

    starts: Ints
    """[N] first position of each."""
    lengths: Ints
    """[N] tokens of each, at least 1."""
    sequence: Ints
    """[T] which span each token belongs to."""
    positions: Ints
    """[T] position of each token in its sequence."""
    ends: Ints
    """[N] row after the last token of each."""


def pack(starts: Ints, lengths: Ints) -> Spans:
    """Lay spans back to back in the order given."""
    ends = np.cumsum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions = np.arange(total) + (starts - (ends - lengths))[sequence]
    return Spans(starts, lengths, sequence, positions, ends)


def prefill_pairs(starts: Ints, lengths: Ints) -> int:
    """Pairs of a prompt token and a key that it may look at, where sequence i computes `lengths[i]`
    prompt tokens (0 where none) after `starts[i]` earlier ones. As if each saw the last one's keys:
    what a kernel computes that masks, and in proportion to what one computes that skips.
    """
    return int(np.add.reduce(lengths * (starts + lengths)))


def tail_rows(spans: Spans, counts: Ints) -> Ints:
    """Rows of the last `counts[i]` tokens of each of the first len(counts) spans, in order."""
    ends = np.repeat(spans.ends[: len(counts)], counts)
    before_end = np.repeat(np.cumsum(counts), counts) - np.arange(int(counts.sum()))
    rows: Ints = ends - before_end
    return rows
