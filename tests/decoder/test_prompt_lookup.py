"""Prompt lookup against a brute-force search."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdepth.decoder import prompt_lookup
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
        table.num_prompt[slot] = 1 + len(tokens) // 2
    return table


def search(tokens: list[int], limit: int, config: LookupConfig) -> dict[str, Any]:
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
            "match_agreement": sum(tokens[end] == proposal[0] for end in ends) / len(ends),
            "match_tokens": match_before(tokens, ends[-1]),
            "match_distance": len(tokens) - ends[-1],
            "source": ends[-1],
        }
    return {
        "proposal": [],
        "match_length": 0,
        "num_matches": 0,
        "match_agreement": 0.0,
        "match_tokens": 0,
        "match_distance": 0,
        "source": 0,
    }


def match_before(tokens: list[int], end: int) -> int:
    """Tokens before `end` that agree with the last ones, up to 16."""
    length = 0
    while length < min(end, 16) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def weigh(tokens: list[int], max_length: int, best: int) -> list[float]:
    """Agreement by its definition, with the proposal that goes on after `tokens[:best]`."""

    def go_on(source: int) -> list[int]:
        return [tokens[source + i % (len(tokens) - source)] for i in range(max_length)]

    ends = [end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]]
    weights = {end: match_before(tokens, end) ** 2 for end in ends}
    shares = []
    for depth in range(1, max_length + 1):
        agreeing = [end for end in ends if go_on(end)[:depth] == go_on(best)[:depth]]
        share = Fraction(sum(weights[end] for end in agreeing), sum(weights.values()))
        shares.append(round(255 * share) / 255)
    return shares


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
        assert found.match_agreement[row] == pytest.approx(wanted["match_agreement"])
        assert found.match_tokens[row] == wanted["match_tokens"]
        assert found.match_distance[row] == wanted["match_distance"]
        source, num_prompt = wanted["source"], 1 + len(sequences[slot]) // 2
        assert found.match_in_output[row] == (length > 0 and source >= num_prompt)
        agreement = weigh(sequences[slot], max_length, source) if length else [0.0] * max_length
        assert found.agreement[row].tolist() == agreement


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


def test_agreement_weighs_long_matches_over_many_short_ones() -> None:
    # After "1 2" came 5 6; after 2 alone came 5 7 twice. Weights 4, 1, 1.
    table = table_of([[1, 2, 5, 6, 2, 5, 7, 2, 5, 7, 1, 2]], np.random.default_rng(0))
    found = find_matches(table, np.array([0]), 2, LookupConfig())
    assert found.token_ids.tolist() == [[5, 6]]
    assert found.agreement.tolist() == [[1.0, 170 / 255]]  # all, then 4 of 6
    assert (found.match_tokens[0], found.match_distance[0]) == (2, 10)


def test_a_match_is_counted_beyond_the_longest_ngram_up_to_16() -> None:
    table = table_of([[*range(10), *range(10)], [*range(12)] * 2], np.random.default_rng(0))
    table.num_tokens[1] = 24
    found = find_matches(table, np.array([0, 1]), 2, LookupConfig(max_ngram=4))
    assert found.match_lengths.tolist() == [4, 4]
    assert found.match_tokens.tolist() == [10, 12]
    long = SequenceTable(1, 64)
    long.tokens[0, :40] = np.tile(np.arange(20), 2)
    long.num_tokens[0] = 40
    assert find_matches(long, np.array([0]), 2, LookupConfig()).match_tokens.tolist() == [16]


def test_a_proposal_from_the_output_is_told_from_one_of_the_prompt() -> None:
    # A place is in the output when the token after it is.
    table = table_of([[1, 7, 1, 8, 1]], np.random.default_rng(0))
    for num_prompt, is_output in ((3, True), (4, False)):
        table.num_prompt[0] = num_prompt
        found = find_matches(table, np.array([0]), 1, LookupConfig())
        assert found.match_in_output.tolist() == [is_output]


def test_a_shallower_engine_sees_the_first_columns() -> None:
    table = table_of(
        [[0, 1] * 12, [0, 1, 1, 2] * 5, [0, 0, 1, 0, 0, 2, 0]], np.random.default_rng(0)
    )
    deep, shallow = (find_matches(table, np.arange(3), top, LookupConfig()) for top in (8, 3))
    np.testing.assert_array_equal(shallow.agreement, deep.agreement[:, :3])
    own = find_matches(table, np.arange(3), 8, LookupConfig(max_length=3))
    np.testing.assert_array_equal(own.agreement, deep.agreement)
    assert own.lengths.tolist() == [3, 3, 3]


def test_how_many_pairs_are_compared_at_once_does_not_matter(monkeypatch: Any) -> None:
    table = table_of([[0, 1] * 12, [2] * 20, [0, 1, 1, 2] * 5], np.random.default_rng(0))
    whole = find_matches(table, np.arange(3), 8, LookupConfig())
    monkeypatch.setattr(prompt_lookup, "BLOCK", 3)
    parts = find_matches(table, np.arange(3), 8, LookupConfig())
    for name in ("token_ids", "match_tokens", "agreement"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
