"""N-gram search over the running sequences, all at once.

`find_matches` searches the sequences of a round; `weigh_places`, which it shares with `lookup_runs`, says
what a set of earlier places shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Bools, Floats, Ints

from .sequences import SequenceTable

MAX_NGRAM = 127
"""Longest n-gram that can be asked for."""
LONG_MATCH = 16
"""Tokens up to which the match of a place is counted to weigh it."""
AGREEMENT_STEPS = 255
"""Agreement is kept in so many steps, so that a byte of a trace holds it."""
BLOCK = 1024
"""Pairs of places compared at once, so that what is copied stays in the cache."""
BOUNDARY = -1
"""Stands before each text among flat tokens: equal to no token, so that no match passes it."""


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

    def limit(self, max_length: int) -> int:
        """Most tokens proposed in an engine whose K is `max_length`."""
        return max_length if self.max_length is None else min(max_length, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """What was found. Arrays over the R slots searched; all 0 where nothing is proposed."""

    token_ids: Ints
    """[R, K]; arbitrary from `lengths` on."""
    lengths: Ints
    match_lengths: Ints
    num_matches: Ints
    """Places with a match as long as the best."""
    match_agreement: Floats
    """Share of those that continue with the first proposed token."""
    agreement: Floats
    """[R, K] see `RoundState.agreement`."""
    match_tokens: Ints
    """Tokens that agree before the proposal, up to `LONG_MATCH`."""
    match_distance: Ints
    """Tokens from the place that is continued to the end."""
    match_in_output: Bools
    """Whether the proposal starts among the generated tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCounts:
    """What earlier places of a text's last token show. Arrays over Q ends of texts."""

    token_ids: Ints
    """[Q, K] continuation of the best place: longest match up to `max_ngram`, then most recent."""
    match_lengths: Ints
    """Its match, up to `max_ngram`."""
    match_tokens: Ints
    """The same up to `LONG_MATCH`."""
    match_distance: Ints
    """Tokens from it to the end."""
    num_matches: Ints
    num_agreeing: Ints
    agreement: NDArray[np.uint8]
    """[Q, K] in 1 / `AGREEMENT_STEPS`."""


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
    size, limit = len(slots), config.limit(max_length)
    lengths = sequences.num_tokens[slots]
    width = int(lengths.max(initial=1)) + 1
    first, flat, tokens = flat_tokens(size * width, max_length, config)
    table = tokens.reshape(size, width)
    table[:, 0] = BOUNDARY
    table[:, 1:] = sequences.tokens[slots, : width - 1]
    ends = np.arange(size) * width + lengths
    same = table == tokens[ends][:, None]
    same &= np.arange(width) < lengths[:, None]
    places = np.flatnonzero(same)
    counts = np.bincount(places // width, minlength=size)
    rows = np.flatnonzero(counts) if limit else np.zeros(0, np.int64)
    found: dict[str, Ints] = {
        name: np.zeros(size, np.int64)
        for name in ("match_lengths", "num_matches", "match_tokens", "match_distance")
    }
    token_ids = np.zeros((size, max_length), np.int64)
    steps = np.zeros((size, max_length), np.uint8)
    num_agreeing: Ints = np.zeros(size, np.int64)
    if len(rows):
        seen = weigh_places(
            flat, first + ends[rows], counts[rows], first + places, max_length, config
        )
        kept = seen.match_lengths >= config.min_ngram
        rows = rows[kept]
        for name, values in found.items():
            values[rows] = getattr(seen, name)[kept]
        num_agreeing[rows] = seen.num_agreeing[kept]
        token_ids[rows], steps[rows] = seen.token_ids[kept], seen.agreement[kept]
    is_found = found["match_lengths"] > 0
    source = lengths - found["match_distance"]
    return Matches(
        token_ids=token_ids,
        lengths=np.where(is_found, limit, 0),
        match_agreement=num_agreeing / np.maximum(found["num_matches"], 1),
        agreement=steps / AGREEMENT_STEPS,
        match_in_output=is_found & (source >= sequences.num_prompt[slots]),
        **found,
    )


def flat_tokens(size: int, max_length: int, config: LookupConfig) -> tuple[int, Ints, Ints]:
    """Room for the flat tokens of `weigh_places`.

    Returns:
        Where the tokens begin in the array, the array, and the view [size] of it that is to be filled.
    """
    first = max(config.max_ngram, LONG_MATCH)
    flat = np.full(first + size + max_length, BOUNDARY)
    return first, flat, flat[first : first + size]


def weigh_places(
    flat: Ints, ends: Ints, counts: Ints, places: Ints, max_length: int, config: LookupConfig
) -> PlaceCounts:
    """Compare earlier places of texts' last tokens: how far each matches, and how it goes on.

    A place counts with the square of its match up to `LONG_MATCH`: the more of the past it shares, the
    likelier it shares the future, and long matches are to outweigh the many short ones. A continuation
    that reaches the end goes on periodically.

    Args:
        flat: from `flat_tokens`, with `BOUNDARY` before each text.
        ends: [Q] in `flat`, last token of each text, or of the part of it that is looked at.
        counts: [Q] places of each, at least 1.
        places: [P] earlier tokens equal to that at the end, of one end after the other, rising.
        max_length: K, at least 1.
        config: which matches count.
    """
    num_ends, num_places = len(ends), len(places)
    row, end = np.arange(num_ends).repeat(counts), ends.repeat(counts)
    span = max(config.max_ngram, LONG_MATCH)
    # Backwards a place meets the boundary before its end does, so no match passes it.
    behind = windows(flat, span, backwards=True)
    match = leading_equal(behind, places - span + 1, behind, end - span + 1)
    ngram = np.minimum(match, config.max_ngram)
    long = np.minimum(match, LONG_MATCH)
    key = ngram * num_places + np.arange(num_places)
    best, picked = np.divmod(np.maximum.reduceat(key, np.cumsum(counts) - counts), num_places)
    distance, ahead = end - places, np.arange(max_length)
    proposed = flat[places[picked, None] + 1 + ahead % distance[picked, None]]
    run = leading_equal(windows(flat, max_length), places + 1, proposed, row)
    near = np.flatnonzero(distance < max_length)
    around = flat[places[near, None] + 1 + ahead % distance[near, None]]
    run[near] = leading_equal(around, np.arange(len(near)), proposed, row[near])
    # Sums of whole numbers: exact in float64.
    width = max_length + 1
    by_run = np.bincount(row * width + run, long * long, num_ends * width).reshape(-1, width)
    at_least = by_run[:, ::-1].cumsum(axis=1)[:, ::-1]
    same = ngram == best[row]
    return PlaceCounts(
        token_ids=proposed,
        match_lengths=best,
        match_tokens=long[picked],
        match_distance=distance[picked],
        num_matches=np.bincount(row[same], minlength=num_ends),
        num_agreeing=np.bincount(row[same & (run > 0)], minlength=num_ends),
        agreement=np.rint(AGREEMENT_STEPS * at_least[:, 1:] / at_least[:, :1]).astype(np.uint8),
    )


def windows(flat: Ints, size: int, *, backwards: bool = False) -> Ints:
    """[N, size] views of `flat`, one from each token on; a tenth of the time of `sliding_window_view`.

    Backwards, columns run from the last token of a window to its first.
    """
    (step,) = flat.strides
    shape = (len(flat) - size + 1, size)
    if backwards:
        return np.ndarray(shape, flat.dtype, flat, (size - 1) * step, (step, -step))
    return np.ndarray(shape, flat.dtype, flat, strides=(step, step))


def leading_equal(left: Ints, at: Ints, right: Ints, to: Ints) -> Ints:
    """[P] leading columns in which rows `at` of `left` and `to` of `right` are equal."""
    runs: Ints = np.empty(len(at), np.int64)
    for start in range(0, len(at), BLOCK):
        block = slice(start, start + BLOCK)
        pair = left[at[block]], right[to[block]]
        same = np.zeros((len(pair[0]), left.shape[1] + 1), np.bool_)
        np.equal(*pair, out=same[:, :-1])
        runs[block] = same.argmin(axis=1)
    return runs
