"""Live comparison of policies: the same requests for each, interleaved, at several loads.

A *block* is a few requests served to the end in a closed loop of one concurrency, the *load*. All
policies serve a block before the next one starts, in rotating order, so that slow drifts of the
machine meet all of them. `comparison.py` makes numbers of it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch

from specdepth.decoder.clock import Clock, ThreadClock, VirtualClock, WallClock
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
from specdepth.scheduler.baselines import FixedDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import RoundOutcome

from .comparison import ClockKind, Comparison, LoadRuns, machine_noise
from .fitting import fit

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0..1, and what is going on."""

DEFAULT_NUM_REQUESTS = 16
LATE = 1.1
"""Share of the time asked for beyond which readers are told."""


def evaluate(
    decoder: SpeculativeDecoder,
    policies: Mapping[str, DepthScheduler],
    requests: Sequence[WorkloadRequest],
    loads: Sequence[int],
    *,
    num_requests: int | None = None,
    repeats: int = 1,
    minutes: float | None = None,
    clock: ClockKind | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Serve the same requests under each policy and load.

    With `minutes`, the load that has had the least time gets the next block as long as one fits; the
    decoder's cost model says beforehand whether answers have to be shorter for that. What was done
    is in `Comparison.notes`.

    Args:
        decoder: idle, its `engine.cost` measured if `minutes` is to be kept.
        policies: by name; "off" and "fixed:K" are what others are compared with.
        requests: in order; each load starts from the first, and over again after the last.
        loads: concurrent requests of each closed loop.
        num_requests: for each load, about, since blocks are whole; None: 16, or as many as fit into
            `minutes`.
        repeats: times that they are served.
        minutes: wall time for everything.
        clock: what latencies and throughput are measured with; None takes the decoder's own if that
            is a virtual one, CPU time where that is all the work (torch on the CPU with one
            thread), else the wall.
        progress: called after each run.

    Returns:
        Complete blocks only. After Ctrl-C, those that were complete, and `interrupted` is set.

    Raises:
        ValueError: no policy, request or load, a load that the decoder cannot hold or that there are
            too few requests for, a request that it cannot serve.
    """
    _check(decoder, policies, requests, loads, num_requests, repeats, minutes)
    own = decoder.engine.clock
    if clock is None and isinstance(own, VirtualClock):
        clock = "virtual"
    elif clock is None:
        clock = "cpu" if has_thread_time(decoder) else "wall"
    clocks: dict[ClockKind, Clock] = {"cpu": ThreadClock(), "wall": WallClock(), "virtual": own}
    with timed_by(decoder, clocks[clock]):
        work = _Evaluation(decoder, dict(policies), list(requests), minutes, progress)
        return work.run(loads, num_requests, repeats, clock)


def has_thread_time(decoder: SpeculativeDecoder) -> bool:
    """Whether the CPU time of this thread is all the work that the decoder does."""
    return decoder.target.device.type == "cpu" and torch.get_num_threads() == 1


@contextmanager
def timed_by(decoder: SpeculativeDecoder, clock: Clock) -> Iterator[None]:
    """Let an idle decoder take its time from `clock` for a while."""
    engine, runner = decoder.engine, decoder.runner
    before = engine.clock, runner.clock
    engine.clock = runner.clock = clock
    try:
        yield
    finally:
        engine.clock, runner.clock = before


def timed_by_work(decoder: SpeculativeDecoder) -> AbstractContextManager[None]:
    """`timed_by` the CPU time of this thread where that is all the work, else the wall."""
    return timed_by(decoder, ThreadClock() if has_thread_time(decoder) else WallClock())


@dataclass(slots=True)
class _Load:
    """One load's share of the work."""

    runs: LoadRuns
    size: int
    """Requests in a block."""
    blocks_a_pass: int
    """Blocks until requests are repeated."""
    goal: float
    """Blocks to do."""
    spent_s: float = 0.0
    misses: list[float] = field(default_factory=list)
    """Of each run, the logarithm of its time over what the cost model says."""
    longest_s: float = 0.0
    """Wall time of the longest block, all policies together."""

    @property
    def next_block(self) -> tuple[range, int]:
        """Indices of requests, and which repeat of them it is."""
        repeat, place = divmod(self.runs.num_blocks, self.blocks_a_pass)
        return range(place * self.size, (place + 1) * self.size), repeat


class _Priced:
    """What rounds should have taken."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.seconds = 0.0

    def add(self, outcome: RoundOutcome) -> None:
        self.seconds += self.cost.outcome_s(outcome)


class _Evaluation:
    """One call of `evaluate`."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        policies: dict[str, DepthScheduler],
        requests: list[WorkloadRequest],
        minutes: float | None,
        progress: Progress | None,
    ) -> None:
        self.decoder, self.policies, self.requests = decoder, policies, requests
        self.start_s = time.perf_counter()
        self.budget_s = math.inf if minutes is None else 60 * minutes
        self.progress = progress or (lambda share, text: None)
        self.notes: list[str] = []
        self.loads: dict[int, _Load] = {}

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s

    def run(
        self, loads: Sequence[int], num_requests: int | None, repeats: int, clock: ClockKind
    ) -> Comparison:
        interrupted = False
        try:
            wait = self._warm_up(loads)
            left_s = (self.budget_s - self.elapsed_s) / wait
            chosen = fit(
                self.requests,
                loads,
                seconds=left_s,
                cost=self.decoder.engine.cost,
                num_runs=len(self.policies),
            )
            self.requests, self.notes = chosen.requests, chosen.notes
            for load, size in chosen.sizes.items():
                self.loads[load] = self._plan(size, num_requests, repeats)
            while (following := self._next_load()) is not None:
                self._do_block(following, self.loads[following])
        except KeyboardInterrupt:
            interrupted = True
            self.notes.append("Interrupted: only blocks that all policies had served are counted.")
        if self.elapsed_s > LATE * self.budget_s:
            self.notes.append(
                f"This took {self.elapsed_s:.0f} s instead of {self.budget_s:.0f} s, since each "
                "load gets one block at least."
            )
        runs: dict[int | str, LoadRuns] = {
            load: one.runs for load, one in self.loads.items() if one.runs.num_blocks
        }
        is_virtual = isinstance(self.decoder.engine.clock, VirtualClock)
        has_noise = self.decoder.engine.cost.measured or is_virtual
        noise = machine_noise([one.misses for one in self.loads.values()]) if has_noise else 0.0
        for run in runs.values():
            run.noise = noise
        is_coupled = self.decoder.config.verification == "coupled"
        found = Comparison(
            runs=runs,
            clock=clock,
            same_text=is_coupled or all(r.sampling.temperature == 0 for r in self.requests),
            has_noise=has_noise,
            interrupted=interrupted,
        )
        found.notes = [*found.describe(), *self.notes]
        return found

    def _plan(self, size: int, num_requests: int | None, repeats: int) -> _Load:
        most = max(len(self.requests) // size, 1)
        runs = LoadRuns(tuple(self.policies))
        if num_requests is None and math.isfinite(self.budget_s):
            return _Load(runs, size, most, math.inf)
        a_pass = min(max(round((num_requests or DEFAULT_NUM_REQUESTS) / size), 1), most)
        return _Load(runs, size, a_pass, a_pass * repeats)

    def _next_load(self) -> int | None:
        """First a block for each load, then whoever has had the least time, while one fits."""
        fitting = [
            load
            for load, one in self.loads.items()
            if one.runs.num_blocks < one.goal
            and (not one.runs.num_blocks or self.elapsed_s + one.longest_s <= self.budget_s)
        ]

        def served(load: int) -> tuple[bool, float]:
            return self.loads[load].runs.num_blocks > 0, self.loads[load].spent_s

        return min(fitting, key=served, default=None)

    def _do_block(self, load: int, one: _Load) -> None:
        before_s = self.elapsed_s
        block, repeat = one.next_block
        workload = Workload(
            requests=tuple(self.requests[i] for i in block), process=ClosedLoop.constant(load)
        )
        names = list(self.policies)
        first = one.runs.num_blocks % len(names)
        served: dict[str, ServeResult] = {}
        misses = []
        for name in names[first:] + names[:first]:
            # A copy: the counts of a block that is not completed must not stay.
            metrics = copy.deepcopy(one.runs.metrics.get(name))
            priced = _Priced(self.decoder.engine.cost)
            served[name] = serve(
                self.decoder.engine,
                workload,
                self.policies[name],
                metrics=metrics,
                on_round=priced.add,
            )
            misses.append(math.log(served[name].makespan_s / priced.seconds))
            self.progress(self._share(one, len(served)), f"load {load}, {name}")
        one.runs.add(block, repeat, served)
        one.misses += misses
        took_s = self.elapsed_s - before_s
        one.spent_s += took_s
        one.longest_s = max(one.longest_s, took_s)

    def _share(self, current: _Load, num_served: int) -> float:
        """What is done, by time or by blocks."""
        if math.isfinite(self.budget_s):
            return min(self.elapsed_s / self.budget_s, 1.0)
        done = sum(one.runs.num_blocks for one in self.loads.values())
        goal = sum(one.goal for one in self.loads.values())
        return (done + num_served / len(self.policies)) / goal

    def _warm_up(self, loads: Sequence[int]) -> float:
        """Touch what the runs will touch, with a few tokens each; not counted.

        The kernels of a CPU need no more than a run a load; a GPU captures a graph for each pass
        size.

        Returns:
            Wall time over time on the engine's clock: how long one has to wait for a core.
        """
        deepest = FixedDepth(self.decoder.config.max_num_speculative_tokens)
        is_cpu = self.decoder.target.device.type == "cpu"
        chosen = [deepest] if is_cpu else [*self.policies.values(), deepest]
        makespan_s = wall_s = 0.0
        for load in loads:
            short = tuple(
                replace(
                    request,
                    prompt_token_ids=request.prompt_token_ids[:8],
                    sampling=replace(request.sampling, max_new_tokens=4, stop=(), ignore_eos=True),
                )
                for request in self.requests[:load]
            )
            workload = Workload(requests=short, process=ClosedLoop.constant(load))
            for policy in chosen:
                served = serve(self.decoder.engine, workload, policy)
                makespan_s += served.makespan_s
                wall_s += served.wall_s
        is_real = not isinstance(self.decoder.engine.clock, VirtualClock)
        return max(wall_s / max(makespan_s, 1e-12), 1.0) if is_real else 1.0


def _check(
    decoder: SpeculativeDecoder,
    policies: Mapping[str, DepthScheduler],
    requests: Sequence[WorkloadRequest],
    loads: Sequence[int],
    num_requests: int | None,
    repeats: int,
    minutes: float | None,
) -> None:
    top = decoder.config.max_num_seqs
    if not policies or not requests or not loads:
        raise ValueError("evaluation needs at least one policy, one request and one load.")
    for load in loads:
        if not 1 <= load <= top:
            raise ValueError(
                f"load {load} is outside 1..{top} (max_num_seqs); raise that or lower the load."
            )
        if load > len(requests):
            raise ValueError(
                f"load {load} needs at least {load} different requests, there are {len(requests)}; "
                "give more prompts or lower the load."
            )
    if len(set(loads)) < len(loads):
        raise ValueError(f"each load is measured once, got {list(loads)}.")
    if repeats < 1 or (num_requests is not None and num_requests < 1):
        raise ValueError("repeats and the number of requests must be at least 1.")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be above 0, got {minutes}.")
    longest = max(len(r.prompt_token_ids) + r.sampling.max_new_tokens for r in requests)
    limit = decoder.engine.seqs.max_model_len
    if longest > limit:
        raise ValueError(
            f"a request may reach {longest} tokens, the model holds {limit} (max_model_len); "
            "leave out long prompts or lower max_new_tokens."
        )
