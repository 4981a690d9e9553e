from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.ablate_overrides import differences, with_overrides
from specdepth.agents.train_config import TrainConfig

CONFIG = TrainConfig()


def test_paths_reach_settings_at_every_level() -> None:
    changed = with_overrides(CONFIG, {"seed": 7, "ppo.discount": 0.5})
    assert changed.seed == 7
    assert changed.ppo.discount == 0.5
    assert changed.ppo.n_steps == CONFIG.ppo.n_steps
    assert CONFIG.ppo.discount != 0.5


def test_values_are_taken_as_json_has_them() -> None:
    changed = with_overrides(
        CONFIG,
        {
            "ppo.hidden": [32, 16],
            "workload.concurrencies": [1, 2],
            "decoder.cost": "cost.json",
            "ppo.target_kl": None,
            "ppo.learning_rate": 1,
            "env": "replay",
        },
    )
    assert changed.ppo.hidden == (32, 16)
    assert changed.workload.concurrencies == (1, 2)
    assert changed.decoder.cost == Path("cost.json")
    assert changed.ppo.target_kl is None
    assert isinstance(changed.ppo.learning_rate, float)
    assert changed.env == "replay"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("ppo.discont", 0.5, r'cannot set ppo\.discont: PPOConfig has no "discont"; it has '),
        ("ppo.discont", 0.5, r'Did you mean "discount"\?'),
        ("nothing", 1, r'TrainConfig has no "nothing"'),
        ("ppo", 1, r'"ppo" is a group of settings; name one of them'),
        ("seed.x", 1, r'"seed" is one value and has no "x"'),
        ("ppo.discount", "high", r"cannot set ppo\.discount: expected float, got 'high'"),
        ("ppo.discount", True, r"expected float, got True"),
        ("ppo.discount", 1.5, r"discount must be in 0\.\.1, got 1\.5"),
        ("ppo.n_steps", 2.5, r"expected int, got 2\.5"),
        ("ppo.hidden", [1.5], r"expected int, got 1\.5"),
        ("ppo.hidden", 32, r"expected tuple"),
        ("reward.timing", "guessed", r"expected Literal\['modelled', 'measured'\], got 'guessed'"),
        ("decoder.cost", 3, r"expected .*Path.*, got 3"),
        ("seed", None, r"expected int, got None"),
    ],
)
def test_what_cannot_be_set_is_refused_by_its_path(path: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        with_overrides(CONFIG, {path: value})


def test_differences_name_paths() -> None:
    old = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": 0}
    new = {"a": 1, "b": {"c": 3, "d": [1]}, "added": None}
    assert differences(old, new) == ["b.c", "added", "gone"]
    assert differences(new, new) == []
