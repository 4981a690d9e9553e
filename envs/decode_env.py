"""`specdepth/LiveDecode-v0`: how deep to draft, as a Gymnasium environment over the real engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import Workload
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import RoundOutcome

from .arguments import (
    DecoderSource,
    WorkloadLike,
    checked_price,
    checked_rounds,
    checked_workload,
    make_decoder,
)
from .observation import (
    COLUMN_NAMES,
    COLUMN_UNITS,
    ROW_HIGH,
    ROW_LOW,
    Observation,
    slot_observation,
)
from .reward import charged_s, depth_0_seconds_per_token
from .workload_config import PromptLike, PromptPool, WorkloadConfig
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


class LiveDecodeEnv(gymnasium.Env[Observation, Actions]):
    """Choose the draft depth of each sequence in each round of a batched speculative decoder.

    ## Description
    Speculative decoding spends the spare arithmetic of a memory-bound forward pass on drafted
    tokens. A batch spends it too, so the best depth falls as more sequences run, and it differs
    between sequences, since some drafts are more likely to be accepted than others. The environment
    serves a workload with the same engine rounds that deployment runs: each step is one round, draft
    and verify, of all running sequences. The text does not depend on the actions.

    ## Action Space
    `MultiDiscrete([K + 1] * S)`, S the engine's slots (`max_num_seqs`), K its deepest depth
    (`max_num_speculative_tokens`): tokens to draft for the sequence in each slot. Entries of empty
    slots are ignored. A depth that cannot be honoured (nothing more to propose, the request's last
    tokens) is clipped by the engine.

    ## Observation Space
    `Box(float32, [S, 1 + F])`: a row a slot. Column 0 (`active`) is 1 where a sequence decodes; the
    others are the features of `specdepth.scheduler.features`, the same as in deployment. Rows of
    empty slots are 0. `metadata["column_names"]` and `metadata["column_units"]` name them; bounds
    are true.

    ## Rewards
    In seconds: minus the elapsed seconds of the round, plus its committed tokens times
    `seconds_per_token`. A workload's tokens are the same whatever is done, so the return is a
    constant minus the time in which there was work; the constant only reduces variance. Rounds in
    which no sequence decodes yet (prompts being prefilled) ask for no action; their seconds are
    charged to the step before, those ahead of the first step to none. Not charged: the time that
    the agent takes to decide, and waits for the next arrival with an empty engine. A learner should
    discount by `info["step_s"]` and not by the step, or long rounds look cheap.

    ## Starting State
    A workload is drawn from `np_random`: prompts, their kinds, seeds, and arrivals. The first
    observation is the first round in which a sequence decodes.

    ## Episode End
    Terminated when the workload is served. Truncated after `max_rounds` steps, or when the backend
    fails (out of memory, lost device): `info["error_type"]` and `info["error"]` then say what
    happened, the observation is the last one, and the reward 0: nothing is known about that round.
    Errors of the program are raised.

    ## Arguments
    With `gymnasium.make("specdepth.envs:specdepth/LiveDecode-v0", ...)`:

    * `decoder`: a `SpeculativeDecoder`, or a function that makes one (as vector environments need).
    * `target`, `draft`: names for `SpeculativeDecoder.from_pretrained`, instead of `decoder`.
    * `decoder_options`: its further arguments, for example `{"max_num_seqs": 16}`.
    * `prompts`: texts, token lists or `Prompt`s; None takes the shipped training prompts.
    * `workload`: a `WorkloadConfig` or its fields as a mapping, of which each episode draws a new
      one, or a fixed `Workload`. `reset(options={"workload": ...})` overrides it for an episode.
    * `cost`: the machine's prices shown in the observation; None keeps the decoder's.
    * `sampling`: `SamplingParams` for all requests, instead of what the workload's fields say.
    * `max_rounds`: steps after which an episode is truncated; None for no limit.
    * `seconds_per_token`: of the reference policy; None takes decoding without speculation at the
      workload's typical load by the cost model.

    `reset(options=...)` takes `workload`, `seconds_per_token` and `max_rounds`. One decoder serves
    one environment at a time. On the wall clock the environment is not deterministic; with a
    decoder on a `VirtualClock` it is.

    ## Version History
    * v0: first version.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "column_names": COLUMN_NAMES,
        "column_units": COLUMN_UNITS,
    }

    def __init__(
        self,
        decoder: DecoderSource | None = None,
        *,
        target: str = "default",
        draft: str = "prompt-lookup",
        decoder_options: Mapping[str, Any] | None = None,
        prompts: Sequence[PromptLike] | None = None,
        workload: WorkloadLike | None = None,
        cost: CostModel | None = None,
        sampling: SamplingParams | None = None,
        max_rounds: int | None = None,
        seconds_per_token: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"there is nothing to render, got render_mode={render_mode!r}.")
        self.render_mode = None
        self.decoder = make_decoder(decoder, target, draft, decoder_options)
        if cost is not None:
            self.decoder.engine.cost = cost
        self._workload = checked_workload(WorkloadConfig() if workload is None else workload)
        self._sampling = sampling
        self._max_rounds = checked_rounds(max_rounds)
        self._seconds_per_token = checked_price(seconds_per_token)
        drawn = isinstance(self._workload, WorkloadConfig)
        self._prompts = PromptPool(self.decoder, prompts) if drawn or prompts is not None else None
        config = self.decoder.config
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

    @property
    def spec(self) -> EnvSpec | None:
        """How it was made."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        # Wrappers copy the spec deeply, and a copy of a decoder is a second set of models.
        if spec is not None and isinstance(spec.kwargs.get("decoder"), SpeculativeDecoder):
            decoder = spec.kwargs["decoder"]
            spec = replace(spec, kwargs=spec.kwargs | {"decoder": lambda: decoder})
        self._spec = spec

    _spec: EnvSpec | None = None

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
        workload = self._draw(source)
        self._cap = checked_rounds(chosen["max_rounds"])
        price = checked_price(chosen["seconds_per_token"])
        if price is None:
            price = self._default_price(source)
        self._price = price
        self._run = WorkloadRun(self.decoder.engine, workload)
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
        depths, top = action[run.state.slots], self.decoder.config.max_num_speculative_tokens
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
        """Drop the episode; the decoder can be used elsewhere."""
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

    def _draw(self, workload: Workload | WorkloadConfig) -> Workload:
        if isinstance(workload, Workload):
            return workload
        if self._prompts is None:
            self._prompts = PromptPool(self.decoder)
        return self._prompts.workload(workload, self.np_random, self._sampling)

    def _default_price(self, source: Workload | WorkloadConfig) -> float:
        typical = source.typical_load if isinstance(source, WorkloadConfig) else self.num_slots
        load = min(typical, self.num_slots)
        return depth_0_seconds_per_token(self.decoder.engine.cost, load)


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
