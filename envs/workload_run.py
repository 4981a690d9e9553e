"""Carries a workload through an engine, from one depth decision to the next."""

from __future__ import annotations

import numpy as np

from specdepth.decoder.engine import Engine
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines.off import Off
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .reward import charged_s, modelled_s

NO_DEPTHS: Ints = np.zeros(0, np.int64)


class AgentDepths(Off):
    """Stands in the engine for an agent that decides from outside; lawful under every rule, since
    its features do not depend on tokens drafted in the round.
    """


class WorkloadRun:
    """One workload on its way through an engine.

        state = run.next_decision()
        while state is not None:
            outcome = run.finish_round(depths for state)
            state = run.next_decision()

    These are the engine's own rounds (`begin_round`, `finish_round`), the same as in deployment.
    Rounds without a decision, those that only prefill, run inside `next_decision`; their time is
    kept in `undecided_s`.

    Time is the workload's own, `now_s`: the sum of charged seconds (`charged_s`). Arrivals follow
    it, so a trainer that thinks for a minute finds no queue of a minute; and where nothing is to be
    done until the next arrival, it jumps there without waiting or charging.

    Args:
        engine: idle, or with leftovers of an earlier run, which are dropped.
        workload: what to serve.
    """

    def __init__(self, engine: Engine, workload: Workload) -> None:
        engine.abort_all()
        engine.take_finished()
        engine.metrics = EngineMetrics(engine.config.max_num_speculative_tokens)
        # Also clears the hooks (`keep_drafting`, `trim`) of a scheduler that was there before.
        engine.set_scheduler(AgentDepths())
        self.engine, self.workload = engine, workload
        self.state: RoundState | None = None
        """What the next depths are for; None before the first decision and after the last."""
        self.now_s = 0.0
        self.undecided_s = 0.0
        """Charged seconds of rounds without a decision since the last decision."""
        self.undecided_modelled_s = 0.0
        """The same by the engine's cost model."""
        self.idle_s = 0.0
        """Time over which `now_s` jumped since the last decision."""
        self.num_released = 0
        self.num_finished = 0
        self.num_decisions = 0

    @property
    def done(self) -> bool:
        """Whether every request was served."""
        return self.num_finished >= self.workload.num_requests

    def next_decision(self) -> RoundState | None:
        """Go on to the next state with running sequences; None when the workload is served."""
        self.undecided_s = self.undecided_modelled_s = self.idle_s = 0.0
        self.state = None
        while not self.done:
            self._release()
            state = self.engine.begin_round()
            if state is None:
                self._skip_idle()
            elif state.num_running:
                self.state = state
                return state
            else:
                outcome = self._finish(NO_DEPTHS)
                self.undecided_s += charged_s(outcome)
                self.undecided_modelled_s += modelled_s(outcome, self.engine.cost)
        return None

    def finish_round(self, depths: Ints) -> RoundOutcome:
        """Run the round of `state` with `depths`, int64 [R].

        Raises:
            RuntimeError: there is no round to finish.
            ValueError: depths of a wrong shape or out of range.
        """
        if self.state is None:
            raise RuntimeError("finish_round needs a state from next_decision.")
        outcome = self._finish(depths)
        self.num_decisions += 1
        return outcome

    def close(self) -> None:
        """Drop what is left in the engine."""
        self.engine.abort_all()
        self.engine.take_finished()
        self.state = None

    def _finish(self, depths: Ints) -> RoundOutcome:
        outcome = self.engine.finish_round(depths)
        self.now_s += charged_s(outcome)
        self.num_finished += len(self.engine.take_finished())
        return outcome

    def _release(self) -> None:
        due = self.workload.arrivals(
            now_s=self.now_s,
            num_running=self.engine.num_running,
            num_waiting=self.engine.num_waiting,
            num_finished=self.num_finished,
        )
        for request in self.workload.requests[self.num_released : self.num_released + due]:
            self.engine.add_request(
                request.prompt_token_ids, request.sampling, recording=request.recording
            )
        self.num_released += due

    def _skip_idle(self) -> None:
        moment = self.workload.next_arrival_s(self.now_s, num_finished=self.num_finished)
        if moment is None:
            raise ValueError(
                f"the workload releases {self.num_released} of {self.workload.num_requests} "
                "requests and then none, although the engine is idle."
            )
        # Arrivals at or before `now_s` are due already, unless rounding says otherwise.
        moment = max(moment, np.nextafter(self.now_s, np.inf))
        self.idle_s += float(moment) - self.now_s
        self.now_s = float(moment)
