"""Prompt lookup along whole texts, against a search at each position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdepth.decoder import text_lookup
from specdepth.decoder.prompt_lookup import LookupConfig, find_matches
from specdepth.decoder.sequences import SequenceTable
from specdepth.decoder.text_lookup import lookup_runs

NAMES = (
    *("accepted", "proposal_length", "match_length", "num_matches", "num_agreeing"),
    *("match_tokens", "match_distance", "match_in_output", "agreement"),
)


def by_search(
    prompt: list[int], text: list[int], top: int, config: LookupConfig
) -> dict[str, list[Any]]:
    """The definition: at each position, `find_matches` on what is before it, token by token."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    whole = prompt + text
    table = SequenceTable(1, len(whole))
    table.tokens[0], table.num_prompt[0] = whole, len(prompt)
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
        found["num_agreeing"].append(round(matches.match_agreement[0] * matches.num_matches[0]))
        found["match_tokens"].append(int(matches.match_tokens[0]))
        found["match_distance"].append(int(matches.match_distance[0]))
        found["match_in_output"].append(bool(matches.match_in_output[0]))
        # A trace holds whole steps, and replay divides them again: equal to the last bit.
        steps = np.rint(255 * matches.agreement[0])
        assert (steps / 255 == matches.agreement[0]).all()
        found["agreement"].append(steps.tolist())
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


@pytest.mark.parametrize("most", [1, 7, 50])
def test_how_many_pairs_are_weighed_at_once_does_not_matter(monkeypatch: Any, most: int) -> None:
    prompts, texts = [[0, 1, 1], [2, 2], [0]], [[0, 1] * 9, [2] * 12, [1, 0, 2]]
    whole = lookup_runs(prompts, texts, 8, LookupConfig())
    monkeypatch.setattr(text_lookup, "MAX_PAIRS", most)
    parts = lookup_runs(prompts, texts, 8, LookupConfig())
    for name in NAMES:
        np.testing.assert_array_equal(parts[name], whole[name], err_msg=name)


def only(prompt: list[int], text: list[int], **config: Any) -> dict[str, list[Any]]:
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
    assert found["match_tokens"] == [0, 1, 2, 3]
    assert found["match_distance"] == [0, 3, 3, 3]
    assert found["match_in_output"] == [False, False, False, True]
    assert found["agreement"] == [[0] * 4] + [[255] * 4] * 3


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
