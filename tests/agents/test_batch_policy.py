"""One depth for the whole batch: from its warm start through PPO to the exported policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.assembly import make_model
from specdepth.agents.export import export_policy
from specdepth.agents.slot_policy import BatchPolicy
from specdepth.agents.train import resumed_config, train
from specdepth.agents.train_config import (
    DecoderConfig,
    PPOConfig,
    ReplayConfig,
    TrainConfig,
    WarmStartConfig,
)
from specdepth.decoder.serving import serve
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard
from specdepth.scheduler.state import Ints, RoundState
from tests.agents.toy_training import toy_config, toy_vec_env
from tests.envs.toy_trace import COST, toy_replay, toy_trace

UPDATE = 16 * 4 * 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("batch")
    toy_trace().save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    config = replace(
        toy_config(folder / "run"),
        env="replay",
        action="batch",
        timesteps=2 * UPDATE,
        decoder=DecoderConfig(
            max_num_seqs=4, max_num_speculative_tokens=4, cost=folder / "cost.json"
        ),
        replay=ReplayConfig(trace=str(folder / "toy.npz"), num_engines=2),
        warm_start=WarmStartConfig(scheduler="table:1-1=4,2-2=2,3-=1", rounds=40),
    )
    return train(config)


def test_the_policy_imitates_a_rule_for_the_batch(run: Any) -> None:
    assert run.warm_start.agreement > 0.9
    assert run.num_decisions == run.num_rounds == 2 * (40 + 2 * 16), "one decision a round"


def test_it_is_exported_as_what_it_is(run: Any) -> None:
    scheduler = LearnedScheduler.load(run.policy_folder)
    assert scheduler.weights.action == "batch"
    assert scheduler.weights.depths == (0, 1, 2, 3, 4)
    assert "one depth for all sequences" in (run.policy_folder / "README.md").read_text()


def test_every_sequence_drafts_as_deep_as_it_can_up_to_the_one_depth(run: Any) -> None:
    class Seen(LearnedScheduler):
        def choose(self, state: RoundState) -> Ints:
            depths = super().choose(state)
            sizes.append(state.num_running)
            assert len(depths) == state.num_running
            assert (depths == depths[0]).all()
            assert depths[0] <= state.max_depths.max()
            return depths

    sizes: list[int] = []
    loaded = LearnedScheduler.load(run.policy_folder)
    decoder = toy_replay()
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(4))
    served = serve(decoder.engine, workload, Seen(loaded.weights, loaded.card))
    assert served.num_tokens == decoder.trace.num_tokens.sum()
    assert max(sizes) == 4


def test_a_run_goes_on_where_it_was(run: Any) -> None:
    again = resumed_config(run.folder, minutes=5, timesteps=UPDATE)
    assert train(again, resume=True).num_updates == 3
    assert TrainConfig.load(run.folder).action == "batch"


def test_the_exported_policy_chooses_what_the_trained_one_predicts(tmp_path: Path) -> None:
    env = toy_vec_env(action="batch")
    model = make_model(PPOConfig(), env, 0)
    assert isinstance(model.policy, BatchPolicy)
    for parameter in model.policy.parameters():
        parameter.data.mul_(4)
    card = PolicyCard(
        model_pair="toy+recorded-text",
        drafter="recorded-text",
        max_num_speculative_tokens=4,
        mask_depths=True,
    )
    scheduler = LearnedScheduler.load(export_policy(model, tmp_path, card))
    rows, seen = env.reset(), set()
    for step in range(60):
        state = env.state_of(0)
        predicted, _ = model.predict(rows, deterministic=True)
        assert scheduler.choose(state).tolist() == [predicted[0]] * state.num_running
        seen.add(int(predicted[0]))
        rows = np.asarray(env.step(np.full(4, step % 5))[0])
    assert len(seen) > 1
