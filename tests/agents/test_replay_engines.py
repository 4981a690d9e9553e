from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.replay_engines import content_sha256, make_replay_decoders, pinned
from specdepth.agents.train_config import DecoderConfig, ReplayConfig, TrainConfig
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from tests.envs.toy_trace import COST, toy_trace


def config_for(folder: Path, **changes: Any) -> TrainConfig:
    toy_trace().save(folder / "toy.npz")
    COST.save(folder / "cost.json")
    decoder = DecoderConfig(max_num_seqs=4, max_num_speculative_tokens=4, cost=folder / "cost.json")
    replay = ReplayConfig(trace=str(folder / "toy.npz"), num_engines=3)
    return TrainConfig(env="replay", decoder=decoder, replay=replace(replay, **changes))


def test_engines_share_a_trace_and_have_the_settings_of_the_run(tmp_path: Path) -> None:
    decoders = make_replay_decoders(config_for(tmp_path, num_kv_blocks=77, lookahead="clip"))
    assert len(decoders) == 3
    assert len({id(decoder.engine) for decoder in decoders}) == 3
    for decoder in decoders:
        assert decoder.trace is decoders[0].trace
        assert decoder.config.max_num_seqs == 4
        assert decoder.config.max_num_speculative_tokens == 4
        assert decoder.config.num_kv_blocks == 77
        assert decoder.config.lookahead == "clip"
        assert decoder.engine.cost == COST


def test_a_pinned_run_takes_the_same_files_and_no_others(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    config = pinned(config, make_replay_decoders(config)[0])
    assert len(config.replay.trace_sha256) == len(config.replay.cost_sha256) == 64
    make_replay_decoders(config)
    toy_trace(seed=1).save(tmp_path / "toy.npz")
    with pytest.raises(ValueError, match=r"trace .*toy\.npz has changed since the run was made"):
        make_replay_decoders(config)
    toy_trace().save(tmp_path / "toy.npz")
    replace(COST, overhead_s=0.001).save(tmp_path / "cost.json")
    with pytest.raises(ValueError, match=r"cost model .*cost\.json has changed since"):
        make_replay_decoders(config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"replay": ReplayConfig()}, "needs a trace; name one with --trace"),
        ({"decoder": DecoderConfig()}, "needs a cost model, .* name one with --cost"),
        ({"decoder": DecoderConfig(cost=Path("cost.json"))}, r"cannot read cost model cost\.json"),
        ({"replay": ReplayConfig(trace="no/such.npz")}, "no trace 'no/such.npz'"),
    ],
)
def test_what_is_missing_is_said(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_replay_decoders(replace(config_for(tmp_path), **change))


def test_a_k_deeper_than_recorded_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path)
    deep = replace(config.decoder, max_num_speculative_tokens=8)
    with pytest.raises(ValueError, match="the trace was recorded up to 4"):
        make_replay_decoders(replace(config, decoder=deep))


def test_the_digest_is_of_the_content_and_not_of_the_file(tmp_path: Path) -> None:
    toy_trace().save(tmp_path / "a.npz")
    toy_trace().save(tmp_path / "b.npz")
    a, b = (Trace.load(tmp_path / f"{name}.npz") for name in "ab")
    assert content_sha256(a) == content_sha256(b)
    assert content_sha256(COST) == content_sha256(CostModel.from_dict(COST.to_dict()))


@pytest.mark.parametrize("field", ["accepted", "target_top1", "held_out", "ids", "info"])
def test_any_change_of_content_changes_the_digest(field: str) -> None:
    trace = toy_trace()
    value = getattr(trace, field)
    if field == "info":
        changed: Any = replace(value, model_pair="others")
    elif field == "ids":
        changed = ("other", *value[1:])
    else:
        changed = value.copy()
        at = int(np.argmax(value > 0))
        changed[at] = 0
    assert content_sha256(replace(trace, **{field: changed})) != content_sha256(trace)
