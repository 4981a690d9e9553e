from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.scheduler.baselines import TableDepth


def depths_of(table: TableDepth, up_to: int) -> list[int]:
    return [table.depth_at(size) for size in range(1, up_to + 1)]


def test_ranges_are_inclusive() -> None:
    table = TableDepth([(1, 2, 4), (3, 4, 2)])
    assert depths_of(table, 4) == [4, 4, 2, 2]


def test_a_gap_inherits_the_depth_below() -> None:
    assert depths_of(TableDepth([(1, 2, 4), (5, 6, 1)]), 6) == [4, 4, 4, 4, 1, 1]


def test_above_the_last_range_its_depth_goes_on() -> None:
    assert TableDepth([(1, 2, 4), (3, 4, 2)]).depth_at(500) == 2


def test_order_of_the_entries_does_not_matter() -> None:
    table = TableDepth([(5, 8, 1), (1, 4, 3)])
    assert table.ranges == ((1, 4, 3), (5, 8, 1))


def test_all_sequences_get_the_depth_of_the_batch_size(make_state: Any) -> None:
    table = TableDepth([(1, 3, 4), (4, 8, 1)])
    assert table.choose(make_state(3)).tolist() == [4] * 3
    assert table.choose(make_state(4)).tolist() == [1] * 4
    assert table.choose(make_state(0)).tolist() == []


def test_depths_are_cut_to_the_limit_as_in_vllm(make_state: Any) -> None:
    assert TableDepth([(1, 8, 7)]).choose(make_state(2, 5)).tolist() == [5, 5]


def test_prefilling_and_waiting_requests_do_not_count(make_state: Any) -> None:
    table = TableDepth([(1, 3, 4), (4, 8, 1)])
    state = make_state(3, num_waiting=20, num_prefill_tokens=512)
    assert table.choose(state).tolist() == [4] * 3


def test_disable_by_batch_size_stops_at_the_threshold() -> None:
    table = TableDepth.disable_by_batch_size(5, 4)
    assert depths_of(table, 6) == [5, 5, 5, 0, 0, 0]


def test_disable_by_batch_size_needs_a_threshold_of_two() -> None:
    with pytest.raises(ValueError, match="2 or more, got 1"):
        TableDepth.disable_by_batch_size(5, 1)


@st.composite
def tables(draw: Any) -> list[tuple[int, int, int]]:
    ranges, low = [], 1
    for _ in range(draw(st.integers(1, 6))):
        high = low + draw(st.integers(0, 5))
        ranges.append((low, high, draw(st.integers(0, 8))))
        low = high + 1 + draw(st.integers(0, 4))
    return ranges


@given(tables())
def test_look_up_equals_the_expanded_table(ranges: list[tuple[int, int, int]]) -> None:
    # vLLM expands the ranges into one entry a batch size
    dense: dict[int, int] = {}
    for low, high, depth in ranges:
        dense.update(dict.fromkeys(range(low, high + 1), depth))
    current = -1
    for size in range(1, 80):
        current = dense.get(size, current)
        assert TableDepth(ranges).depth_at(size) == current


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([], "1 to 4096 ranges, got 0"),
        ([(2, 4, 1)], "must start at 1, not at 2"),
        ([(1, 4, 2), (4, 8, 1)], "1-4 and 4-8 overlap"),
        ([(1, 8, 2), (2, 3, 1)], "overlap"),
        ([(4, 1, 2)], "1 <= low <= high"),
        ([(0, 4, 2)], "1 <= low <= high"),
        ([(1, 4, -1)], "depth of 0 or more"),
        ([(1, 4)], "each entry is"),
        ([(1, 4, 2.0)], "each entry is"),
        ([(1, True, 2)], "each entry is"),
        (["1-4"], "each entry is"),
        ([5], "each entry is"),
    ],
)
def test_bad_tables_are_refused(ranges: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TableDepth(ranges)


def test_the_text_form_is_read() -> None:
    table = TableDepth.parse("1-4=4, 5-16=2 ,17-=0")
    assert [entry[0] for entry in table.ranges] == [1, 5, 17]
    assert [table.depth_at(size) for size in (4, 5, 16, 17, 10_000)] == [4, 2, 2, 0, 0]


def test_a_single_size_is_a_range() -> None:
    assert depths_of(TableDepth.parse("1=5,2=1"), 3) == [5, 1, 1]


@pytest.mark.parametrize("text", ["", "4", "1-4", "1-4=", "=4", "a-b=c", "1-4=4,", "1-4=4;5-6=2"])
def test_bad_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="1-4=4,5-16=2,17-=0"):
        TableDepth.parse(text)


def test_json_round_trip_is_the_list_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = TableDepth([(1, 4, 4), (5, 16, 2)])
    table.to_json(path)
    assert json.loads(path.read_text()) == [[1, 4, 4], [5, 16, 2]]
    assert TableDepth.from_json(path).ranges == table.ranges
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_json_may_be_a_speculative_config_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 4]]}')
    assert TableDepth.from_json(path).ranges == ((1, 4, 4),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("{}", "lacks the key num_speculative_tokens_per_batch_size"),
        ("5", "holds no list"),
        ("[[1, 4, 2], [3, 5, 1]]", "overlap"),
        ("[[1, 4, null]]", "each entry is"),
        (" " * (1 << 20) + "[]", "larger than"),
    ],
)
def test_bad_json_is_refused_by_file_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json.*{words}"):
        TableDepth.from_json(path)


def test_a_missing_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read table .*none\.json"):
        TableDepth.from_json(tmp_path / "none.json")
