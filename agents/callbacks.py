"""What happens around the updates of a training run: statistics, log, checkpoints, end, progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import ResultsWriter

from .decode_stats import DecodeStats
from .rollout import SlotRolloutBuffer
from .slot_policy import SlotPolicy
from .slot_vec_env import SlotVecEnv
from .tracking import DEPTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """How far a run is."""

    stage: str
    """"search", "warm start", "rollout" or "update"."""
    fraction: float
    """Of the whole, 0..1."""
    elapsed_s: float
    """Wall time of this session."""
    num_updates: int
    num_rounds: int
    metrics: dict[str, float]
    """`DecodeStats` of the last update; empty before the first."""


Progress = Callable[[TrainProgress], None]


class TimeLimit(BaseCallback):
    """Ends training by the clock, between two rollouts where it can.

    A rollout that is cut is lost, so none is started that would end beyond the limit by more than
    half of the time that the last one and its update took.

    Args:
        deadline_s: `time.monotonic()`; None never ends.
    """

    def __init__(self, deadline_s: float | None) -> None:
        super().__init__()
        self.deadline_s = deadline_s
        self._started_s: float | None = None
        self._iteration_s = 0.0
        self._first_step = False

    def _on_rollout_start(self) -> None:
        now = time.monotonic()
        if self._started_s is not None:
            self._iteration_s = now - self._started_s
        self._started_s = now
        self._first_step = True

    def _on_step(self) -> bool:
        if self.deadline_s is None:
            return True
        first, self._first_step = self._first_step, False
        ahead = self._iteration_s / 2 if first else 0.0
        return time.monotonic() + ahead <= self.deadline_s


class UpdateCycle(BaseCallback):
    """Keeps normalisation, reference rates, log and checkpoints in step with the updates.

    A rollout's statistics are taken in after the update on it and before the next rollout: in
    between, the policy of the old log-probabilities would change.

    Args:
        env: what is trained on.
        num_updates: updates that the model has had.
        loads: numbers of running sequences seen in them.
        checkpoint: writes a checkpoint.
        checkpoint_s: seconds between two.
    """

    def __init__(
        self,
        env: SlotVecEnv,
        num_updates: int,
        loads: Sequence[int],
        checkpoint: Callable[[], None],
        checkpoint_s: float,
    ) -> None:
        super().__init__()
        self.env = env
        self.num_updates = num_updates
        self.metrics: dict[str, float] = {}
        """Of the last rollout that was finished."""
        self.loads = sorted(loads)
        """Numbers of running sequences seen so far."""
        self._checkpoint, self._checkpoint_s = checkpoint, checkpoint_s
        self._saved_s = time.monotonic()
        self._observations: NDArray[np.float32] | None = None

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.settle()
        self.env.stats = DecodeStats(self.env.max_num_speculative_tokens)
        if time.monotonic() - self._saved_s >= self._checkpoint_s and self.num_updates:
            self._checkpoint()
            self._saved_s = time.monotonic()

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer  # type: ignore[attr-defined]
        assert isinstance(buffer, SlotRolloutBuffer)
        self._observations = buffer.active_observations()
        stats = self.env.stats
        self.metrics = stats.as_dict()
        by_load = stats.by_load()
        self.loads = sorted({*self.loads, *by_load})
        for name, value in self.metrics.items():
            self.logger.record(f"decode/{name}", value)
        self.logger.record(DEPTHS, stats.depth_counts())  # trackers take it, tables leave it out
        for load, values in by_load.items():
            for name, value in values.items():
                self.logger.record(f"decode/{name}_at_{load}", value)

    def _on_training_end(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Finish the books of an update, if one was made since the last call."""
        if self._observations is None:
            return
        policy = self.model.policy
        if isinstance(policy, SlotPolicy):  # a policy of offsets takes features as they are
            policy.normaliser.update(self._observations)
        self._observations = None
        self.env.rates.refresh()
        self.num_updates += 1
        infos: list[dict[str, float]] = list(self.model.ep_info_buffer or ())
        for name, key in (("ep_rew_mean", "r"), ("ep_len_mean", "l")):
            if infos:
                mean = sum(info[key] for info in infos) / len(infos)
                self.logger.record(f"rollout/{name}", mean)
        self.logger.record("time/iterations", self.num_updates)
        self.logger.record("time/total_timesteps", self.model.num_timesteps)
        self.logger.record("time/rounds", self.env.num_rounds)
        self.logger.record("time/decisions", self.env.num_decisions)
        self.logger.dump(step=self.model.num_timesteps)


class EpisodeMonitor(BaseCallback):
    """Writes a line for each workload served, in the format of stable-baselines3's monitor files.

    Args:
        path: ends with "monitor.csv".
        header: its first line.
    """

    EXTRA = ("elapsed_s", "tokens", "acceptance_length", "mean_depth")

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        super().__init__()
        fresh = not os.path.exists(path)
        self._writer = ResultsWriter(path, header, self.EXTRA, override_existing=fresh)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self._writer.write_row(info["episode"])
        return True

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class ReportProgress(BaseCallback):
    """Tells a listener how far training is, a few times a second at most.

    Args:
        cycle: for counts and metrics.
        listener: what is told.
        start_s: `time.monotonic()` of the session's start.
        fraction: share of the run that is done.
    """

    INTERVAL_S = 0.25

    def __init__(
        self,
        cycle: UpdateCycle,
        listener: Progress,
        start_s: float,
        fraction: Callable[[], float],
    ) -> None:
        super().__init__()
        self._cycle, self._listener = cycle, listener
        self._start_s, self._fraction = start_s, fraction
        self._told_s = 0.0

    def _on_step(self) -> bool:
        if time.monotonic() - self._told_s >= self.INTERVAL_S:
            self._tell("rollout")
        return True

    def _on_rollout_end(self) -> None:
        self._tell("update")

    def _tell(self, stage: str) -> None:
        self._told_s = time.monotonic()
        self._listener(
            TrainProgress(
                stage=stage,
                fraction=min(self._fraction(), 1.0),
                elapsed_s=self._told_s - self._start_s,
                num_updates=self._cycle.num_updates,
                num_rounds=self._cycle.env.num_rounds,
                metrics=self._cycle.metrics,
            )
        )
