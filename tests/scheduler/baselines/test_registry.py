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
        with pytest.raises(ValueError, match="no policy in"):
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
