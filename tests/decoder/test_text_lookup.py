"""Prompt lookup along whole texts, against a search at each position."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from specdepth.decoder.prompt_lookup import LookupConfig, find_matches
from specdepth.decoder.sequences import SequenceTable
from specdepth.decoder.text_lookup import lookup_runs

NAMES = ("accepted", "proposal_length", "match_length", "num_matches", "num_agreeing")


def by_search(
    prompt: list[int], text: list[int], top: int, config: LookupConfig
) -> dict[str, list[int]]:
    """The definition: at each position, `find_matches` on what is before it, token by token."""
    found: dict[str, list[int]] = {name: [] for name in NAMES}
    whole = prompt + text
    table = SequenceTable(1, len(whole))
    table.tokens[0] = whole
    for position in range(len(prompt), len(whole)):
        table.num_tokens[0] = position
        matches = find_matches(table, np.array([0]), top, config)
        proposal = matches.token_ids[0, : matches.lengths[0]].tolist()
        run = 0
        while proposal[run : run + 1] and proposal[run] == [*whole, -1][position + run]:
            run += 1
        found["accepted"].append(run)
        found["proposal_length"].append(len(proposal))
        found["match_length"].append(int(matches.match_lengths[0]))
        found["num_matches"].append(int(matches.num_matches[0]))
        found["num_agreeing"].append(round(matches.agreement[0] * matches.num_matches[0]))
    return found


pieces = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), min_size=1, max_size=20)


@given(
    pairs=st.lists(st.tuples(pieces, pieces), min_size=1, max_size=4),
    top=st.integers(1, 9),
    ngrams=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    own_limit=st.none() | st.integers(1, 12),
)
@example(pairs=[([1], [1])], top=8, ngrams=(1, 4), own_limit=None)
@example(pairs=[([0, 1] * 9, [0, 1] * 9)] * 2, top=8, ngrams=(1, 4), own_limit=None)
@example(pairs=[([1, 2], [3, 4]), ([1, 2], [3, 4])], top=8, ngrams=(1, 4), own_limit=None)
def test_each_position_gets_what_a_search_there_finds(
    pairs: list[tuple[list[int], list[int]]],
    top: int,
    ngrams: tuple[int, int],
    own_limit: int | None,
) -> None:
    config = LookupConfig(min_ngram=min(ngrams), max_ngram=max(ngrams), max_length=own_limit)
    prompts, texts = zip(*pairs, strict=True)
    found = lookup_runs(prompts, texts, top, config)
    each = [by_search(prompt, text, top, config) for prompt, text in pairs]
    wanted = {name: [value for one in each for value in one[name]] for name in NAMES}
    assert {name: values.tolist() for name, values in found.items()} == wanted


def only(prompt: list[int], text: list[int], **config: Any) -> dict[str, list[int]]:
    found = lookup_runs([prompt], [text], 4, LookupConfig(**config))
    return {name: values.tolist() for name, values in found.items()}


def test_a_worked_example() -> None:
    # 5 6 7 | 5 6 7 8: nothing repeats before the first 5; then "5" is followed by 6 7, and so on.
    found = only([5, 6, 7], [5, 6, 7, 8])
    assert found["match_length"] == [0, 1, 2, 3]
    assert found["accepted"] == [0, 2, 1, 0]
    assert found["proposal_length"] == [0, 4, 4, 4]
    assert found["num_matches"] == [0, 1, 1, 1]
    assert found["num_agreeing"] == [0, 1, 1, 1]


def test_matches_that_go_on_otherwise_do_not_agree() -> None:
    # Before the last token, 1 was followed by 7, 8, 8: two of three agree with the most recent.
    found = only([1, 7, 1, 8, 1, 8, 1], [8], max_ngram=1)
    assert (found["num_matches"], found["num_agreeing"]) == ([3], [2])


def test_a_run_ends_with_the_text() -> None:
    assert only([9, 1, 2, 3, 4, 9], [1, 2])["accepted"] == [2, 1]


def test_texts_do_not_see_each_other() -> None:
    alone = lookup_runs([[1, 2]], [[1, 2, 1]], 4, LookupConfig())
    among = lookup_runs([[1, 2]] * 3, [[1, 2, 1]] * 3, 4, LookupConfig())
    for name in NAMES:
        assert among[name].tolist() == alone[name].tolist() * 3
