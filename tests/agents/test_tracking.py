from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.train_config import TrackConfig
from tests.agents.toy_training import toy_config, toy_train

BLOCK = 32768


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of a transaction log: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def records(folder: Path) -> dict[str, list[Any]]:
    """Records of an offline run, by kind.

    W&B's own process may close the file a moment after `finish` has returned; the last record is "exit".
    """
    deadline = time.monotonic() + 30
    while "exit" not in (found := _records(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _records(folder: Path) -> dict[str, list[Any]]:
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = folder.glob("*.wandb")
    found: dict[str, list[Any]] = {}
    for data in chunks(path.read_bytes()):
        record = proto.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def test_an_offline_run_holds_config_metrics_and_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = toy_config(
        tmp_path / "run", track=True, wandb=TrackConfig(project="toy", group="g", tags=("t",))
    )
    result = toy_train(config)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert result.sync_command == f"wandb sync {folder}"

    found = records(folder)
    run = found["run"][0]
    assert (run.project, run.run_group, run.job_type) == ("toy", "g", "train")
    assert "t" in run.tags
    assert any(tag.startswith("torch-") for tag in run.tags)
    logged = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert logged["ppo"]["n_steps"] == 16
    assert logged["workload"]["concurrencies"] == [1, 2, 4]

    history = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in line.item}
        for line in found["history"]
    ]
    lines = [line for line in history if "decode/throughput_tok_s" in line]
    assert len(lines) == 2
    for name in ("decode/acceptance_length", "train/approx_kl", "time/total_timesteps"):
        assert name in lines[0]

    artifacts = [
        request.log_artifact.artifact
        for request in found.get("request", [])
        if request.WhichOneof("request_type") == "log_artifact"
    ] + found.get("artifact", [])
    (artifact,) = artifacts
    assert (artifact.type, artifact.name) == ("model", "draft-depth-policy")
    assert set(artifact.aliases) == {"latest", "final"}
    names = {entry.path for entry in artifact.manifest.contents}
    assert names >= {"policy.safetensors", "config.json", "README.md"}


def test_disabled_tracking_writes_nothing_and_needs_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    result = toy_train(toy_config(tmp_path / "run", track=True))
    assert result.sync_command is None
    assert not list((tmp_path / "run").rglob("*.wandb"))


def test_without_track_wandb_is_never_imported() -> None:
    code = "import sys, specdepth.agents.train; print('wandb' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
