from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdepth.scheduler.baselines import (
    FixedDepth,
    HeuristicDepth,
    Off,
    RandomDepth,
    TableDepth,
    make_scheduler,
)
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.baselines.goodput import GoodputDepth
from specdepth.scheduler.baselines.position_goodput import PositionGoodputDepth
from specdepth.scheduler.guard import GuardedScheduler
from specdepth.scheduler.learned import LearnedScheduler, save_policy


def test_plain_names_make_their_scheduler() -> None:
    assert isinstance(make_scheduler("off"), Off)
    assert isinstance(make_scheduler("heuristic"), HeuristicDepth)
    assert isinstance(make_scheduler("random"), RandomDepth)


def test_settings_follow_the_colon() -> None:
    fixed, heuristic = make_scheduler("fixed:4"), make_scheduler("heuristic:5")
    random = make_scheduler("random:7")
    assert isinstance(fixed, FixedDepth)
    assert fixed.num_speculative_tokens == 4
    assert isinstance(heuristic, HeuristicDepth)
    assert heuristic.start == 5
    assert isinstance(random, RandomDepth)
    assert random.seed == 7


def test_tables_come_from_text_or_file(tmp_path: Path) -> None:
    text = make_scheduler("table:1-4=4,5-16=2,17-=0")
    assert isinstance(text, TableDepth)
    text.to_json(tmp_path / "table.json")
    file = make_scheduler(f"table:{tmp_path / 'table.json'}")
    assert isinstance(file, TableDepth)
    assert file.ranges == text.ranges


def test_policies_come_from_their_folder(tmp_path: Path, make_weights: Any, make_card: Any) -> None:
    save_policy(tmp_path, make_weights(), make_card())
    for name in (str(tmp_path), f"policy:{tmp_path}"):
        assert isinstance(make_scheduler(name), LearnedScheduler)


def test_policies_are_checked_against_the_decoder(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    save_policy(tmp_path, make_weights(), make_card())
    for wanted in (
        {"model_pair": "other"},
        {"drafter": "draft-model"},
        {"max_num_speculative_tokens": 3},
    ):
        with pytest.raises(ValueError, match="was trained for"):
            make_scheduler(f"policy:{tmp_path}", **wanted)


def test_a_policy_folder_without_a_policy_says_so(tmp_path: Path) -> None:
    for name in (str(tmp_path), f"policy:{tmp_path / 'none'}"):
        with pytest.raises(ValueError, match="no policy"):
            make_scheduler(name)


@pytest.mark.parametrize("name", ["", "fast", "off:1", "table", "table:", "policy:", "Fixed:4"])
def test_unknown_names_list_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r'unknown scheduler .*"off", "fixed:4"') as error:
        make_scheduler(name)
    assert "policy" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["fixed", "fixed:", "fixed:x", "fixed:-1", "fixed:1.5", "random:a"]
)
def test_bad_settings_show_the_form(name: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number after the colon"):
        make_scheduler(name)


def test_a_fixed_depth_beyond_the_limit_is_refused_early() -> None:
    with pytest.raises(ValueError, match="max_num_speculative_tokens, which is 4"):
        make_scheduler("fixed:8", max_num_speculative_tokens=4)
    make_scheduler("fixed:4", max_num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("name", "inner", "fallback"),
    [
        ("guarded:heuristic", HeuristicDepth, None),
        ("guarded:fixed:4", FixedDepth, None),
        ("guarded:fixed:4:off", FixedDepth, Off),
        ("guarded:goodput:positions", PositionGoodputDepth, None),
        ("guarded:goodput:goodput:positions", GoodputDepth, PositionGoodputDepth),
        ("guarded:shrunk:match:0.25:1.1:table:1-4=4,5-=0", CappedGreedyDepth, TableDepth),
        ("guarded:greedy:match:goodput", CappedGreedyDepth, GoodputDepth),
    ],
)
def test_a_guard_stands_around_a_name_and_its_fallback(name, inner, fallback) -> None:
    guard = make_scheduler(name)
    assert isinstance(guard, GuardedScheduler)
    assert type(guard.inner) is inner
    assert type(guard.fallback) is (type(None) if fallback is None else fallback)


def test_a_guarded_policy_and_its_fallback_are_checked_against_the_decoder(
    tmp_path: Path, make_weights: Any, make_card: Any
) -> None:
    save_policy(tmp_path, make_weights(), make_card())
    guard = make_scheduler(f"guarded:policy:{tmp_path}:fixed:3", max_num_speculative_tokens=8)
    assert isinstance(guard, GuardedScheduler)
    assert isinstance(guard.inner, LearnedScheduler)
    assert isinstance(make_scheduler(f"guarded:{tmp_path}"), GuardedScheduler)
    for fallback in ("", ":fixed:3"):
        with pytest.raises(ValueError, match="was trained for"):
            make_scheduler(f"guarded:policy:{tmp_path}{fallback}", model_pair="other")
    with pytest.raises(ValueError, match="fixed:9 is deeper"):
        make_scheduler(f"guarded:policy:{tmp_path}:fixed:9", max_num_speculative_tokens=8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guarded", "unknown scheduler"),
        ("guarded:", "unknown scheduler"),
        ("guarded:fast", 'unknown scheduler "fast"'),
        ("guarded:off:fixed", "expected a whole number after the colon"),
        ("guarded:guarded:off", "not another guard"),
        ("guarded:off:guarded:off", "not another guard"),
    ],
)
def test_a_guard_around_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(name)
