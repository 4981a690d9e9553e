"""Training on a made-up trace: the same run folder, policy and resumption as live."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.cli import main
from specdepth.agents.train import resumed_config, train
from specdepth.agents.train_command import Options, settings
from specdepth.agents.train_config import (
    DecoderConfig,
    PPOConfig,
    ReplayConfig,
    TrainConfig,
    WarmStartConfig,
)
from specdepth.decoder.serving import serve
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.state import Ints, RoundState
from tests.agents.toy_training import toy_config
from tests.envs.toy import toy_decoder, toy_prompts
from tests.envs.toy_trace import COST, toy_replay, toy_trace

ENGINES = 2
UPDATE = 16 * 4 * ENGINES


def replay_config(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    toy_trace().save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    config = toy_config(folder / name)
    return replace(
        config,
        env="replay",
        timesteps=2 * UPDATE,
        decoder=DecoderConfig(
            max_num_seqs=4, max_num_speculative_tokens=4, cost=folder / "cost.json"
        ),
        replay=ReplayConfig(trace=str(folder / "toy.npz"), num_engines=ENGINES),
        **changes,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("replay")
    start = WarmStartConfig(scheduler="fixed:2", rounds=20)
    return train(replay_config(folder, warm_start=start))


def test_a_run_leaves_the_same_folder_as_a_live_one(run: Any) -> None:
    assert {path.name for path in run.folder.iterdir()} == {
        "config.json",
        "command.txt",
        "progress.csv",
        "monitor.csv",
        "model.zip",
        "state.json",
        "policy",
    }
    header = (run.folder / "monitor.csv").read_text().splitlines()[0]
    assert json.loads(header[1:])["env_id"] == "specdepth/ReplayDecode-v0"


def test_all_engines_are_driven_in_warm_start_and_training(run: Any) -> None:
    assert run.warm_start.num_rounds == 20
    assert run.warm_start.agreement > 0.9
    assert run.num_rounds == ENGINES * (20 + 2 * 16)
    assert run.num_updates == 2


def test_the_policy_says_pair_drafter_and_trace(run: Any) -> None:
    card = LearnedScheduler.load(run.policy_folder).card
    assert card.env_id == "specdepth/ReplayDecode-v0"
    assert card.model_pair == "toy + toy"
    assert card.drafter == "prompt-lookup"
    config = TrainConfig.load(run.folder)
    trace = card.training["trace"]
    assert trace["name"] == config.replay.trace
    assert trace["sha256"] == config.replay.trace_sha256
    assert trace["requests"] == len(toy_trace().rows("train"))
    assert CostModel.from_dict(card.training["cost_model"]) == COST
    text = (run.policy_folder / "README.md").read_text()
    for part in ("toy + toy", "prompt-lookup", "toy.npz", trace["sha256"][:12], "linear"):
        assert part in text


def test_the_policy_runs_on_replay_and_live(run: Any) -> None:
    scheduler = LearnedScheduler.load(run.policy_folder, max_num_speculative_tokens=4)
    decoder = toy_replay()
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(4))
    served = serve(decoder.engine, workload, scheduler)
    assert served.num_tokens == decoder.trace.num_tokens.sum()
    live = toy_decoder(draft="prompt-lookup")
    live.generate(toy_prompts(), max_new_tokens=3, depth_scheduler=scheduler)


def test_equal_seeds_give_equal_policies(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(replay_config(tmp_path, name, seed=seed))
    a, b, c = (
        LearnedScheduler.load(tmp_path / name / "policy").weights.weights[0] for name in "abc"
    )
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_run_goes_on_with_its_own_trace_and_prices_and_no_others(tmp_path: Path) -> None:
    result = train(replay_config(tmp_path))
    again = resumed_config(result.folder, minutes=5, timesteps=UPDATE)
    assert train(again, resume=True).num_updates == 3
    toy_trace(seed=1).save(tmp_path / "toy.npz")
    with pytest.raises(ValueError, match=r"toy\.npz has changed since the run was made"):
        train(again, resume=True)
    toy_trace().save(tmp_path / "toy.npz")
    CostModel.linear(base_s=0.1).save(tmp_path / "cost.json")
    with pytest.raises(ValueError, match=r"cost\.json has changed since the run was made"):
        train(again, resume=True)


def test_a_decoder_or_prompts_have_no_place_on_replay(tmp_path: Path) -> None:
    config = replay_config(tmp_path)
    for change in ({"decoder": toy_decoder()}, {"prompts": toy_prompts()}):
        with pytest.raises(ValueError, match="a trace has its own requests"):
            train(config, **change)
    with pytest.raises(ValueError, match="a trace has its own requests"):
        train(replace(config, prompts=Path("prompts.txt")))


class Watched:
    """Counts the depths that a scheduler chooses."""

    def __init__(self, scheduler: LearnedScheduler) -> None:
        self.scheduler, self.share = scheduler, list[float]()

    def choose(self, state: RoundState) -> Ints:
        depths = self.scheduler.choose(state)
        able = state.max_depths > 0
        self.share += (depths[able] / state.max_depths[able]).tolist()
        return depths

    def observe(self, outcome: Any) -> None:
        self.scheduler.observe(outcome)


@pytest.mark.parametrize(
    ("token_s", "start", "deep"), [(0.0, "off", True), (0.2, "fixed:4", False)]
)
def test_ppo_on_replay_learns_what_prices_make_pay(
    token_s: float, start: str, deep: bool, tmp_path: Path
) -> None:
    cost = CostModel.linear(base_s=0.05, token_s=token_s)
    config = replay_config(
        tmp_path,
        workload=WorkloadConfig(arrivals="constant", concurrency=2, num_requests=8),
        ppo=PPOConfig(
            n_steps=32,
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
    cost.save(tmp_path / "cost.json")
    toy_trace(accept=0.9).save(tmp_path / "toy.npz")
    result = train(replace(config, timesteps=12 * 4 * 32 * ENGINES))
    decoder = toy_replay(toy_trace(accept=0.9), cost)
    watched = Watched(LearnedScheduler.load(result.policy_folder))
    rows = decoder.trace.rows("held-out")
    serve(
        decoder.engine,
        Workload(requests=decoder.requests(rows), process=ClosedLoop.constant(2)),
        watched,
    )
    assert float(np.mean(watched.share)) > 0.85 if deep else float(np.mean(watched.share)) < 0.1


def test_the_command_trains_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay_config(tmp_path)
    flags = (
        f"--env replay --trace {tmp_path}/toy.npz --cost {tmp_path}/cost.json --out {tmp_path}/run "
        "--decoder.max-num-speculative-tokens 4 --decoder.max-num-seqs 4 --replay.num-engines 2 "
        "--replay.no-looping --ppo.n-steps 16 --timesteps 128 --workload.num-requests 6 "
        "--warm-start.rounds 10 --warm-start.epochs 2 --quiet --json"
    )
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is now an error
    assert main(["train", *flags.split()]) == 0
    assert json.loads(capsys.readouterr().out)["num_updates"] == 1
    config = TrainConfig.load(tmp_path / "run")
    assert config.env == "replay"
    assert not config.replay.looping
    assert config.replay.trace_sha256


def test_flags_name_trace_and_prices() -> None:
    config = TrainConfig(env="replay")
    chosen = settings(Options(config=config, trace="some", cost=Path("cost.json")))
    assert chosen.replay.trace == "some"
    assert chosen.decoder.cost == Path("cost.json")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"trace": "some"}, "--trace is for training on replay"),
        ({"config": TrainConfig(env="replay"), "trace": "some"}, "--trace and --cost"),
        ({"config": TrainConfig(env="replay"), "cost": Path("c.json")}, "--trace and --cost"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Options(**arguments)
