"""Training as the demo does it, on a made-up trace and rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdepth.agents import demo_training
from specdepth.agents.callbacks import TrainProgress
from specdepth.agents.demo import Options
from specdepth.agents.demo_ground import Ground, shipped_ground
from specdepth.agents.demo_training import search_iterations, train_config, train_on_replay
from specdepth.agents.offset_search import SearchConfig
from specdepth.agents.replay_engines import make_replay_decoders
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.learned import LearnedScheduler
from tests.agents.tiny_target import save_tiny_target
from tests.agents.toy_rule import save_toy_rule
from tests.envs.toy_trace import COST, toy_trace

OPTIONS = Options(loads=(1, 3), max_num_seqs=4, max_num_speculative_tokens=4)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    trace = toy_trace(16, longest=6)  # replayed in no time, so that there is time for a search
    trace.save(tmp_path / "toy.npz")
    COST.save(tmp_path / "cost.json")
    return Ground(
        trace=trace,
        trace_name=str(tmp_path / "toy.npz"),
        survival=str(tmp_path / "survival"),
        rules=(save_toy_rule(tmp_path),),
    )


def test_it_searches_and_goes_on_with_ppo_from_there(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_training, "SEARCH_SHARE", 1e6)  # on the slowest machine too
    told = list[TrainProgress]()
    result = train_on_replay(OPTIONS, ground, tmp_path, 1, told.append)
    assert told[0].stage == "search"
    assert told[-1].stage != "search"
    searched = LearnedScheduler.load(tmp_path / "train" / "searched")
    learned = LearnedScheduler.load(result.policy_folder)
    assert searched.card.training["search"]["loads"] == [1]
    assert learned.card.training["warm_start"] == f"policy:{tmp_path / 'train' / 'searched'}"
    assert result.num_decisions > 0


def test_steps_of_the_search_go_by_the_time_that_replays_take(
    ground: Ground, tmp_path: Path
) -> None:
    config = train_config(OPTIONS, ground, tmp_path)
    decoder = make_replay_decoders(config)[0]
    assert search_iterations(config, ground, decoder, 1e9) == SearchConfig().iterations
    assert search_iterations(config, ground, decoder, 1e-9) == 0
    other = replace(config, workload=replace(config.workload, concurrencies=(3,)))
    assert search_iterations(other, ground, decoder, 1e9) == 0


def test_only_a_free_drafter_pays_by_what_a_depth_gained(ground: Ground, tmp_path: Path) -> None:
    assert train_config(OPTIONS, ground, tmp_path).reward.form == "relative"
    dear = replace(ground, trace=toy_trace(drafter="draft-model"))
    assert train_config(OPTIONS, dear, tmp_path).reward.form == "difference"


def test_the_default_models_have_a_trace_and_a_rule(tmp_path: Path) -> None:
    def named(name: str, top: int) -> SpeculativeDecoder:
        folder = save_tiny_target(tmp_path / name)
        return SpeculativeDecoder.from_pretrained(
            str(folder), dtype="float32", device="cpu", max_num_speculative_tokens=top
        )

    ground = shipped_ground(named("SmolLM2-135M-Instruct", 8))
    assert ground is not None
    assert ground.trace_name == "smollm2-prompt-lookup-greedy"
    assert isinstance(make_scheduler(ground.rules[0]), CappedGreedyDepth)
    assert ground.label(ground.rules[0]) == ground.rules[0]
    assert shipped_ground(named("SmolLM2-135M-Instruct", 33)) is None
    assert shipped_ground(named("tiny", 8)) is None
