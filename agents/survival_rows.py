"""Labelled rows for a survival model: what a scheduler saw, and what every depth would have earned.

History features depend on the schedule, so rows are collected by replaying a trace under schedulers of
many kinds. Labels do not: a trace knows the run at each position, whatever was drafted there.

Legend: M rows, F features, K deepest depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.greedy import GreedyDepth
from specdepth.scheduler.baselines.random_depth import RandomDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import (
    AGREEMENT_DEPTHS,
    FEATURE_NAMES,
    UNIT_DEPTH,
    feature_matrix,
)
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival import SurvivalEstimator
from specdepth.scheduler.survival_estimators import MatchLengthSurvival

GREEDY_LOADS = (1, 4, 16, 32)
"""Loads of greedy rules, whose depths depend on it; other rules need one."""
ANY_LOAD = 16

UNKNOWN_SHARE = 0.25
"""Of the rows that a model is fitted to, seen once more without the target's signals: not every engine shows
them, nor does a trace of a log. Where only first rounds lack them, a model takes their absence for a sign."""
TARGET = [FEATURE_NAMES.index(n) for n in ("target_known", "target_top1", "target_entropy")]
SHALLOW_SHARE = 0.25
SHALLOW = (4, 8, 16)
"""And as many once more as engines with these depth limits show them, where they are below K."""
DEPTHS = [
    FEATURE_NAMES.index(n) for n in ("proposal_length", "max_depth", "last_depth", "last_accepted")
]
AGREEMENT = [FEATURE_NAMES.index(f"agreement_{depth}") for depth in AGREEMENT_DEPTHS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """A scheduler under which rows are collected."""

    scheduler: DepthScheduler
    load: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalRows:
    """Sequences in rounds, with the run that their proposal had."""

    features: NDArray[np.float32]
    """[M, F] from `feature_matrix`."""
    runs: Ints
    """[M] leading proposed tokens that the text goes on with."""
    limits: Ints
    """[M] `RoundState.max_depths`: no deeper token could have been drafted."""
    requests: Ints
    """[M] row of the request in its trace."""
    max_num_speculative_tokens: int
    """K."""

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def offered(self) -> Bools:
        """[M, K] whether the j-th token could have been drafted."""
        return np.arange(self.max_num_speculative_tokens) < self.limits[:, None]

    @property
    def survived(self) -> Bools:
        """[M, K] whether the first j tokens would all have been accepted."""
        return np.arange(self.max_num_speculative_tokens) < self.runs[:, None]

    @property
    def reached(self) -> Bools:
        """[M, K] whether the verdict on the j-th token says something about it: those before it were
        accepted. `survived` is the verdict.
        """
        depths = np.arange(self.max_num_speculative_tokens)
        return self.offered & (depths <= self.runs[:, None])

    @property
    def match_lengths(self) -> Ints:
        """[M] matched n-gram, 4 and longer as 4; 0 without one."""
        first = FEATURE_NAMES.index("match_1")
        flags = self.features[:, first : first + 4]
        return np.where(flags.any(axis=1), flags.argmax(axis=1) + 1, 0)

    def select(self, chosen: Bools | Ints) -> SurvivalRows:
        """Some of the rows."""
        return replace(
            self,
            features=self.features[chosen],
            runs=self.runs[chosen],
            limits=self.limits[chosen],
            requests=self.requests[chosen],
        )

    def with_unknown_target(self, rng: np.random.Generator) -> SurvivalRows:
        """All rows, and `UNKNOWN_SHARE` of them once more without the target's signals."""
        some = self.select(rng.random(len(self)) < UNKNOWN_SHARE)
        features = some.features.copy()
        features[:, TARGET] = 0.0
        return SurvivalRows.concatenate([self, replace(some, features=features)])

    def with_fewer_tokens(self, rng: np.random.Generator) -> SurvivalRows:
        """All rows, and `SHALLOW_SHARE` of them once more as engines with less room for drafts show them."""
        limits = [depth for depth in SHALLOW if depth < self.max_num_speculative_tokens]
        if not limits:
            return self
        some = self.select(rng.random(len(self)) < SHALLOW_SHARE)
        return SurvivalRows.concatenate([self, some.cut(rng.choice(limits, len(some)))])

    def cut(self, tops: Ints) -> SurvivalRows:
        """The rows as engines with depth limits `tops` [M] show them, each out of `AGREEMENT_DEPTHS`."""
        features = self.features.copy()
        most = (tops / UNIT_DEPTH).astype(np.float32)[:, None]
        features[:, DEPTHS] = np.minimum(features[:, DEPTHS], most)
        places = np.searchsorted(AGREEMENT_DEPTHS, np.minimum(AGREEMENT_DEPTHS, tops[:, None]))
        features[:, AGREEMENT] = np.take_along_axis(features[:, AGREEMENT], places, axis=1)
        limits = np.minimum(self.limits, tops)
        return replace(self, features=features, limits=limits, runs=np.minimum(self.runs, limits))

    def as_other_engines(self, rng: np.random.Generator) -> SurvivalRows:
        """All rows, some once more as engines show them that offer less, or tell less of the target."""
        return self.with_fewer_tokens(rng).with_unknown_target(rng)

    @classmethod
    def concatenate(cls, parts: Sequence[SurvivalRows]) -> SurvivalRows:
        """Put rows together. Of several traces, `requests` then means nothing; of several K, the rows
        of a smaller one say nothing of deeper tokens.
        """
        return cls(
            features=np.concatenate([part.features for part in parts]),
            runs=np.concatenate([part.runs for part in parts]),
            limits=np.concatenate([part.limits for part in parts]),
            requests=np.concatenate([part.requests for part in parts]),
            max_num_speculative_tokens=max(part.max_num_speculative_tokens for part in parts),
        )


class _Watch:
    """A scheduler that keeps what another one sees, of sequences that have something to draft."""

    def __init__(self, inner: DepthScheduler) -> None:
        self._inner = inner
        self.features: list[NDArray[np.float32]] = []
        self.columns: list[Ints] = []

    def choose(self, state: RoundState) -> Ints:
        some = state.max_depths > 0
        self.features.append(feature_matrix(state)[some])
        self.columns.append(
            np.stack([state.request_ids, state.num_generated, state.max_depths])[:, some]
        )
        return self._inner.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        self._inner.observe(outcome)


def collect_rows(
    trace: Trace, cost: CostModel, rows: Ints, behaviours: Iterable[Behaviour]
) -> SurvivalRows:
    """Serve requests `rows` of a trace once under each behaviour and keep what was seen.

    Sequences without a proposal are left out: nothing can be drafted there.

    Args:
        trace: what to replay.
        cost: prices of the machine, for rules that weigh them.
        rows: requests of the trace to serve, in this order.
        behaviours: schedulers and loads.

    Raises:
        ValueError: no behaviours, no rows.
    """
    parts = []
    for behaviour in behaviours:
        watch = _Watch(behaviour.scheduler)
        decoder = ReplayDecoder(trace, cost)  # a new engine counts its requests from 0
        workload = Workload(
            requests=decoder.requests(rows), process=ClosedLoop.constant(behaviour.load)
        )
        serve(decoder.engine, workload, watch)
        numbers, generated, limits = np.concatenate(watch.columns, axis=1)
        requests = rows[numbers]
        parts.append(
            SurvivalRows(
                features=np.concatenate(watch.features),
                runs=np.minimum(trace.accepted[trace.starts[requests] + generated], limits),
                limits=limits,
                requests=requests,
                max_num_speculative_tokens=decoder.config.max_num_speculative_tokens,
            )
        )
    if not parts:
        raise ValueError("no behaviour to collect rows under.")
    return SurvivalRows.concatenate(parts)


def exploring_behaviours(seed: int, max_depth: int) -> list[Behaviour]:
    """Histories of all kinds: nobody drafts, fixed depths, random ones, and a simple greedy rule.

    Args:
        seed: of the random depths.
        max_depth: K.
    """
    fixed = sorted({0, 1, 2, max_depth // 2, max_depth})
    return [
        *(Behaviour(scheduler=FixedDepth(depth), load=ANY_LOAD) for depth in fixed),
        Behaviour(scheduler=RandomDepth(seed), load=ANY_LOAD),
        *greedy_behaviours(MatchLengthSurvival()),
    ]


def greedy_behaviours(survival: SurvivalEstimator) -> list[Behaviour]:
    """The greedy rule over an estimator, as it is deployed, at several loads."""
    return [Behaviour(scheduler=GreedyDepth(survival), load=load) for load in GREEDY_LOADS]
