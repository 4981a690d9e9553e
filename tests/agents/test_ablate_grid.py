from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.ablate_grid import BASE, Grid, Variant, grid_to_dict, read_grid
from specdepth.agents.ablate_grids import FULL, GRIDS, LIVE, QUICK, SEARCH, find_grid
from specdepth.agents.train_config import TrainConfig

GRID = Grid(
    name="mine",
    base={"ppo.discount": 0.8, "workload.concurrencies": [1, 2]},
    variants=(
        Variant(name="discount-0", dimension="discount", overrides={"ppo.discount": 0.0}),
        Variant(name="short", dimension="steps", overrides={"timesteps": 10}),
    ),
    seeds=(3, 4),
    timesteps=1000,
    minutes=1.5,
)


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "grid.json"
    path.write_text(json.dumps(grid_to_dict(GRID) | changes))
    return path


def test_the_base_comes_first_and_has_no_changes() -> None:
    assert [one.name for one in GRID.all_variants] == [BASE, "discount-0", "short"]
    configs = GRID.configs(TrainConfig())
    assert configs[BASE] == GRID.base_config(TrainConfig())
    assert configs[BASE].ppo.discount == 0.8
    assert configs["discount-0"].ppo.discount == 0.0


def test_all_runs_have_the_steps_and_the_limit_of_the_grid() -> None:
    configs = GRID.configs(TrainConfig(timesteps=5, minutes=9))
    assert {config.minutes for config in configs.values()} == {1.5}
    assert [config.timesteps for config in configs.values()] == [1000, 1000, 10]


def test_the_wall_limit_does_not_cut_the_warm_start_at_a_share_of_it() -> None:
    assert GRID.base_config(TrainConfig()).warm_start.max_share == 1.0


def test_a_wrong_setting_is_found_before_any_run_and_named_with_its_variant() -> None:
    wrong = Variant(name="typo", dimension="x", overrides={"ppo.discont": 0.0})
    with pytest.raises(
        ValueError, match=r"variant typo: cannot set ppo\.discont: PPOConfig has no"
    ):
        Grid(name="g", variants=(wrong,)).configs(TrainConfig())
    with pytest.raises(ValueError, match=r"base of grid g: cannot set nothing"):
        Grid(name="g", variants=(), base={"nothing": 1}).configs(TrainConfig())


def test_a_grid_goes_through_a_file_unchanged(tmp_path: Path) -> None:
    assert read_grid(write(tmp_path)) == GRID
    assert find_grid(str(tmp_path / "grid.json")) == GRID


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "other"}, r'"format" must be "specdepth-ablation-grid"'),
        ({"format_version": 2}, r"format version 2"),
        ({"variants": None}, r'"variants" must be a list'),
        ({"variants": [{"name": "a"}]}, r"dimension"),
        ({"variants": [{"name": "a", "dimension": "d", "over": {}}]}, r'variant has no "over"'),
        ({"variants": ["a"]}, r"a variant must be an object, got 'a'"),
        ({"steps": 1}, r'a grid has no "steps"'),
        ({"seeds": [1, 1]}, r"seeds are different whole numbers"),
        ({"seeds": []}, r"seeds are different whole numbers"),
        ({"timesteps": 0}, r"timesteps and minutes must be above 0"),
        ({"num_requests": 0}, r"num_requests must be at least 1"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=rf"cannot use grid .*{sentence}"):
        read_grid(write(tmp_path, **changes))


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", ".hidden"])
def test_names_that_are_no_folders_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name of a variant"):
        Variant(name=name, dimension="d")


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="more than one variant 'base'"):
        Grid(name="g", variants=(Variant(name=BASE, dimension="d"),))


def test_an_unknown_or_missing_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no grid 'ful'; there are full, search, live, quick"):
        find_grid("ful")
    with pytest.raises(ValueError, match=r"cannot read grid absent\.json: No such file"):
        find_grid("absent.json")


@pytest.mark.parametrize("grid", GRIDS.values(), ids=list(GRIDS))
def test_shipped_grids_fit_the_settings_that_there_are(grid: Grid) -> None:
    configs = grid.configs(TrainConfig(env="replay"))
    base = configs.pop(BASE)
    assert all(config != base for config in configs.values())
    assert base.decoder.max_num_seqs >= max(base.workload.concurrencies)


def test_the_full_grid_has_five_seeds_and_equal_steps_in_whole_updates() -> None:
    configs = FULL.configs(TrainConfig(env="replay"))
    assert len(FULL.seeds) >= 5
    assert FULL.loads == (1, 2, 4, 8, 16, 32)
    assert {config.timesteps for config in configs.values()} == {FULL.timesteps}
    for config in configs.values():
        slots = config.replay.num_engines * config.decoder.max_num_seqs
        assert FULL.timesteps % (config.ppo.n_steps * slots) == 0
    assert QUICK.timesteps < FULL.timesteps / 100


def test_the_full_grid_says_what_each_part_of_the_recipe_is_worth() -> None:
    configs = FULL.configs(TrainConfig(env="replay"))
    assert {config.reward.form for config in configs.values()} == {
        *("difference", "relative", "team", "throughput"),
    }
    assert {config.reward.tokens for config in configs.values()} == {"sampled", "expected"}
    assert {config.action for config in configs.values()} == {"depth", "offset", "batch"}
    masked = {group for config in configs.values() for group in config.ppo.masked_features}
    assert masked == {"batch-size", "prices", "acceptance", "memory-pressure", "proposal"}


def test_search_and_what_follows_it_start_from_the_same_rule() -> None:
    configs = SEARCH.configs(TrainConfig(env="replay"))
    alone, after = configs[BASE], configs["after-search"]
    assert after.warm_start.search_iterations > 0
    assert alone == replace(after, warm_start=alone.warm_start)
    assert alone.warm_start.scheduler == after.warm_start.scheduler


def test_live_and_replay_are_compared_over_equal_steps() -> None:
    configs = LIVE.configs(TrainConfig(env="replay"))
    live, base = configs["live"], configs[BASE]
    assert live.env == "live"
    assert live == replace(base, env="live")
    assert base.replay.num_engines == 1
    assert LIVE.timesteps % (base.ppo.n_steps * base.decoder.max_num_seqs) == 0
