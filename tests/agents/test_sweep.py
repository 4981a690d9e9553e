"""The sweep in `examples/` runs: its command is made as W&B's agent makes it, and given to the CLI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tyro
from wandb.sdk.launch.sweeps import utils as agent

from specdepth.agents.cli import main
from specdepth.agents.train_command import Options, settings
from tests.agents.offline_run import offline_run

SWEEP = Path(__file__).parents[2] / "examples" / "sweep.yaml"
RUN_ID = "a1b2 c3d4"
"""With a space, which quoting has to survive."""
SMALL = {
    "ppo.n-steps": 16,
    "ppo.batch-size": 16,
    "ppo.n-epochs": 1,
    "timesteps": 128,
    "replay.num-engines": 1,
    "decoder.max-num-seqs": 4,
    "warm-start.rounds": 10,
    "workload.num-requests": 6,
    "workload.max-new-tokens": 8,
}
"""Makes a run take a second."""


@pytest.fixture(scope="module")
def sweep() -> dict[str, Any]:
    found: Any = agent.load_sweep_config(str(SWEEP))
    return dict(found)


def choices(sweep: dict[str, Any], last: bool) -> dict[str, Any]:
    """One value of each parameter, the first or the last."""
    return {
        name: spec.get("values", [spec.get("min"), spec.get("max")])[-1 if last else 0]
        for name, spec in sweep["parameters"].items()
    }


def command_line(sweep: dict[str, Any], values: dict[str, Any], bin_folder: Path) -> list[str]:
    """What the agent's command calls `specdepth` with."""
    flags = agent.create_sweep_command_args({"args": {k: {"value": v} for k, v in values.items()}})
    filled = {"${env}": ["/usr/bin/env"], "${args}": flags["args"]}
    words = [
        word
        for part in agent.create_sweep_command(list(sweep["command"]))
        for word in filled.get(part, [part])
    ]
    stub = bin_folder / "specdepth"
    stub.write_text("#!/bin/sh\nfor word; do printf '%s\\n' \"$word\"; done\n")
    stub.chmod(0o755)
    environment = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "WANDB_RUN_ID": RUN_ID}
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_the_file_is_a_sweep(sweep):
    assert set(sweep) == {"program", "method", "metric", "command", "parameters"}
    assert sweep["method"] in {"random", "grid", "bayes"}
    assert sweep["metric"] == {"name": "decode/reward", "goal": "maximize"}
    for spec in sweep["parameters"].values():
        if "values" in spec:
            assert set(spec) == {"values"}
            assert len(spec["values"]) > 1
        else:
            assert spec["distribution"] == "log_uniform_values"
            assert 0 < spec["min"] < spec["max"]


@pytest.mark.parametrize("last", [False, True])
def test_the_command_line_reaches_every_setting(sweep, tmp_path, last):
    values = choices(sweep, last)
    command, *arguments = command_line(sweep, values, tmp_path)
    assert command == "train"
    options = tyro.cli(Options, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    config = settings(options)
    assert config.track
    assert config.env == "replay"
    assert config.out == Path("runs/sweep") / RUN_ID
    for name, value in values.items():
        found: Any = config
        for part in name.replace("-", "_").split("."):
            found = getattr(found, part)
        assert found == value


def test_a_run_of_the_sweep_trains_and_logs_its_metric(sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    values = {**choices(sweep, last=False), **SMALL}
    assert main([*command_line(sweep, values, tmp_path), "--quiet"]) == 0
    found = offline_run(tmp_path / "runs" / "sweep" / RUN_ID)
    assert found.exit_code == 0
    assert sweep["metric"]["name"] in found.summary
