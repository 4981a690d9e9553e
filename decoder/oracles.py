"""Oracles: schedulers that know the recorded outcome of a round before they choose.

No deployment can run them. They show what is left to win on a trace by better choices in each round;
rules that look further ahead than one round can pass them.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.baselines.lawful import EVERY_RULE
from specdepth.scheduler.baselines.pricing import round_seconds
from specdepth.scheduler.baselines.uniform import uniform_depths
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .engine import EMPTY, Engine
from .replay import ReplayRunner
from .runner import RoundPlan


class TrueSurvival:
    """A `SurvivalEstimator` that looks the outcome up: each chance is 0 or 1.

    Args:
        engine: the one that is scheduled, over a trace.

    Raises:
        ValueError: an engine that decodes with models.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.runner, ReplayRunner):
            raise ValueError(
                "an oracle needs recorded outcomes, and this engine decodes with models; record a trace "
                "and use a ReplayDecoder."
            )
        self._engine = engine

    def runs(self, state: RoundState) -> Ints:
        """Return how many drafted tokens of each sequence would help, int64 [R].

        That is the accepted run, less the text's last token where the run holds it: one token is
        committed without drafting anyway.
        """
        # A result that is dropped leaves no trace in the runner.
        plan = RoundPlan(
            slots=state.slots,
            rows=np.arange(state.num_running),
            depths=state.max_depths,
            prefill_slots=EMPTY,
            prefill_lengths=EMPTY,
        )
        accepted = self._engine.runner.run(plan).num_accepted
        left = self._engine.seqs.end_at[state.slots] - state.positions
        runs: Ints = np.minimum(accepted, left - 1)
        return runs

    def survival(self, state: RoundState) -> Floats:
        """Return ones up to the run and zeros beyond, float64 [R, K]."""
        columns = np.arange(state.max_num_speculative_tokens)
        return (columns < self.runs(state)[:, None]).astype(np.float64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""

    def __repr__(self) -> str:
        return "TrueSurvival()"


class HindsightDepths(CappedGreedyDepth):
    """In each round, of all depths within the true runs, those with the most tokens a second.

    Exact for prompt lookup whatever the pass times, and with a draft model where a draft pass costs
    a constant plus a constant for each sequence; tokens that the draft model sat out are not priced.
    Where a larger pass costs less than a smaller one, tokens that are sure to be rejected can pay;
    they are not among the choices.

    Args:
        engine: the one that is scheduled, over a trace.

    Raises:
        ValueError: an engine that decodes with models.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(TrueSurvival(engine))

    def __repr__(self) -> str:
        return "HindsightDepths()"


class HindsightUniformDepth:
    """In each round the one depth for the whole batch that gives the most tokens a second.

    What no rule with one depth for all sequences can pass in a round; sequences with less on offer
    draft that, and pay for what is rejected.

    Args:
        engine: the one that is scheduled, over a trace.

    Raises:
        ValueError: an engine that decodes with models.
    """

    lawful_under = EVERY_RULE

    def __init__(self, engine: Engine) -> None:
        self._truth = TrueSurvival(engine)

    def choose(self, state: RoundState) -> Ints:
        """Return the best common depth, cut to what each sequence has on offer, int64 [R]."""
        depths = uniform_depths(state)
        if not state.num_running:
            return EMPTY
        tokens = state.num_running + np.minimum(depths, self._truth.runs(state)).sum(axis=1)
        best: Ints = depths[(tokens / round_seconds(state, depths)).argmax()]
        return best

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return "HindsightUniformDepth()"
