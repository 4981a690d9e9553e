"""Prompt lookup against a brute-force search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdepth.decoder.prompt_lookup import LookupConfig, find_matches
from specdepth.decoder.sequences import SequenceTable

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=6)


def table_of(sequences: list[list[int]], rng: np.random.Generator) -> SequenceTable:
    """Slots hold the sequences, and behind each the leftovers of an earlier one."""
    table = SequenceTable(len(sequences) + 1, 32)
    table.tokens[:] = rng.integers(0, 3, table.tokens.shape)
    for slot, tokens in enumerate(sequences):
        table.tokens[slot, : len(tokens)] = tokens
        table.num_tokens[slot] = len(tokens)
    return table


def search(tokens: list[int], limit: int, config: LookupConfig) -> dict[str, object]:
    """Longest suffix that occurs earlier, most recent occurrence first, by comparing slices."""
    for length in range(config.max_ngram, config.min_ngram - 1, -1):
        suffix = tokens[-length:]
        if len(suffix) < length:
            continue
        ends = [
            end
            for end in range(length, len(tokens))  # it ends before the suffix does
            if tokens[end - length : end] == suffix
        ]
        if not ends or limit == 0:
            continue
        text = list(tokens)
        while len(text) < len(tokens) + limit:  # runs on into what it has proposed, as LZ77 does
            text.append(text[ends[-1] + len(text) - len(tokens)])
        proposal = text[len(tokens) :]
        return {
            "proposal": proposal,
            "match_length": length,
            "num_matches": len(ends),
            "agreement": sum(tokens[end] == proposal[0] for end in ends) / len(ends),
        }
    return {"proposal": [], "match_length": 0, "num_matches": 0, "agreement": 0.0}


@given(
    sequences=texts,
    max_length=st.integers(0, 9),
    ngrams=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    own_limit=st.none() | st.integers(1, 12),
    seed=st.integers(0, 9),
)
@example(sequences=[[1]], max_length=8, ngrams=(1, 4), own_limit=None, seed=0)
@example(sequences=[[1, 1], [0, 1, 2] * 8], max_length=8, ngrams=(1, 4), own_limit=None, seed=0)
def test_it_finds_what_a_brute_force_search_finds(
    sequences: list[list[int]],
    max_length: int,
    ngrams: tuple[int, int],
    own_limit: int | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    config = LookupConfig(min_ngram=min(ngrams), max_ngram=max(ngrams), max_length=own_limit)
    slots = rng.permutation(len(sequences))
    found = find_matches(table_of(sequences, rng), slots, max_length, config)
    limit = max_length if own_limit is None else min(max_length, own_limit)
    assert found.token_ids.shape == (len(sequences), max_length)
    for row, slot in enumerate(slots):
        wanted = search(sequences[slot], limit, config)
        length = int(found.lengths[row])
        assert found.token_ids[row, :length].tolist() == wanted["proposal"]
        assert found.match_lengths[row] == wanted["match_length"]
        assert found.num_matches[row] == wanted["num_matches"]
        assert found.agreement[row] == pytest.approx(wanted["agreement"])


def one(tokens: list[int], max_length: int = 4, **config: int) -> list[int]:
    table = table_of([tokens], np.random.default_rng(0))
    found = find_matches(table, np.array([0]), max_length, LookupConfig(**config))
    proposal: list[int] = found.token_ids[0, : found.lengths[0]].tolist()
    return proposal


def test_a_longer_match_goes_before_a_more_recent_one() -> None:
    assert one([1, 2, 7, 9, 2, 8, 1, 2]) == [7, 9, 2, 8]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert one([1, 7, 1, 8, 1], max_length=1) == [8]


def test_a_short_period_is_continued_for_the_full_length() -> None:
    assert one([5, 6, 5, 6], max_length=7) == [5, 6, 5, 6, 5, 6, 5]


def test_a_match_shorter_than_min_ngram_proposes_nothing() -> None:
    assert one([1, 2, 3, 1], min_ngram=2) == []
    assert one([1, 2, 3, 1], min_ngram=1) == [2, 3, 1, 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_ngram": 0}, "n-gram lengths must be in"),
        ({"min_ngram": 3, "max_ngram": 2}, "got 3 and 2"),
        ({"max_ngram": 128}, r"in 1\.\.127"),
        ({"max_length": 0}, "max_length must be at least 1"),
    ],
)
def test_impossible_limits_are_refused(config: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupConfig(**config)


def test_the_longest_ngram_allowed_is_counted_right() -> None:
    table = SequenceTable(1, 512)
    table.tokens[0, :300] = np.tile(np.arange(150), 2)
    table.num_tokens[0] = 300
    found = find_matches(table, np.array([0]), 2, LookupConfig(max_ngram=127))
    assert found.match_lengths.tolist() == [127]
    assert found.token_ids.tolist() == [[0, 1]]
