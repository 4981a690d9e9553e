"""Prompt lookup along whole texts: what `find_matches` finds at each position, many positions at once.

Legend: N texts, M output positions, K most tokens proposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Ints

from .prompt_lookup import (
    BOUNDARY,
    LookupConfig,
    PlaceCounts,
    flat_tokens,
    leading_equal,
    weigh_places,
    windows,
)

MAX_PAIRS = 1 << 15
"""Pairs of a position and an earlier place weighed at once, unless one position has more; bounds the
memory."""


def lookup_runs(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    max_length: int,
    config: LookupConfig,
) -> dict[str, NDArray[Any]]:
    """Look up each position of `texts` in what comes before it.

    Position p is the state after prompt and p tokens of the text.

    Args:
        prompts: N of at least one token each.
        texts: N, what followed them.
        max_length: most tokens to propose, K, at least 1.
        config: which matches count.

    Returns:
        [M] arrays by the names that they have in a `Trace`: accepted, proposal_length, match_length,
        num_matches, num_agreeing, match_tokens, match_distance, match_in_output, and agreement, which
        is [M, K].
    """
    num_prompt = np.array([len(prompt) for prompt in prompts])
    lengths = num_prompt + np.array([len(text) for text in texts])
    first, flat, tokens = flat_tokens(int((lengths + 1).sum()), max_length, config)
    parts = [part for pair in zip(prompts, texts, strict=True) for part in ((BOUNDARY,), *pair)]
    np.concatenate([np.asarray(part, np.int64) for part in parts], out=tokens)
    starts = first + 1 + np.cumsum(lengths + 1) - (lengths + 1)
    owner = np.arange(len(lengths)).repeat(lengths)
    places = np.arange(len(owner)) + first + 1 + owner  # in `flat`, of each token
    output = places >= (starts + num_prompt)[owner]
    here, owner_here = places[output], owner[output]
    size, limit = len(here), config.limit(max_length)
    found: dict[str, NDArray[Any]] = {
        name: np.zeros(size, np.int64)
        for name in ("accepted", "proposal_length", "match_length", "num_matches", "num_agreeing")
    }
    found |= {name: np.zeros(size, np.int64) for name in ("match_tokens", "match_distance")}
    found["match_in_output"] = np.zeros(size, np.bool_)
    found["agreement"] = np.zeros((size, max_length), np.uint8)
    going_on = windows(flat, max_length)  # past a text stands what no proposal equals
    output_starts = (starts + num_prompt)[owner_here]
    for at, seen in _weighed(flat, places, owner, output, max_length, config):
        kept = np.flatnonzero(seen.match_lengths >= config.min_ngram)
        at = at[kept]
        proposed, distance = seen.token_ids[kept], seen.match_distance[kept]
        run = leading_equal(going_on, here[at], proposed, np.arange(len(at)))
        found["accepted"][at] = np.minimum(run, limit)
        found["proposal_length"][at] = limit
        found["match_length"][at] = seen.match_lengths[kept]
        found["num_matches"][at] = seen.num_matches[kept]
        found["num_agreeing"][at] = seen.num_agreeing[kept]
        found["match_tokens"][at] = seen.match_tokens[kept]
        found["match_distance"][at] = distance
        found["match_in_output"][at] = here[at] - distance >= output_starts[at]
        found["agreement"][at] = seen.agreement[kept]
    return found


def _weighed(
    flat: Ints,
    places: Ints,
    owner: Ints,
    output: NDArray[np.bool_],
    max_length: int,
    config: LookupConfig,
) -> Iterator[tuple[Ints, PlaceCounts]]:
    """Weigh the earlier places of the token before each output position, a bounded number at a time.

    Args:
        flat: see `weigh_places`.
        places: [T] in it, tokens of all texts.
        owner: [T] their texts.
        output: [T] whether they are output positions.
        max_length: K.
        config: which matches count.

    Yields:
        Output positions 0..M-1 with at least one place, and what their places show.
    """
    ids, numbers = np.unique(flat[places], return_inverse=True)
    keys = owner * len(ids) + numbers
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = ordered[1:] != ordered[:-1]
    ranks = np.arange(len(keys))
    group, rank = np.empty((2, len(keys)), np.int64)  # in `order`: first equal token, own place
    group[order] = np.maximum.accumulate(np.where(fresh, ranks, 0))
    rank[order] = ranks
    last = np.flatnonzero(output) - 1
    group, counts = group[last], rank[last] - group[last]
    some = np.flatnonzero(counts)
    batch = np.cumsum(counts[some]) // MAX_PAIRS
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(some)]
    sorted_places = places[order]
    for start, stop in pairwise(edges):
        at = some[start:stop]
        if not len(at):
            continue
        many = counts[at]
        offsets = np.arange(many.sum()) - (np.cumsum(many) - many - group[at]).repeat(many)
        ends = places[last[at]]
        yield at, weigh_places(flat, ends, many, sorted_places[offsets], max_length, config)
