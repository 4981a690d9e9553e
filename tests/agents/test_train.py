from __future__ import annotations

import csv
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from specdepth.agents import train as train_module
from specdepth.agents.callbacks import TrainProgress
from specdepth.agents.checkpoint import STATE_FILE, load_checkpoint, save_checkpoint
from specdepth.agents.train import resumed_config, train
from specdepth.agents.train_config import PPOConfig, TrainConfig, WarmStartConfig
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.toy_training import UPDATE, toy_config, toy_train, toy_vec_env
from tests.envs.toy import toy_decoder, toy_prompts


def weights(folder: Path) -> dict[str, Any]:
    model, *_ = load_checkpoint(folder, toy_vec_env())
    return {name: value.numpy() for name, value in model.policy.state_dict().items()}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two updates after a warm start."""
    out = tmp_path_factory.mktemp("train") / "run"
    told: list[TrainProgress] = []
    config = toy_config(out, warm_start=WarmStartConfig(scheduler="fixed:2", rounds=20))
    return toy_train(config, progress=told.append), told


def test_a_run_leaves_a_complete_folder(run: Any) -> None:
    result, _ = run
    names = {path.name for path in result.folder.iterdir()}
    assert names == {
        "config.json",
        "command.txt",
        "progress.csv",
        "monitor.csv",
        "model.zip",
        "state.json",
        "policy",
    }
    assert TrainConfig.load(result.folder).out == result.folder
    assert result.num_updates == 2
    assert result.num_timesteps == 2 * UPDATE
    assert not result.interrupted
    assert result.sync_command is None


def test_a_run_counts_rounds_and_decisions_of_the_warm_start_too(run: Any) -> None:
    result, _ = run
    assert result.warm_start.num_rounds == 20
    assert result.num_rounds == 20 + 2 * 16
    assert result.num_rounds <= result.num_decisions <= 4 * result.num_rounds


def test_the_learning_curve_has_a_line_an_update_with_all_metrics(run: Any) -> None:
    result, _ = run
    lines = rows(result.folder)
    assert [line["time/iterations"] for line in lines] == ["1", "2"]
    for name in (
        "decode/throughput_tok_s",
        "decode/acceptance_length",
        "train/approx_kl",
        "train/explained_variance",
        "train/value_loss",
        "time/total_timesteps",
    ):
        assert all(np.isfinite(float(line[name])) for line in lines)


def test_the_monitor_file_has_a_line_for_each_workload(run: Any) -> None:
    result, _ = run
    lines = (result.folder / "monitor.csv").read_text().splitlines()
    assert json.loads(lines[0][1:])["env_id"] == "specdepth/LiveDecode-v0"
    assert lines[1].split(",")[:3] == ["r", "l", "t"]


def test_progress_goes_from_warm_start_to_updates_and_never_back(run: Any) -> None:
    _, told = run
    stages = [one.stage for one in told]
    assert stages[0] == "warm start"
    assert stages[-1] == "update"
    assert all(0 <= one.fraction <= 1 for one in told)
    assert [one.elapsed_s for one in told] == sorted(one.elapsed_s for one in told)
    assert told[-1].metrics["throughput_tok_s"] > 0


def test_the_exported_policy_runs_in_the_decoder_and_says_what_it_is(run: Any) -> None:
    result, _ = run
    scheduler = LearnedScheduler.load(result.policy_folder, max_num_speculative_tokens=4)
    training = scheduler.card.training
    assert training["warm_start"] == "fixed:2"
    assert training["updates"] == 2
    assert set(training["loads"]) <= {1, 2, 3, 4}
    decoder = toy_decoder()
    assert scheduler.card.model_pair == decoder.model_pair
    batch = decoder.generate(toy_prompts(), max_new_tokens=9, depth_scheduler=scheduler)
    assert [len(result.token_ids) for result in batch] == [9] * 8


def test_the_card_names_the_number_format_that_ran(run: Any) -> None:
    """Not "auto", which says nothing."""
    result, _ = run
    policy = LearnedScheduler.load(result.policy_folder)
    assert str(policy.card.training["machine"]).endswith(", float64")


def test_the_engine_is_idle_afterwards(tmp_path: Path) -> None:
    decoder = toy_decoder()
    toy_train(toy_config(tmp_path / "run"), decoder)
    assert not decoder.engine.has_work
    decoder.generate(toy_prompts()[:1], max_new_tokens=3)


def test_equal_seeds_give_equal_policies_on_a_virtual_clock(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        toy_train(toy_config(tmp_path / name, seed=seed))
    a, b, c = (
        LearnedScheduler.load(tmp_path / name / "policy").weights.weights[0] for name in "abc"
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_resuming_goes_on_where_the_run_was(run: Any, tmp_path: Path) -> None:
    """Weights, optimiser, normalisation, counts, rates and generators: two resumed copies of a
    run end equal, although the process drew other random numbers in between.
    """
    import shutil

    result, _ = run
    ends: list[dict[str, Any]] = []
    for name in "ab":
        shutil.copytree(result.folder, tmp_path / name)
        torch.manual_seed(len(ends))
        np.random.seed(len(ends))  # noqa: NPY002
        before, *_ = load_checkpoint(tmp_path / name, toy_vec_env())
        assert before.policy.optimizer.state_dict()["state"], "Adam's moments"
        config = resumed_config(tmp_path / name, minutes=5, timesteps=UPDATE)
        again = toy_train(config, resume=True)
        assert again.num_updates == 3
        assert again.num_timesteps == 3 * UPDATE
        assert again.num_rounds == result.num_rounds + 16
        assert again.warm_start is None
        assert [line["time/iterations"] for line in rows(again.folder)] == ["1", "2", "3"]
        ends.append(weights(again.folder))
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    start = weights(result.folder)
    assert ends[0]["features_extractor.count"] > start["features_extractor.count"]
    assert not np.array_equal(ends[0]["action_net.weight"], start["action_net.weight"])


def test_resuming_warns_of_the_pickle(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    result, _ = run
    with caplog.at_level(logging.WARNING):
        load_checkpoint(result.folder, toy_vec_env())
    assert "can run code" in caplog.text


def test_a_checkpoint_restores_the_environments_state(run: Any) -> None:
    result, _ = run
    env = toy_vec_env(seed=77)
    load_checkpoint(result.folder, env)
    state = json.loads((result.folder / STATE_FILE).read_text())
    assert env.rates.state() == state["rates"]
    assert env.rng_states() == state["workload_rngs"]
    assert env.num_rounds == result.num_rounds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_timesteps": 1}, "not written together"),
        ({"format_version": 9}, "no checkpoint of this version"),
        ({"rates": {}}, "is damaged"),
        ({"torch_rng": "AA=="}, "is damaged"),
    ],
)
def test_damaged_checkpoints_are_refused(
    run: Any, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    import shutil

    result, _ = run
    shutil.copytree(result.folder, tmp_path / "run")
    path = tmp_path / "run" / STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        load_checkpoint(tmp_path / "run", toy_vec_env())
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(tmp_path / "run", toy_vec_env())
    path.unlink()
    with pytest.raises(ValueError, match="no checkpoint in"):
        load_checkpoint(tmp_path / "run", toy_vec_env())


def test_ctrl_c_keeps_what_there_is_and_the_run_can_go_on(tmp_path: Path) -> None:
    def interrupt(told: TrainProgress) -> None:
        if told.num_updates >= 1 and told.stage == "update":
            raise KeyboardInterrupt

    config = toy_config(tmp_path / "run", timesteps=100 * UPDATE)
    decoder = toy_decoder()
    result = toy_train(config, decoder, progress=interrupt)
    assert result.interrupted
    assert 1 <= result.num_updates < 100
    assert not decoder.engine.has_work
    assert (
        LearnedScheduler.load(result.policy_folder).card.training["updates"] == result.num_updates
    )
    assert len(rows(result.folder)) == result.num_updates
    more = toy_train(
        resumed_config(result.folder, minutes=1, timesteps=UPDATE), decoder, resume=True
    )
    assert more.num_updates == result.num_updates + 1


@pytest.mark.parametrize("stage", ["warm start", "rollout"])
def test_ctrl_c_before_the_first_update_leaves_a_policy_too(stage: str, tmp_path: Path) -> None:
    def interrupt(told: TrainProgress) -> None:
        if told.stage == stage:
            raise KeyboardInterrupt

    config = toy_config(
        tmp_path / "run", warm_start=WarmStartConfig(scheduler="fixed:1", rounds=10)
    )
    result = toy_train(config, progress=interrupt)
    assert result.interrupted
    assert result.num_updates == 0
    LearnedScheduler.load(result.policy_folder)


def test_training_ends_with_its_minutes(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", minutes=1 / 60, timesteps=None)
    start_s = time.monotonic()
    result = toy_train(config)
    assert result.num_updates >= 1
    assert time.monotonic() - start_s < 10
    assert not result.interrupted


def test_checkpoints_are_written_on_the_way(tmp_path: Path, monkeypatch: Any) -> None:
    saved: list[int] = []
    real = save_checkpoint

    def counting(folder: Path, checkpoint: Any, env: Any) -> None:
        saved.append(checkpoint.num_updates)
        real(folder, checkpoint, env)

    monkeypatch.setattr(train_module, "save_checkpoint", counting)
    toy_train(toy_config(tmp_path / "run", checkpoint_minutes=0, timesteps=3 * UPDATE))
    assert saved == [1, 2, 3]


def test_a_folder_with_a_run_is_not_overwritten(run: Any) -> None:
    result, _ = run
    with pytest.raises(ValueError, match="already holds a run; choose another --out"):
        toy_train(toy_config(result.folder))


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training run"):
        resumed_config(tmp_path, minutes=1, timesteps=None)
    with pytest.raises(ValueError, match=r"no run to resume in .*model\.zip"):
        toy_train(toy_config(tmp_path), resume=True)


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        train(toy_config(tmp_path / "file" / "run"))


def test_an_unknown_scheduler_to_imitate_is_refused(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", warm_start=WarmStartConfig(scheduler="best"))
    with pytest.raises(ValueError, match='unknown scheduler "best"'):
        toy_train(config)


def test_prompts_come_from_a_file_and_only_its_training_half(tmp_path: Path) -> None:
    from specdepth.agents.train import make_env

    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"text {i}" for i in range(50)))
    seen: list[Any] = []

    class Pool:
        def __init__(self, decoder: Any, prompts: Any) -> None:
            seen.extend(prompts)

        def workload(self) -> None:
            """Not drawn here."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdepth.agents.assembly.PromptPool", Pool)
        make_env(toy_config(tmp_path, prompts=path), toy_decoder())
    assert 10 < len(seen) < 40
    assert {prompt.split for prompt in seen} == {"train"}


def learned_depth(token_s: float, start: str, out: Path) -> float:
    """Mean depth over the largest possible one after PPO, for two sequences at a time."""
    config = toy_config(
        out,
        timesteps=18 * 4 * 64,
        workload=WorkloadConfig(
            arrivals="constant", concurrency=2, num_requests=16, max_new_tokens=32
        ),
        ppo=PPOConfig(
            n_steps=64,
            batch_size=64,
            n_epochs=8,
            learning_rate=3e-3,
            discount=0.9,
            ent_coef=0.0,
            hidden=(32,),
            target_kl=None,
        ),
        warm_start=WarmStartConfig(scheduler=start, rounds=30, smoothing=0.3),
    )
    decoder = toy_decoder(token_s=token_s)
    result = toy_train(config, decoder)
    scheduler = LearnedScheduler.load(result.policy_folder)
    state_depths = []

    class Watching:
        lawful_under = scheduler.lawful_under

        def choose(self, state: Any) -> Any:
            depths = scheduler.choose(state)
            able = state.max_depths > 0
            state_depths.extend((depths[able] / state.max_depths[able]).tolist())
            return depths

        def observe(self, outcome: Any) -> None:
            pass

    for pair in range(0, 8, 2):
        decoder.generate(
            toy_prompts()[pair : pair + 2], max_new_tokens=32, depth_scheduler=Watching()
        )
    return float(np.mean(state_depths))


@pytest.mark.parametrize("start", ["off", "fixed:4"])
def test_where_drafts_are_free_and_nearly_always_right_ppo_goes_deep(
    start: str, tmp_path: Path
) -> None:
    assert learned_depth(0.0, start, tmp_path / "run") > 0.85


@pytest.mark.parametrize("start", ["off", "fixed:4"])
def test_where_a_token_costs_four_passes_ppo_drafts_nothing(start: str, tmp_path: Path) -> None:
    assert learned_depth(0.2, start, tmp_path / "run") < 0.1


def test_ppo_train_is_left_alone() -> None:
    model = train_module.make_model(toy_config(Path("unused")).ppo, toy_vec_env(), 0)
    assert type(model) is PPO
