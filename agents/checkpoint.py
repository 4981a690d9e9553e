"""What `--resume` needs: the stable-baselines3 zip, and beside it the rest of a run's state as JSON."""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3 import PPO

from .results import write_atomically
from .slot_vec_env import SlotVecEnv

logger = logging.getLogger(__name__)

MODEL_FILE = "model.zip"
STATE_FILE = "state.json"
FORMAT = "specdepth-train-state"
FORMAT_VERSION = 1
_MAX_STATE_BYTES = 16 << 20


class Checkpoint(NamedTuple):
    """What goes on from a checkpoint."""

    model: PPO
    num_updates: int
    """Updates that the model has had."""
    loads: tuple[int, ...] = ()
    """Numbers of running sequences seen in them."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, env: SlotVecEnv) -> None:
    """Write weights, optimiser, normalisation, counts, reference rates and random generators.

    The two files are each whole or absent; the state names the time step of the model that it goes
    with.

    Raises:
        ValueError: `folder` cannot be written to.
    """
    model = checkpoint.model
    temporary = folder / f".{os.getpid()}.{MODEL_FILE}"
    try:
        model.save(temporary)
        os.replace(temporary, folder / MODEL_FILE)
    except OSError as error:
        raise ValueError(f"cannot write {folder / MODEL_FILE}: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002 - stable-baselines3 draws from it
    assert isinstance(legacy, dict)
    state = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_timesteps": model.num_timesteps,
        "num_updates": checkpoint.num_updates,
        "loads": list(checkpoint.loads),
        "num_rounds": env.num_rounds,
        "num_decisions": env.num_decisions,
        "rates": env.rates.state(),
        "workload_rngs": env.rng_states(),
        "numpy_rng": _plain_rng(legacy),
        "torch_rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    write_atomically(folder / STATE_FILE, json.dumps(state) + "\n")


def load_checkpoint(folder: Path, env: SlotVecEnv) -> Checkpoint:
    """Read what `save_checkpoint` wrote, and set `env` and the global generators to it.

    The zip holds pickled objects, which can run code when they are loaded: resume your own runs only.
    Workloads under way are not in it; new ones start.

    Raises:
        ValueError: files that are missing, damaged, or do not belong together.
    """
    state = _read_state(folder / STATE_FILE)
    logger.warning("loading %s, which can run code: resume your own runs only.", MODEL_FILE)
    try:
        model = PPO.load(folder / MODEL_FILE, env=env, device="cpu")
    except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
        raise ValueError(f"cannot resume from {folder / MODEL_FILE}: {error}") from error
    if model.num_timesteps != state["num_timesteps"]:
        raise ValueError(
            f"{folder}: {MODEL_FILE} is of time step {model.num_timesteps}, {STATE_FILE} of "
            f"{state['num_timesteps']}; they were not written together."
        )
    try:
        env.rates.restore(state["rates"])
        env.num_rounds, env.num_decisions = state["num_rounds"], state["num_decisions"]
        env.set_rng_states(state["workload_rngs"])
        rng = state["numpy_rng"]
        rng["state"]["key"] = np.array(rng["state"]["key"], np.uint32)
        np.random.set_state(rng)  # noqa: NPY002
        packed = np.frombuffer(base64.b64decode(state["torch_rng"]), np.uint8)
        torch.set_rng_state(torch.from_numpy(packed.copy()))
        return Checkpoint(model, int(state["num_updates"]), tuple(map(int, state["loads"])))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder / STATE_FILE} is damaged: {error!r}.") from error


def _read_state(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_STATE_BYTES + 1)
        if len(data) > _MAX_STATE_BYTES:
            raise ValueError(f"larger than {_MAX_STATE_BYTES} bytes.")
        state = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise ValueError(
            f"no checkpoint in {path.parent}: {path.name}: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if (
        not isinstance(state, dict)
        or state.get("format") != FORMAT
        or state.get("format_version") != FORMAT_VERSION
    ):
        raise ValueError(f"{path} is no checkpoint of this version of specdepth.")
    return state


def _plain_rng(state: dict[str, Any]) -> dict[str, Any]:
    inner = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state["state"].items()}
    return state | {"state": inner}
