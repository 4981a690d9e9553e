"""An engine as a Gymnasium environment: what the live and the replay environment have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from specdepth.decoder.engine import Engine
from specdepth.decoder.workload import Workload
from specdepth.scheduler.state import RoundOutcome

from .arguments import WorkloadLike, checked_price, checked_rounds, checked_workload
from .observation import (
    COLUMN_NAMES,
    COLUMN_UNITS,
    ROW_HIGH,
    ROW_LOW,
    Observation,
    slot_observation,
)
from .reward import charged_s, depth_0_seconds_per_token
from .workload_config import WorkloadConfig
from .workload_run import WorkloadRun

logger = logging.getLogger(__name__)

Actions = NDArray[np.int64]

OPTIONS = frozenset({"workload", "seconds_per_token", "max_rounds"})
"""What `reset(options=...)` understands."""


def is_backend_failure(error: Exception) -> bool:
    """Whether `error` is the machine's (out of memory, a lost device, I/O) and not the program's.

    PyTorch raises `RuntimeError` or a subclass for whatever fails on a device.
    """
    if isinstance(error, NotImplementedError | RecursionError):
        return False
    return isinstance(error, RuntimeError | MemoryError | OSError)


class EngineEnv(gymnasium.Env[Observation, Actions], ABC):
    """Steps an engine a round at a time; the decision problem is described in `LiveDecodeEnv`.

    Args:
        engine: idle, or with leftovers that are dropped.
        workload: of the episodes; None draws default ones.
        max_rounds: steps after which an episode is truncated; None for no limit.
        seconds_per_token: of the reference policy; None takes decoding without speculation at the
            workload's typical load by the cost model.
        render_mode: None.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "column_names": COLUMN_NAMES,
        "column_units": COLUMN_UNITS,
    }

    def __init__(
        self,
        engine: Engine,
        workload: WorkloadLike | None,
        max_rounds: int | None,
        seconds_per_token: float | None,
        render_mode: str | None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"there is nothing to render, got render_mode={render_mode!r}.")
        self.render_mode = None
        self.engine = engine
        self._workload = checked_workload(WorkloadConfig() if workload is None else workload)
        self._max_rounds = checked_rounds(max_rounds)
        self._seconds_per_token = checked_price(seconds_per_token)
        config = engine.config
        self.num_slots = config.max_num_seqs
        self.observation_space = spaces.Box(
            np.tile(ROW_LOW, (self.num_slots, 1)), np.tile(ROW_HIGH, (self.num_slots, 1))
        )
        self.action_space = spaces.MultiDiscrete(
            np.full(self.num_slots, config.max_num_speculative_tokens + 1)
        )
        self._run: WorkloadRun | None = None
        self._ended = True
        self._last: Observation = slot_observation(None, self.num_slots)
        self._price = 0.0
        self._cap: int | None = None

    @abstractmethod
    def _draw(self, config: WorkloadConfig) -> Workload:
        """Draw a workload from `np_random`."""

    @property
    def run(self) -> WorkloadRun:
        """The episode's workload on its way through the engine.

        Raises:
            RuntimeError: before the first `reset`, or after `close`.
        """
        if self._run is None:
            raise RuntimeError("There is no episode; call reset first.")
        return self._run

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start a workload; see the class for `options`.

        Raises:
            ValueError: an unknown option, or one of a wrong kind.
        """
        super().reset(seed=seed)
        chosen = self._chosen(options or {})
        source = checked_workload(chosen["workload"])
        workload = self._draw(source) if isinstance(source, WorkloadConfig) else source
        self._cap = checked_rounds(chosen["max_rounds"])
        price = checked_price(chosen["seconds_per_token"])
        if price is None:
            price = self._default_price(source)
        self._price = price
        self._run = WorkloadRun(self.engine, workload)
        state = self._run.next_decision()
        self._ended = state is None
        self._last = slot_observation(state, self.num_slots)
        return self._last.copy(), {
            "num_requests": workload.num_requests,
            "seconds_per_token": self._price,
            "prefill_s": self._run.undecided_s,
            "idle_s": self._run.idle_s,
        }

    def step(self, action: Actions) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run one round with a depth for each slot, and go on to the next that needs depths.

        Raises:
            ValueError: an action outside the action space.
            RuntimeError: the episode is over.
        """
        run = self.run
        if self._ended or run.state is None:
            raise RuntimeError("The episode is over; call reset first.")
        action = np.asarray(action)
        if action.shape != (self.num_slots,):
            raise ValueError(
                f"the action has shape {action.shape}, expected ({self.num_slots},): one depth a slot."
            )
        depths, top = action[run.state.slots], self.engine.config.max_num_speculative_tokens
        if not ((depths >= 0) & (depths <= top)).all():
            raise ValueError(f"the action holds {depths.tolist()}, expected depths in 0..{top}.")
        outcome: RoundOutcome | None = None
        info: dict[str, Any] = {}
        try:
            outcome = run.finish_round(depths)
            state = run.next_decision()
            self._last = slot_observation(state, self.num_slots)
        except Exception as error:
            if not is_backend_failure(error):
                raise
            logger.warning("the backend failed: %s: %s", type(error).__name__, error)
            info = {"error_type": type(error).__name__, "error": str(error)}
            run.close()
        terminated = run.done and not info
        capped = self._cap is not None and run.num_decisions >= self._cap
        truncated = bool(info) or (capped and not terminated)
        self._ended = terminated or truncated
        reward = 0.0
        if outcome is not None:
            step_s = charged_s(outcome) + run.undecided_s
            reward = int(outcome.num_committed.sum()) * self._price - step_s
            info = _info(run, outcome, step_s) | info
        return self._last.copy(), reward, terminated, truncated, info

    def close(self) -> None:
        """Drop the episode; the engine can be used elsewhere."""
        if self._run is not None:
            self._run.close()
        self._run, self._ended = None, True

    def _chosen(self, options: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise ValueError(
                f"unknown reset options {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}."
            )
        chosen: dict[str, Any] = {
            "workload": self._workload,
            "seconds_per_token": self._seconds_per_token,
            "max_rounds": self._max_rounds,
        }
        return chosen | options

    def _default_price(self, source: Workload | WorkloadConfig) -> float:
        typical = source.typical_load if isinstance(source, WorkloadConfig) else self.num_slots
        load = min(typical, self.num_slots)
        return depth_0_seconds_per_token(self.engine.cost, load)


def _info(run: WorkloadRun, outcome: RoundOutcome, step_s: float) -> dict[str, Any]:
    return {
        "step_s": step_s,
        "draft_s": outcome.draft_s,
        "verify_s": outcome.verify_s,
        "other_s": outcome.other_s,
        "prefill_s": run.undecided_s,
        "idle_s": run.idle_s,
        "now_s": run.now_s,
        "num_running": len(outcome.depths),
        "num_waiting": outcome.num_waiting,
        "num_pass_tokens": outcome.num_pass_tokens,
        "num_drafted_tokens": int(outcome.num_drafted.sum()),
        "num_accepted_tokens": int(outcome.num_accepted.sum()),
        "num_committed_tokens": int(outcome.num_committed.sum()),
        "num_preempted": int(outcome.preempted.sum()) + outcome.num_preempted_prefills,
        "num_finished_requests": run.num_finished,
        "kv_used_fraction": outcome.kv_used_fraction,
    }
