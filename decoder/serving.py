"""Serves a workload to its end: the loop between arrivals and rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Floats, RoundOutcome

from .arrivals import OpenLoop
from .engine import Engine
from .metrics import EngineMetrics
from .request import GenerationResult
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    """What serving n requests gave and took. Seconds on the engine's clock, unless they say wall."""

    results: tuple[GenerationResult, ...]
    """In the order of the workload's requests."""
    metrics: EngineMetrics
    makespan_s: float
    """From the start to the last token, idle waits included."""
    wall_s: float
    """The same as wall time."""
    request_s: Floats
    """[n] each request's share of the busy time: every round is split evenly among the requests that
    were in the engine. They sum to the makespan less idle waits, so requests can be resampled."""
    request_wall_s: Floats
    """[n] the same as wall time."""
    mean_in_flight: float
    """Requests in the engine, averaged over the busy time; below the concurrency where a closed
    loop ran out of requests."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens over the makespan."""
        return self.num_tokens / max(self.makespan_s, 1e-12)


def serve(
    engine: Engine,
    workload: Workload,
    scheduler: DepthScheduler,
    *,
    metrics: EngineMetrics | None = None,
    on_round: Callable[[RoundOutcome], None] | None = None,
) -> ServeResult:
    """Run `workload` on an idle engine until each request is done.

    The scheduler keeps whatever it learned in earlier calls. Whether two of them did equal work is
    for `share_of_different_texts` to say: under "greedy" and "coupled" the text is the same for
    every scheduler, but for rounding.

    Args:
        engine: with nothing to do; it is left so, whatever happens.
        workload: requests and when they come; a late one counts from its arrival time, not from the
            round that took it in.
        scheduler: chooses depths.
        metrics: counts on in these instead of new ones.
        on_round: called after each round.

    Raises:
        ValueError: a request or scheduler that the engine refuses.
        RuntimeError: the engine is busy.
        BaseException: whatever interrupts a round, once all requests are aborted.
    """
    if engine.has_work:
        raise RuntimeError("The engine has requests of its own; step them to their end first.")
    engine.take_finished()
    engine.set_scheduler(scheduler)
    engine.metrics = metrics or EngineMetrics(engine.config.max_num_speculative_tokens)
    try:
        return _run(engine, workload, on_round or (lambda outcome: None))
    except BaseException:
        engine.abort_all()
        engine.take_finished()
        raise


def share_of_different_texts(a: ServeResult, b: ServeResult) -> float:
    """Share of requests to which two runs of one workload gave different tokens.

    0 by construction in exact arithmetic. In bfloat16 a pass of another size may round a near tie
    the other way, since kernels are not batch-invariant; then the two did slightly different work.
    """
    pairs = zip(a.results, b.results, strict=True)
    return sum(x.token_ids != y.token_ids for x, y in pairs) / len(a.results)


def _run(
    engine: Engine, workload: Workload, on_round: Callable[[RoundOutcome], None]
) -> ServeResult:
    requests, clock, process = workload.requests, engine.clock, workload.process
    times_s = process.times_s if isinstance(process, OpenLoop) else None
    done: dict[int, GenerationResult] = {}
    inside: set[int] = set()
    # A request's share is what `share`, which grows by each round's time over the requests inside, has
    # grown by while it was there. Columns: the engine's clock, the wall.
    share, shares = np.zeros(2), np.zeros((len(requests), 2))
    busy_s = weighted_s = 0.0
    start_s = mark_s = clock.now()
    start_wall_s = mark_wall_s = time.perf_counter()
    while len(done) < len(requests):
        now_s = clock.now() - start_s
        due = workload.arrivals(
            now_s=now_s,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_finished=len(done),
        )
        for index in range(len(done) + len(inside), len(done) + len(inside) + due):
            request = requests[index]
            arrival_s = start_s + (now_s if times_s is None else times_s[index])
            engine.add_request(
                request.prompt_token_ids,
                request.sampling,
                str(index),
                arrival_s=arrival_s,
                recording=request.recording,
            )
            inside.add(index)
            shares[index] = -share
        outcome = engine.step()
        if outcome is None:
            # The engine admits something whenever it is empty, so it has nothing at all to do.
            moment = workload.next_arrival_s(now_s, num_finished=len(done))
            if moment is None:
                raise RuntimeError(f"{len(requests) - len(done)} requests never become due.")
            # One step further, or rounding could leave the moment just ahead for ever.
            clock.wait_until(float(np.nextafter(start_s + moment, np.inf)))
            mark_s, mark_wall_s = clock.now(), time.perf_counter()
            continue
        on_round(outcome)
        end_s, end_wall_s = clock.now(), time.perf_counter()
        num_inside, elapsed_s = len(inside), end_s - mark_s
        share += (elapsed_s / num_inside, (end_wall_s - mark_wall_s) / num_inside)
        busy_s += elapsed_s
        weighted_s += elapsed_s * num_inside
        mark_s, mark_wall_s = end_s, end_wall_s
        for result in engine.take_finished():
            index = int(result.request_id)
            done[index] = result
            inside.discard(index)
            shares[index] += share
    return ServeResult(
        results=tuple(done[index] for index in range(len(requests))),
        metrics=engine.metrics,
        makespan_s=mark_s - start_s,
        wall_s=mark_wall_s - start_wall_s,
        request_s=shares[:, 0],
        request_wall_s=shares[:, 1],
        mean_in_flight=weighted_s / max(busy_s, 1e-12),
    )
