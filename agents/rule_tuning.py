"""Rules and their scalars, chosen by replaying the training split: never the requests they are judged by.

Replay of the same requests has no noise, so a difference between two settings is real for them; how
far it carries over is for the held-out requests to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdepth.decoder.arrivals import ClosedLoop
from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import Workload
from specdepth.scheduler.baselines import FixedDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints

from .intervals import geometric_mean
from .replay_workloads import check_loads, shuffled

Scalars = Mapping[str, float]
"""A rule's settings by name."""


class TrainingReplay:
    """Scores schedulers on training requests: the same ones, in the same order, for all of them.

    Args:
        trace: recorded outcomes.
        cost: prices of the machine.
        loads: concurrent requests of the closed loops to score at.
        rows: requests; the training split by default.
        num_requests: use so many of them at most, but always as many as the load or more; None: all.
        config: of the engine; None has as many slots as the highest load.
        profile: how the engine differs from ours; ours by default.
        seed: of choice and order.

    Raises:
        ValueError: bad loads, or too few requests for them.
    """

    def __init__(
        self,
        trace: Trace,
        cost: CostModel,
        loads: Sequence[int],
        *,
        rows: Ints | None = None,
        num_requests: int | None = None,
        config: EngineConfig | None = None,
        profile: EngineProfile | None = None,
        seed: int = 0,
    ) -> None:
        rows = trace.rows("train") if rows is None else rows
        check_loads(loads, len(rows))
        if config is None:
            top = trace.info.max_num_speculative_tokens
            config = EngineConfig(max_num_speculative_tokens=top, max_num_seqs=max(loads))
        self.loads = tuple(loads)
        self._decoder = ReplayDecoder(trace, cost, config, profile)
        self._workloads: dict[int, Workload] = {}
        mixed = np.random.default_rng(seed).permutation(rows)
        for load in loads:
            used = mixed if num_requests is None else mixed[: max(num_requests, load)]
            requests = self._decoder.requests(np.array(shuffled(used, load, seed)[0]))
            process = ClosedLoop.constant(load)
            self._workloads[load] = Workload(requests=requests, process=process)

    def throughput(self, scheduler: DepthScheduler, load: int) -> float:
        """Tokens a second of `scheduler`, which first forgets what it learned, at one of the loads."""
        reset = getattr(scheduler, "reset", None)
        if reset is not None:
            reset()
        self._decoder.engine.round_index = 0
        return serve(self._decoder.engine, self._workloads[load], scheduler).throughput_tok_s

    def sweep(self, depths: Sequence[int]) -> dict[int, dict[int, float]]:
        """Throughput of fixed depths: load to depth to tokens a second, as `tuned_table` takes it."""
        return {
            load: {depth: self.throughput(FixedDepth(depth), load) for depth in depths}
            for load in self.loads
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRule:
    """What training says of the settings of one rule."""

    scheduler: DepthScheduler
    """Best over all loads, by the geometric mean of throughput."""
    throughput_tok_s: Mapping[int, float]
    """Its figures, by load."""
    best_at: Mapping[int, DepthScheduler]
    """The best at each load alone."""
    best_tok_s: Mapping[int, float]
    """Their figures."""

    @property
    def score(self) -> float:
        """Geometric mean of throughput over the loads."""
        return geometric_mean(list(self.throughput_tok_s.values()))


def tune(
    training: TrainingReplay, candidates: Mapping[str, Sequence[DepthScheduler]]
) -> dict[str, TunedRule]:
    """Choose among the settings of each rule.

    Args:
        training: scores them.
        candidates: settings by the name of the rule; the first of equally good ones wins.

    Raises:
        ValueError: a rule without candidates.
    """
    found = {}
    for name, schedulers in candidates.items():
        if not schedulers:
            raise ValueError(f"rule {name!r} has no candidate to choose from.")
        figures = [
            {load: training.throughput(scheduler, load) for load in training.loads}
            for scheduler in schedulers
        ]
        scores = [geometric_mean(list(figure.values())) for figure in figures]
        best = int(np.argmax(scores))
        at = {load: int(np.argmax([figure[load] for figure in figures])) for load in training.loads}
        found[name] = TunedRule(
            scheduler=schedulers[best],
            throughput_tok_s=figures[best],
            best_at={load: schedulers[i] for load, i in at.items()},
            best_tok_s={load: figures[i][load] for load, i in at.items()},
        )
    return found


def strongest(tuned: Mapping[str, TunedRule]) -> str:
    """Name of the rule with the best score.

    Raises:
        ValueError: there is none.
    """
    if not tuned:
        raise ValueError("no rule was tuned, so none is the strongest.")
    return max(tuned, key=lambda name: tuned[name].score)


def best_single_depth(sweep: Mapping[int, Mapping[int, float]]) -> int:
    """The depth with the best geometric mean of throughput over the loads of a `sweep`."""
    depths = next(iter(sweep.values()))
    return max(depths, key=lambda depth: geometric_mean([row[depth] for row in sweep.values()]))


def coordinate_search(
    training: TrainingReplay,
    make: Callable[[Scalars], DepthScheduler],
    grid: Mapping[str, Sequence[float]],
    *,
    loads: Sequence[int] | None = None,
    max_passes: int = 2,
) -> tuple[dict[str, float], float]:
    """Choose a rule's scalars one after the other, again until none changes.

    Args:
        training: scores the settings; each is replayed once.
        make: the rule with given scalars.
        grid: values to try, by name; the first of each is where the search starts.
        loads: score by the geometric mean over these; all of `training` by default. One load at a
            time gives scalars by load.
        max_passes: over all scalars.

    Returns:
        The scalars, and their score in tokens a second.
    """
    loads = training.loads if loads is None else loads
    seen: dict[tuple[float, ...], float] = {}

    def score(values: Scalars) -> float:
        key = tuple(values[name] for name in grid)
        if key not in seen:
            scheduler = make(values)
            seen[key] = geometric_mean([training.throughput(scheduler, load) for load in loads])
        return seen[key]

    chosen = {name: values[0] for name, values in grid.items()}
    for _ in range(max_passes):
        before = dict(chosen)
        for name, values in grid.items():
            chosen[name] = max(values, key=lambda value: score(chosen | {name: value}))
        if chosen == before:
            break
    return chosen, score(chosen)
