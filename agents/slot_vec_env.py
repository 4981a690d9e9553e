"""Every slot of one or more engines as an agent: the vector environment that PPO trains on.

Legend: E engines, S slots each, A = E * S agents, R running sequences, F features.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Wrapper, spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from specdepth.decoder.engine import Engine
from specdepth.decoder.replay import ReplayRunner
from specdepth.decoder.workload import Workload
from specdepth.envs.engine_env import is_backend_failure
from specdepth.envs.observation import ACTIVE, ROW_HIGH, ROW_LOW, Observation, slot_observation
from specdepth.envs.reward import (
    ReferenceRate,
    SlotReward,
    Timing,
    charged_s,
    decision_s,
    expected_tokens,
    modelled_s,
    relative_rewards,
    slot_rewards,
)
from specdepth.envs.workload_run import WorkloadRun
from specdepth.scheduler.batch_row import batch_row
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import feature_matrix
from specdepth.scheduler.state import Bools, Floats, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator

from .decode_stats import DecodeStats
from .offset_policy import BOUND, GivenLogits

logger = logging.getLogger(__name__)

WorkloadSource = Callable[[np.random.Generator], Workload]

MAX_FAILURES = 3
"""Backend failures without a round in between after which training gives up."""


class SlotVecEnv(VecEnv):
    """Steps engines a round at a time; agent e * S + s is slot s of engine e.

    An agent sees its row of the observation (`slot_observation`), float32 [1 + F], and chooses a depth
    in 0..K; empty slots have `active` 0, no reward and nothing to say. Its reward is `slot_rewards`,
    in tokens at the reference rate, so it is of order 1 at every load. With `one_depth` an engine has
    one agent, in the place of its first slot, which sees what its sequences have in common
    (`batch_row`), says one depth for all and is paid their mean reward. A trajectory goes on over the
    requests that pass through the slot, and is done when the engine's workload is served; the next
    workload starts at once.

    Beside what a VecEnv returns, each step leaves what `SlotRolloutBuffer` needs: `last_elapsed_s`
    and `last_failed`. What a trainer does between two steps costs nothing (`charged_s`); prompts cost
    time, which the discount sees, but no reward (`decision_s`).

    Args:
        engines: with equal S and K; one on a device. On replay they may be of different machines.
        workloads: draws a workload for an engine.
        rates: seconds per token of the reference policy; fed with each round. Engines of different
            machines need a rate of their own each, in their order.
        timing: "modelled" charges rounds by the cost model, free of timing noise (what a sequence
            adds to a round is known by the model alone in any case); "measured" by the clock.
        seed: of the workloads.
        offsets: agents act in logits, [K], of which this makes depths; None: they act in depths.
        reference: on replay with a free drafter, pay what was gained over its depths
            (`relative_rewards`) instead of `slot_rewards`.
        token_worth: see there.
        reward: what agents are paid where there is no `reference`.
        survival: pay for the tokens that it expects (`expected_tokens`) instead of those committed; it
            must be one that does not learn.
        one_depth: one agent an engine.

    Raises:
        ValueError: no engines, unequal ones, or rates of other machines.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        workloads: WorkloadSource,
        rates: ReferenceRate,
        *,
        timing: Timing = "modelled",
        seed: int = 0,
        offsets: GivenLogits | None = None,
        reference: DepthScheduler | None = None,
        token_worth: float = 1.0,
        reward: SlotReward = slot_rewards,
        survival: SurvivalEstimator | None = None,
        one_depth: bool = False,
    ) -> None:
        if not engines:
            raise ValueError("a SlotVecEnv needs at least one engine.")
        shapes = {(e.config.max_num_seqs, e.config.max_num_speculative_tokens) for e in engines}
        if len(shapes) > 1:
            raise ValueError(
                f"engines must have equal max_num_seqs and max_num_speculative_tokens, got {shapes}."
            )
        self.num_slots, self.max_num_speculative_tokens = shapes.pop()
        self._machines = _machines(engines, rates)
        self.engines, self.rates, self.timing = tuple(engines), rates, timing
        self._workloads, self.offsets = workloads, offsets
        self._reference, self._token_worth = reference, token_worth
        self._reward, self._survival, self.one_depth = reward, survival, one_depth
        if reference is not None and any(e.runner.drafter == "draft-model" for e in engines):
            raise ValueError("relative rewards need a drafter that costs nothing.")
        top = self.max_num_speculative_tokens
        super().__init__(
            len(self.engines) * self.num_slots,
            spaces.Box(ROW_LOW, ROW_HIGH),
            spaces.Discrete(top + 1) if offsets is None else spaces.Box(-BOUND, BOUND, (top,)),
        )
        self.last_elapsed_s: Floats = np.zeros(self.num_envs)
        """[A] seconds charged between the last two decisions."""
        self.last_failed: Bools = np.zeros(self.num_envs, np.bool_)
        """[A] whether the backend failed in the last step, which then is none."""
        self.last_outcomes: list[RoundOutcome | None] = [None] * len(self.engines)
        """[E] what the last step did; None where it failed."""
        self.stats = DecodeStats(self.max_num_speculative_tokens)
        """What was decoded since somebody last replaced it."""
        self.num_rounds = 0
        """Rounds with a decision, over all engines."""
        self.num_decisions = 0
        """Depths that agents chose for running sequences."""
        self._observations: Observation = np.zeros((self.num_envs, len(ROW_LOW)), np.float32)
        self._actions: NDArray[Any] | None = None
        self._runs: list[WorkloadRun | None] = [None] * len(self.engines)
        self._returns = np.zeros(len(self.engines))
        self._num_failures = 0
        self._start_s = time.monotonic()
        self._rngs: list[np.random.Generator] = []
        self.seed(seed)

    # ------------------------------------------------------------------- state

    @property
    def active(self) -> Bools:
        """[A] whether the slot has a sequence to decide for now."""
        return self._observations[:, ACTIVE] > 0

    def observations(self) -> Observation:
        """A copy of what agents see now, float32 [A, 1 + F]."""
        return self._observations.copy()

    def state_of(self, engine: int) -> RoundState:
        """What an engine's next depths are for.

        Raises:
            RuntimeError: before the first `reset`.
        """
        run = self._runs[engine]
        if run is None or run.state is None:
            raise RuntimeError("There is no round to decide; call reset first.")
        return run.state

    def agents_of(self, engine: int) -> Ints:
        """Agents that decide an engine's next round: one for each running sequence, or one for all."""
        if self.one_depth:
            return np.array([engine * self.num_slots])
        return engine * self.num_slots + self.state_of(engine).slots

    def rng_states(self) -> list[dict[str, Any]]:
        """State of each engine's generator, as JSON values."""
        return [dict(rng.bit_generator.state) for rng in self._rngs]

    def set_rng_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Put back what `rng_states` returned."""
        for rng, state in zip(self._rngs, states, strict=True):
            rng.bit_generator.state = state

    # ------------------------------------------------------------------- steps

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the workloads to come."""
        self._rngs = [np.random.default_rng([seed or 0, e]) for e in range(len(self.engines))]
        return [seed] * self.num_envs

    def reset(self) -> Observation:
        """Start a new workload on each engine."""
        for index in range(len(self.engines)):
            self._start(index)
        return self.observations()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take a depth for each agent, int [A], or logits [A, K]; those of empty slots are ignored."""
        if self.offsets is None:
            self._actions = np.asarray(actions, np.int64).reshape(self.num_envs)
        else:
            self._actions = np.asarray(actions, np.float32).reshape(self.num_envs, -1)

    def step_wait(self) -> VecEnvStepReturn:
        """Run a round on each engine."""
        assert self._actions is not None
        rewards = np.zeros(self.num_envs, np.float32)
        dones = np.zeros(self.num_envs, np.bool_)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.last_elapsed_s = np.zeros(self.num_envs)
        self.last_failed = np.zeros(self.num_envs, np.bool_)
        for index in range(len(self.engines)):
            at = slice(index * self.num_slots, (index + 1) * self.num_slots)
            try:
                self._step(index, at, rewards)
            except Exception as error:
                if not is_backend_failure(error):
                    raise
                self._fail(index, error)
                self.last_failed[at] = dones[at] = True
            run = self._runs[index]
            assert run is not None
            if run.done:
                dones[at] = True
                infos[at.start]["episode"] = self._episode(index, run)
            if dones[at.start]:
                self._start(index)
        self._actions = None
        return self.observations(), rewards, dones, infos

    def close(self) -> None:
        """Drop what the engines are at; they can be used elsewhere."""
        for run in self._runs:
            if run is not None:
                run.close()
        self._runs = [None] * len(self.engines)

    def _step(self, index: int, at: slice, rewards: NDArray[np.float32]) -> None:
        run = self._runs[index]
        state = self.state_of(index)
        assert run is not None
        assert self._actions is not None
        self.last_outcomes[index] = None
        agents = self.agents_of(index)
        chosen = self._actions[agents]
        if self.offsets is not None:
            chosen = self.offsets.depths(state, chosen)
        if self.one_depth:
            chosen = np.repeat(chosen, state.num_running)
        survival = None if self._survival is None else self._survival.survival(state)
        runs = None if self._reference is None else _runs(run.engine, state)
        outcome = run.finish_round(chosen)
        upcoming = run.next_decision()
        cost = state.cost
        round_s, undecided_s = charged_s(outcome), run.undecided_s
        if self.timing == "modelled":
            round_s, undecided_s = modelled_s(outcome, cost), run.undecided_modelled_s
        elapsed_s, decided_s = round_s + undecided_s, decision_s(state, outcome, cost, round_s)
        rate = self.rates(state.num_running, self._machines[index])
        if self._reference is None or runs is None:
            row = self._reward(
                state,
                outcome,
                elapsed_s=decided_s,
                seconds_per_token=rate,
                cost=cost,
                tokens=None if survival is None else expected_tokens(survival, outcome),
            )
        else:
            row = relative_rewards(
                state,
                outcome,
                runs=runs,
                depths=np.minimum(self._reference.choose(state), state.max_depths),
                token_worth=self._token_worth,
                seconds_per_token=rate,
                cost=cost,
            )
        rewards[agents] = row.mean() if self.one_depth else row
        self.last_elapsed_s[at] = elapsed_s
        self.last_outcomes[index] = outcome
        self._returns[index] += float(row.sum())
        self._num_failures = 0
        self.num_rounds += 1
        self.num_decisions += len(agents)
        committed = int(outcome.num_committed.sum())
        self.rates.note(state.num_running, decided_s, committed, self._machines[index])
        self.stats.add(outcome, elapsed_s=elapsed_s, rewards=row)
        self._show(index, upcoming)

    def _start(self, index: int) -> None:
        workload = self._workloads(self._rngs[index])
        run = WorkloadRun(self.engines[index], workload)
        self._runs[index] = run
        self._returns[index] = 0.0
        self._show(index, run.next_decision())

    def _show(self, index: int, state: RoundState | None) -> None:
        at = slice(index * self.num_slots, (index + 1) * self.num_slots)
        if not self.one_depth:
            self._observations[at] = slot_observation(state, self.num_slots)
            return
        self._observations[at] = 0.0
        if state is not None:
            self._observations[at.start, ACTIVE] = 1.0
            self._observations[at.start, 1:] = batch_row(feature_matrix(state))

    def _fail(self, index: int, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            raise error
        logger.warning("the backend failed, a new workload starts: %s", error)
        run = self._runs[index]
        if run is not None:
            run.close()

    def _episode(self, index: int, run: WorkloadRun) -> dict[str, float]:
        metrics = run.engine.metrics
        return {
            "r": round(float(self._returns[index]), 6),
            "l": run.num_decisions,
            "t": round(time.monotonic() - self._start_s, 6),
            "elapsed_s": run.now_s,
            "tokens": metrics.num_committed_tokens,
            "acceptance_length": metrics.acceptance_length,
            "mean_depth": metrics.mean_depth,
        }

    # ---------------------------------------- the rest of what a VecEnv has to have

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute of this object, once for each agent: agents have none of their own."""
        value = None if attr_name == "render_mode" else getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused: agents share their environment."""
        raise NotImplementedError("The slots of an engine have no attributes of their own.")

    def env_method(
        self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        """Refused: agents share their environment."""
        raise NotImplementedError("The slots of an engine have no methods of their own.")

    def env_is_wrapped(
        self, wrapper_class: type[Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Never wrapped."""
        return [False for _ in self._get_indices(indices)]


def _runs(engine: Engine, state: RoundState) -> Ints:
    """[R] drafted tokens that would be accepted now, however many were drafted."""
    runner = engine.runner
    assert isinstance(runner, ReplayRunner)
    rows = np.array([engine.batch[slot].recording for slot in state.slots.tolist()])
    accepted: Ints = runner.trace.accepted[runner.trace.starts[rows] + state.num_generated]
    return np.minimum(accepted, state.max_depths)


def _machines(engines: Sequence[Engine], rates: ReferenceRate) -> tuple[int, ...]:
    """Which of the machines of `rates` each engine is."""
    costs = [engine.cost for engine in engines]
    if len(rates.costs) == 1 and all(cost == costs[0] for cost in costs):
        return (0,) * len(costs)
    if costs != list(rates.costs):
        raise ValueError(
            f"{len(costs)} engines of different machines need a ReferenceRate over their cost models, in "
            f"their order; got one over {len(rates.costs)}."
        )
    return tuple(range(len(costs)))
