"""N-gram search over the running sequences, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdepth.scheduler.state import Bools, Floats, Ints

from .sequences import SequenceTable

MAX_NGRAM = 127
"""Match lengths are counted in int8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupConfig:
    """Which matches count."""

    max_ngram: int = 4
    """Longest suffix that is looked up; a longer match counts as this long."""
    min_ngram: int = 1
    """Shortest suffix whose match proposes anything."""
    max_length: int | None = None
    """Most tokens proposed; None is the engine's K."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= MAX_NGRAM:
            raise ValueError(
                f"n-gram lengths must be in 1..{MAX_NGRAM}, min_ngram up to max_ngram, got {self.min_ngram} "
                f"and {self.max_ngram}."
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """What was found. Arrays over the R slots searched."""

    token_ids: Ints
    """[R, K]; arbitrary from `lengths` on."""
    lengths: Ints
    match_lengths: Ints
    num_matches: Ints
    """Places with a match as long as the best."""
    agreement: Floats
    """Share of those that continue with the first proposed token."""


def find_matches(
    sequences: SequenceTable, slots: Ints, max_length: int, config: LookupConfig
) -> Matches:
    """Find the longest, then most recent, earlier occurrence of each sequence's last tokens.

    A match near the end runs on into the proposal itself (as in LZ77), so a text that repeats with a
    short period is continued for the full length.

    Args:
        sequences: token table.
        slots: [R] sequences to search.
        max_length: most tokens to propose.
        config: which matches count.
    """
    size = len(slots)
    limit = max_length if config.max_length is None else min(max_length, config.max_length)
    lengths = sequences.num_tokens[slots]
    width = int(lengths.max(initial=1))
    tokens = sequences.tokens[slots, :width]
    rows = np.arange(size)
    # score[r, p]: how many of the last tokens agree with the tokens ending at p.
    score = np.zeros((size, width), np.int8)
    running: Bools = np.arange(width) < lengths[:, None] - 1
    for back in range(config.max_ngram):
        suffix = tokens[rows, np.maximum(lengths - 1 - back, 0)]
        equal = np.zeros_like(running)
        equal[:, back:] = tokens[:, : width - back] == suffix[:, None]
        running = running & equal & (lengths > back)[:, None]
        if not running.any():
            break
        score += running
    best = score.max(1, initial=0).astype(np.int64)
    found = (best >= config.min_ngram) & (limit > 0)
    last = width - 1 - score[:, ::-1].argmax(1)  # most recent of the best
    period = np.maximum(lengths - 1 - last, 1)
    source = last[:, None] + 1 + np.arange(max_length) % period[:, None]
    proposed = tokens[rows[:, None], np.minimum(source, width - 1)]
    same = (score == best[:, None]) & found[:, None]
    num_matches = same.sum(1)
    agree = num_matches
    if max_length:
        follows = np.zeros_like(same)
        follows[:, :-1] = tokens[:, 1:] == proposed[:, :1]
        agree = (same & follows).sum(1)
    return Matches(
        token_ids=proposed,
        lengths=np.where(found, limit, 0),
        match_lengths=np.where(found, best, 0),
        num_matches=num_matches,
        agreement=np.where(found, agree / np.maximum(num_matches, 1), 0.0),
    )
