"""Prompt lookup along whole texts at once: what `find_matches` finds at each position, in one sort a
length of n-gram instead of a search a token.

Legend: N texts, T tokens of all prompts and texts, M output positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdepth.scheduler.state import Ints

from .prompt_lookup import LookupConfig


def lookup_runs(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    max_length: int,
    config: LookupConfig,
) -> dict[str, Ints]:
    """Look up each position of `texts` in what comes before it.

    Position p is the state after prompt and p tokens of the text. Equal n-grams get equal numbers,
    length after length; of those with one number, the last before a position is its match.

    Args:
        prompts: N of at least one token each.
        texts: N, what followed them.
        max_length: most tokens to propose, K.
        config: which matches count.

    Returns:
        [M] arrays by the names that they have in a `Trace`: accepted, proposal_length, match_length,
        num_matches, num_agreeing.
    """
    limit = max_length if config.max_length is None else min(max_length, config.max_length)
    num_prompt = np.array([len(prompt) for prompt in prompts])
    lengths = num_prompt + np.array([len(text) for text in texts])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]
    parts = [
        np.asarray(part, np.int64) for pair in zip(prompts, texts, strict=True) for part in pair
    ]
    ids, tokens = np.unique(np.concatenate(parts), return_inverse=True)
    here = np.flatnonzero(offset >= num_prompt[owner])  # [M] the token that comes next
    last = here - 1
    match, num_matches, num_agreeing = (np.zeros(len(here), np.int64) for _ in range(3))
    source = here.copy()  # [M] where the match goes on
    group: Ints = owner
    longest: Ints = np.zeros(0, np.int64)  # positions with a match of the length before
    for length in range(1, config.max_ngram + 2):
        whole = np.flatnonzero(offset >= length - 1)  # ends of n-grams within their texts
        shorter = group[whole - (length > 1)]
        group, earlier, previous = (np.full(len(owner), -1, np.int64) for _ in range(3))
        group[whole], earlier[whole], before = _groups(shorter * len(ids) + tokens[whole])
        previous[whole] = np.where(before >= 0, whole[before], -1)
        # A match together with the token after it is the next longer n-gram; each earlier
        # occurrence of that is a match that agrees.
        num_agreeing[longest] = earlier[source[longest]] + 1
        if length > config.max_ngram:
            break
        longest = np.flatnonzero(previous[last] >= 0)
        match[longest] = length
        source[longest] = previous[last[longest]] + 1
        num_matches[longest] = earlier[last[longest]]
    found = match >= config.min_ngram
    counts = {"match_length": match, "num_matches": num_matches, "num_agreeing": num_agreeing}
    return {name: np.where(found, count, 0) for name, count in counts.items()} | {
        "proposal_length": np.where(found, limit, 0),
        "accepted": _runs(tokens, here, source, lengths[owner[here]] - offset[here], found, limit),
    }


def _groups(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Number equal keys alike.

    Returns:
        For each key its number, how many equal ones come before it, and the last of these or -1.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = ordered[1:] != ordered[:-1]
    places = np.arange(len(keys))
    number, earlier, previous = (np.empty(len(keys), np.int64) for _ in range(3))
    number[order] = np.cumsum(fresh) - 1
    earlier[order] = places - np.maximum.accumulate(np.where(fresh, places, 0))
    previous[order] = np.where(fresh, -1, np.roll(order, 1))
    return number, earlier, previous


def _runs(
    tokens: Ints, here: Ints, source: Ints, left: Ints, found: np.ndarray, limit: int
) -> Ints:
    """[M] leading tokens after `source` that the text at `here` goes on with, up to `limit`.

    A proposal that runs on into itself is compared with the text instead: as far as all before was
    right, they are the same.
    """
    runs: Ints = np.zeros(len(here), np.int64)
    alive = np.flatnonzero(found)
    for step in range(limit):
        alive = alive[left[alive] > step]
        alive = alive[tokens[here[alive] + step] == tokens[source[alive] + step]]
        runs[alive] += 1
    return runs
