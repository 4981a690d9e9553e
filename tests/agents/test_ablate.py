"""Small grids on a made-up trace, trained and judged for real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.ablate import Ablation, AblationPlan, _default_start, ablate, plan_ablation
from specdepth.agents.ablate_grid import Grid, Variant, grid_to_dict, read_grid
from specdepth.agents.ablate_report import write_ablation
from specdepth.agents.ablate_run import DONE_FILE
from specdepth.agents.ablate_table import tidy_rows
from specdepth.agents.cli import INTERRUPTED, main
from specdepth.agents.results import Results
from specdepth.agents.train_config import TrainConfig
from specdepth.decoder.trace_files import load_trace
from specdepth.scheduler.cost import CostModel
from tests.agents.toy_rule import save_toy_rule
from tests.envs.toy_trace import COST, toy_trace

STEPS = 2 * 16 * 4 * 2
"""Two updates of 16 rounds of 4 slots in 2 engines."""
GRID = Grid(
    name="toy",
    base={
        "decoder.max_num_seqs": 4,
        "workload.concurrencies": [1, 3],
        "workload.num_requests": 6,
        "replay.num_engines": 2,
        "ppo.n_steps": 16,
        "ppo.batch_size": 16,
        "ppo.n_epochs": 2,
        "ppo.hidden": [8],
        "warm_start.scheduler": "none",
    },
    variants=(Variant(name="discount-0", dimension="discount", overrides={"ppo.discount": 0.0}),),
    seeds=(0, 1),
    timesteps=STEPS,
    minutes=5.0,
    loads=(1, 3),
    num_requests=6,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    toy_trace(48).save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    return folder


def plan(files: Path, out: Path, grid: Grid = GRID, **more: Any) -> AblationPlan:
    return plan_ablation(grid, out, str(files / "toy.npz"), files / "cost.json", **more)


@pytest.fixture(scope="module")
def serial(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ablation]:
    out = tmp_path_factory.mktemp("serial")
    found = ablate(plan(files, out))
    write_ablation(found, out, "test")
    return out, found


def stamps(out: Path) -> dict[str, int]:
    return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.rglob(DONE_FILE)}


def test_every_variant_runs_on_every_seed_for_equal_steps(serial: tuple[Path, Ablation]) -> None:
    out, found = serial
    assert set(found.done) == {(name, seed) for name in ("base", "discount-0") for seed in (0, 1)}
    assert {one.training["timesteps"] for one in found.done.values()} == {STEPS}
    assert {one.training["short"] for one in found.done.values()} == {0.0}
    assert not found.failures
    discounts = {
        name: TrainConfig.load(out / "runs" / name / "seed-1" / "train").ppo.discount
        for name in ("base", "discount-0")
    }
    assert discounts == {"base": 0.9, "discount-0": 0.0}


def test_everything_is_judged_on_the_same_held_out_requests(serial: tuple[Path, Ablation]) -> None:
    _, found = serial
    loads = {1, 3, "varying"}
    assert {row.load for row in found.references.rows} == loads
    assert {row.policy for row in found.references.rows} == {
        "off",
        *(f"fixed:{k}" for k in (1, 2, 3, 4)),
    }
    for one in found.done.values():
        assert {row.load for row in one.rows} == loads
        assert {row.policy for row in one.rows} == {"learned"}


def test_a_second_call_does_only_what_is_missing(
    files: Path, serial: tuple[Path, Ablation]
) -> None:
    out, found = serial
    before = stamps(out)
    assert len(before) == 5
    (out / "runs" / "base" / "seed-1" / DONE_FILE).unlink()
    told: list[str] = []
    again = ablate(plan(files, out), progress=lambda share, detail: told.append(detail))
    after = stamps(out)
    assert [name for name in after if after[name] != before[name]] == ["runs/base/seed-1/done.json"]
    assert told == ["1 of 5 runs to do", "base, seed 1"]
    assert again.done["base", 1].rows == found.done["base", 1].rows


def test_more_seeds_and_variants_can_be_added(files: Path, serial: tuple[Path, Ablation]) -> None:
    out, _ = serial
    before = stamps(out)
    more = Variant(name="small", dimension="size", overrides={"ppo.hidden": [4]})
    wider = replace(GRID, variants=(*GRID.variants, more), seeds=(0, 1, 2))
    found = ablate(plan(files, out, wider))
    assert len(found.done) == 3 * 3
    assert {name: at for name, at in stamps(out).items() if name in before} == before


def test_runs_of_other_settings_are_refused_by_name(
    files: Path, serial: tuple[Path, Ablation], tmp_path: Path
) -> None:
    out, _ = serial
    with pytest.raises(
        ValueError, match=r"base.seed-0 holds a run with another config\.timesteps;"
    ):
        ablate(plan(files, out, replace(GRID, timesteps=2 * STEPS)))
    with pytest.raises(ValueError, match=r"references holds a run with another evaluation\.loads"):
        ablate(plan(files, out, replace(GRID, loads=(1, 2))))
    CostModel.linear(base_s=0.1).save(tmp_path / "other.json")
    dear = plan_ablation(GRID, out, str(files / "toy.npz"), tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"another evaluation\.cost"):
        ablate(dear)


def test_files_may_lie_elsewhere_if_their_content_is_the_same(
    files: Path, serial: tuple[Path, Ablation], tmp_path: Path
) -> None:
    out, _ = serial
    for name in ("toy.npz", "cost.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    moved = plan(tmp_path, out)
    told: list[str] = []
    ablate(moved, progress=lambda share, detail: told.append(detail))
    assert told == ["0 of 5 runs to do"]


def test_processes_give_what_one_gives(
    files: Path, serial: tuple[Path, Ablation], tmp_path: Path
) -> None:
    grid = replace(GRID, variants=(), seeds=(1,))
    found = ablate(plan(files, tmp_path, grid), jobs=2)
    _, alone = serial
    assert found.references.rows == alone.references.rows
    assert found.done["base", 1].rows == alone.done["base", 1].rows


def test_a_variant_that_fails_does_not_stop_the_others(files: Path, tmp_path: Path) -> None:
    wrong = Variant(name="deep", dimension="k", overrides={"decoder.max_num_speculative_tokens": 9})
    grid = replace(GRID, variants=(wrong,), seeds=(0,))
    found = ablate(plan(files, tmp_path, grid))
    assert set(found.done) == {("base", 0)}
    assert "9" in found.failures["deep, seed 0"]
    assert "Traceback" in (tmp_path / "runs" / "deep" / "seed-0" / "error.txt").read_text()


def test_nothing_is_trained_once_the_references_have_failed(files: Path, tmp_path: Path) -> None:
    deep = replace(GRID, base={**GRID.base, "decoder.max_num_speculative_tokens": 9})
    with pytest.raises(ValueError, match=r"the references failed: .*9"):
        ablate(plan(files, tmp_path, deep))
    assert not (tmp_path / "runs").exists()


def test_what_an_interrupted_run_left_is_thrown_away(
    files: Path, serial: tuple[Path, Ablation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdepth.agents import train as training

    grid = replace(GRID, variants=(), seeds=(1,))
    real = training._learn

    def interrupt(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "_learn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ablate(plan(files, tmp_path, grid))
    place = tmp_path / "runs" / "base" / "seed-1"
    assert (place / "train" / "model.zip").is_file()
    assert not (place / DONE_FILE).exists()
    assert (
        ablate(plan(files, tmp_path, grid)).done["base", 1].rows == serial[1].done["base", 1].rows
    )


def test_a_warm_start_that_the_limit_cut_is_not_taken_for_a_whole_one(
    files: Path, tmp_path: Path
) -> None:
    grid = replace(GRID, variants=(), seeds=(0,), minutes=1e-6)
    late = {"warm_start.scheduler": "fixed:1", "warm_start.rounds": 50}
    (run,) = plan(files, tmp_path, replace(grid, base={**GRID.base, **late})).runs
    _, training = run.measure()
    assert training["short"] == 1.0
    assert training["timesteps"] < STEPS


def test_a_plan_refuses_what_cannot_run(files: Path, tmp_path: Path) -> None:
    typo = Variant(name="typo", dimension="x", overrides={"ppo.discont": 0.0})
    with pytest.raises(ValueError, match=r"variant typo: cannot set ppo\.discont"):
        plan(files, tmp_path, replace(GRID, variants=(typo,)))
    with pytest.raises(ValueError, match="load 7 needs at least 7 different requests"):
        plan(files, tmp_path, replace(GRID, loads=(7,)))
    with pytest.raises(ValueError, match='unknown scheduler "nobody"'):
        plan(files, tmp_path, references=["nobody"])


def test_settings_can_start_from_another_run(files: Path, tmp_path: Path) -> None:
    start = replace(TrainConfig(), ppo=replace(TrainConfig().ppo, gae_lambda=0.5), env="live")
    decoder = replace(start.decoder, max_num_speculative_tokens=3)
    made = plan(files, tmp_path, start=replace(start, decoder=decoder))
    config = made.runs[0].config
    assert (config.env, config.ppo.gae_lambda) == ("replay", 0.5)
    assert made.references.names == ("off", "fixed:1", "fixed:2", "fixed:3")


def test_the_warm_start_is_a_shipped_rule_where_one_fits(files: Path, tmp_path: Path) -> None:
    base = {path: value for path, value in GRID.base.items() if not path.startswith("warm_start")}
    grid = replace(GRID, base=base)
    starts = {run.config.warm_start.scheduler for run in plan(files, tmp_path, grid).runs}
    assert starts == {"heuristic"}, "no rule is shipped for the toy pair"
    info = load_trace("smollm2-prompt-lookup-greedy").info
    start = _default_start(info)
    assert start.warm_start.scheduler == "rule:smollm2-prompt-lookup-cpu-bf16"
    assert start.decoder.max_num_speculative_tokens is None, "of the trace"


def test_what_a_search_found_is_judged_beside_what_became_of_it(
    files: Path, tmp_path: Path
) -> None:
    searched = Variant(
        name="after-search",
        dimension="search",
        overrides={
            "action": "offset",
            "ppo.hidden": [16],
            "warm_start.scheduler": save_toy_rule(tmp_path),
            "warm_start.search_iterations": 1,
            "warm_start.rounds": 4,
            "workload.concurrencies": [2],
        },
    )
    grid = replace(GRID, variants=(searched,), seeds=(0,))
    found = ablate(plan(files, tmp_path / "out", grid))
    assert not found.failures
    rows = found.done["after-search", 0].rows
    assert {row.policy for row in rows} == {"learned", "searched"}
    variants = {row.variant for row in tidy_rows(found)}
    assert {"base", "after-search", "after-search.searched"} <= variants
    written = write_ablation(found, tmp_path / "out", "test")
    assert [one.variant for one in written.summaries][-2:] == [
        *("after-search", "after-search.searched"),
    ]


def test_the_device_is_that_of_live_runs(files: Path, tmp_path: Path) -> None:
    assert {run.config.decoder.device for run in plan(files, tmp_path, device="cpu").runs} == {
        "cpu"
    }


def test_tracked_runs_are_grouped_by_variant(files: Path, tmp_path: Path) -> None:
    made = plan(files, tmp_path, track=True)
    assert all(run.config.track for run in made.runs)
    assert {run.config.wandb.group for run in made.runs} == {"base", "discount-0"}
    assert {run.config.wandb.job_type for run in made.runs} == {"ablate"}
    # Tracking changes nothing in the result.
    assert made.runs[0].settings == plan(files, tmp_path).runs[0].settings


def test_the_files_of_a_report_go_together(serial: tuple[Path, Ablation]) -> None:
    out, found = serial
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert names >= {
        "ablation.csv",
        "results.json",
        "report.html",
        "grid.json",
        "iqm.svg",
        "learning.svg",
    }
    results = Results.load(out / "results.json")
    assert set(results.policies) == {"base", "discount-0"}
    assert read_grid(out / "grid.json") == found.grid
    page = (out / "report.html").read_text()
    for part in ("discount-0", "ppo.discount = 0.0", "P(better", "<svg"):
        assert part in page
    lines = (out / "ablation.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 * 3 * 8 + 4 * (3 * 8 + 4)


def test_the_command_trains_reports_and_says_what_failed(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Variant(name="deep", dimension="k", overrides={"decoder.max_num_speculative_tokens": 9})
    (tmp_path / "mine.json").write_text(json.dumps(grid_to_dict(replace(GRID, variants=(wrong,)))))
    out = tmp_path / "out"
    arguments = [
        *("ablate", "--grid", str(tmp_path / "mine.json"), "--out", str(out)),
        *("--trace", str(files / "toy.npz"), "--cost", str(files / "cost.json")),
        *("--seeds", "1", "--json", "--quiet"),
    ]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["folder"] == str(out)
    assert {row["policy"] for row in found["results"]["rows"]} == {"base"}
    assert "1 runs failed, the first deep, seed 1: " in printed.err
    assert (out / "report.html").is_file()


def test_the_command_says_how_to_go_on_after_ctrl_c(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdepth.agents import ablate_jobs

    def interrupt(run: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ablate_jobs, "execute", interrupt)
    (tmp_path / "mine.json").write_text(json.dumps(grid_to_dict(GRID)))
    arguments = [
        *("ablate", "--grid", str(tmp_path / "mine.json"), "--out", str(tmp_path / "out")),
        *("--trace", str(files / "toy.npz"), "--cost", str(files / "cost.json"), "--quiet"),
    ]
    assert main(arguments) == INTERRUPTED
    assert "interrupted; 0 of 4 runs are done in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--grid", "nothing"], "no grid 'nothing'; there are full, search, live, quick"),
        (["--seeds", "1,1"], "seeds are different whole numbers"),
        (["--minutes", "0"], "timesteps and minutes must be above 0"),
        (["--trace", "absent"], "absent"),
    ],
)
def test_the_command_refuses_in_a_line(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--grid", "quick", "--out", str(tmp_path / "out"), *arguments]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
