"""Every rule of the lab has a name, and the name makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.baselines.bandits import EpsilonGreedyDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.greedy_file import load_greedy, save_greedy, shipped_rules
from specdepth.scheduler.baselines.registry import KNOWN
from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
from specdepth.scheduler.baselines.survival_names import make_survival, shipped_survival_models
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.survival_estimators import EmaSurvival, MatchLengthSurvival

WITHOUT_FILES = [
    name.strip('"')
    .replace("SURVIVAL:PULL:EXPONENT:PRICE", "match:0.25:1:1.1")
    .replace("SURVIVAL", "match")
    .replace("START", "5")
    .replace("SEED", "3")
    for name in KNOWN
    if not any(part in name for part in ("FILE", "FOLDER", "NAME", "folder"))
]


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_each_known_name_makes_a_scheduler(name: str) -> None:
    scheduler = make_scheduler(name)
    assert isinstance(scheduler, DepthScheduler)
    assert "greedy" in scheduler.lawful_under  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", shipped_rules())
def test_shipped_rules_load(name: str) -> None:
    assert isinstance(make_scheduler(f"rule:{name}"), CappedGreedyDepth)


@pytest.mark.parametrize("name", shipped_survival_models())
def test_shipped_survival_models_load_under_the_default_pair(name: str) -> None:
    drafter = name.removeprefix("smollm2-") if "prompt-lookup" in name else name
    model_pair = f"SmolLM2-135M-Instruct+{drafter}"
    assert make_survival(name, model_pair=model_pair).survival is not None
    with pytest.raises(ValueError, match="fitted for"):
        make_survival(name, model_pair="another")


def test_settings_reach_their_rule() -> None:
    shrunk = make_scheduler("shrunk:ema:0.25:1.1:0.9")
    assert isinstance(shrunk, CappedGreedyDepth)
    assert isinstance(shrunk.survival, EmaSurvival)
    assert shrunk.shrinkage == {1: Shrinkage(pull=0.25, exponent=1.1, price=0.9)}
    stops = make_scheduler("specdec++:0.3:match")
    assert isinstance(stops, SpecDecPlusPlus)
    tlt, plain = make_scheduler("tlt"), make_scheduler("eps-greedy")
    assert isinstance(tlt, EpsilonGreedyDepth)
    assert isinstance(plain, EpsilonGreedyDepth)


def test_a_tuned_rule_comes_back_from_its_file(tmp_path: Path) -> None:
    by_load = {1: Shrinkage(pull=0.1), 16: Shrinkage(pull=0.4, exponent=1.2, price=1.1)}
    path = tmp_path / "rule.json"
    save_greedy(path, "match", CappedGreedyDepth(MatchLengthSurvival(), by_load), trace="toy")
    loaded = make_scheduler(f"rule:{path}")
    assert isinstance(loaded, CappedGreedyDepth)
    assert loaded.shrinkage == by_load
    assert isinstance(loaded.survival, MatchLengthSurvival)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, '"format" must be'),
        ({"format_version": 9}, "format version 9"),
        ({"survival": "none-such"}, 'unknown survival estimator "none-such"'),
        ({"shrinkage": {"1": {"pull": 3}}}, "pull in 0..1"),
        ({"shrinkage": {}}, "at least one"),
        ({"shrinkage": [1]}, "cannot use rule"),
        ({"shrinkage": {"1": {"unknown": 1}}}, "cannot use rule"),
    ],
)
def test_a_damaged_rule_file_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    path = tmp_path / "rule.json"
    save_greedy(path, "match", CappedGreedyDepth(MatchLengthSurvival()))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=reason) as error:
        load_greedy(str(path))
    assert "rule.json" in str(error.value)


def test_a_missing_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot read rule nowhere\.json"):
        make_scheduler("rule:nowhere.json")


@pytest.mark.parametrize(
    "name", ["svip:x", "shrunk:match:a", "shrunk:match:1:1:1:1", "specdec++:x"]
)
def test_settings_that_are_no_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_scheduler(name)


@pytest.mark.parametrize("name", ["greedy", "blind-greedy", "shrunk", "rule", "mlc:3", "tlt:x"])
def test_a_kind_without_its_setting_lists_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="unknown scheduler"):
        make_scheduler(name)
