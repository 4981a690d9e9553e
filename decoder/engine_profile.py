"""How the rounds of another engine differ from ours, for replay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.depth import DepthScheduler, lawful_rules
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .engine import Engine

MAX_LAG = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile:
    """What a replayed engine does otherwise. Steps of pass sizes belong to the cost model
    (`cuda_graph_sizes`).
    """

    decision_lag: int = 0
    """Rounds between the state that a scheduler sees and the round that it decides: engines that
    schedule asynchronously plan a round while the one before still runs."""
    pad_drafts: bool = False
    """Draft passes run over all running sequences, as often as the deepest of them wants: shapes are fixed
    when drafting begins, so a shallow depth saves verification only."""

    def __post_init__(self) -> None:
        if not 0 <= self.decision_lag <= MAX_LAG:
            raise ValueError(f"decision_lag must be in 0..{MAX_LAG}, got {self.decision_lag}.")

    @classmethod
    def named(cls, name: str) -> EngineProfile:
        """Profile of "specdepth", "vllm-like" (a round of lag, padded drafts) or "vllm-like:2" (two).

        Sources: vLLM's adaptive verification (#47808) decides on confidences one step old, drafts the
        full depth for everybody, and verifies what it allots.

        Raises:
            ValueError: another name.
        """
        kind, _, lag = name.partition(":")
        if name == "specdepth":
            return cls()
        if kind == "vllm-like" and (not lag or lag.isdigit()):
            return cls(decision_lag=int(lag or 1), pad_drafts=True)
        raise ValueError(
            f'unknown engine profile "{name}"; there are "specdepth", "vllm-like" and "vllm-like:2".'
        )


class Lagged:
    """A scheduler that sees old states.

    Sequences that were not there `lag` rounds ago do not draft: their drafts would have been made then.
    Early stops (`keep_drafting`, `trim`) do not exist in such an engine. Outcomes are passed on at once, in
    the order of the state that was shown; sequences that left in between count as preempted.

    Args:
        scheduler: decides.
        lag: rounds.
    """

    def __init__(self, scheduler: DepthScheduler, lag: int) -> None:
        self.scheduler, self.lag = scheduler, lag
        self._states: deque[RoundState] = deque(maxlen=lag + 1)
        self._rows: Ints = np.zeros(0, np.int64)
        """For each row of the state that was shown last, its row in the round, or -1."""

    @property
    def lawful_under(self) -> frozenset[str]:
        """As of the scheduler inside: what it sees is older, never newer."""
        return lawful_rules(self.scheduler)

    def reset(self) -> None:
        """Forget states, and what the scheduler inside learned."""
        self._states.clear()
        reset = getattr(self.scheduler, "reset", None)
        if reset is not None:
            reset()

    def choose(self, state: RoundState) -> Ints:
        """Depths that the scheduler inside gives the old state, by request."""
        self._states.append(state)
        old = self._states[0]
        chosen = np.asarray(self.scheduler.choose(old))
        order = np.argsort(state.request_ids)
        found = np.searchsorted(state.request_ids, old.request_ids, sorter=order)
        rows = order[np.minimum(found, state.num_running - 1)]
        self._rows = np.where(state.request_ids[rows] == old.request_ids, rows, -1)
        depths = np.zeros(state.num_running, np.int64)
        there = self._rows >= 0
        depths[self._rows[there]] = chosen[there]
        return depths

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the scheduler inside."""
        old, rows = self._states[0], self._rows
        gone = rows < 0

        def shown(values: NDArray[Any], fill: Any) -> NDArray[Any]:
            taken = values[rows]
            taken[gone] = fill
            return taken

        self.scheduler.observe(
            replace(
                outcome,
                slots=old.slots,
                request_ids=old.request_ids,
                depths=shown(outcome.depths, 0),
                num_drafted=shown(outcome.num_drafted, 0),
                num_proposed=shown(outcome.num_proposed, 0),
                num_accepted=shown(outcome.num_accepted, 0),
                num_committed=shown(outcome.num_committed, 0),
                finished=shown(outcome.finished, False),
                preempted=shown(outcome.preempted, True),
                draft_top1=shown(outcome.draft_top1, np.nan),
                draft_entropy=shown(outcome.draft_entropy, np.nan),
                draft_margin=shown(outcome.draft_margin, np.nan),
                target_top1=shown(outcome.target_top1, np.nan),
                target_entropy=shown(outcome.target_entropy, np.nan),
            )
        )


class LaggedEngine(Engine):
    """An engine whose schedulers see states `lag` rounds old."""

    lag: int = 0

    def set_scheduler(self, scheduler: DepthScheduler) -> None:
        """Wrap and set; see `Engine.set_scheduler`."""
        super().set_scheduler(Lagged(scheduler, self.lag) if self.lag else scheduler)
