"""Live comparison of policies: the same requests for each, interleaved, at several loads.

A *block* is a few requests served to the end in a closed loop of one concurrency, the *load*. All
policies serve a block before the next one starts, in rotating order, so that slow drifts of the
machine meet all of them. `comparison.py` makes numbers of it.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
from specdepth.scheduler.baselines import FixedDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler

from .comparison import Comparison, LoadRuns

logger = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0..1, and what is going on."""

MIN_NEW_TOKENS = 16
"""`evaluate` does not cut answers below this to keep its time."""
DEFAULT_NUM_REQUESTS = 16


def evaluate(
    decoder: SpeculativeDecoder,
    policies: Mapping[str, DepthScheduler],
    requests: Sequence[WorkloadRequest],
    loads: Sequence[int],
    *,
    num_requests: int | None = None,
    repeats: int = 1,
    minutes: float | None = None,
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
        num_requests: for each load; None: 16, or as many as fit into `minutes`. Never fewer than
            the load.
        repeats: times that each request is served, without `minutes`.
        minutes: wall time for everything.
        progress: called after each run.

    Returns:
        Complete blocks only. After Ctrl-C, those that were complete, and `interrupted` is set.

    Raises:
        ValueError: no policy, request or load, a load that the decoder cannot hold or that there are
            too few requests for, a request that it cannot serve.
    """
    _check(decoder, policies, requests, loads, num_requests, repeats, minutes)
    start_s = time.perf_counter()
    report = progress or (lambda share, text: None)
    notes: list[str] = []
    budget_s = math.inf if minutes is None else 60 * minutes
    # Short runs leave nothing to choose: every request in one block, or one at a time.
    sizes = {load: _block_size(load, len(requests)) for load in loads}
    if minutes is not None:
        requests, sizes = _fit(decoder.engine.cost, len(policies), requests, sizes, budget_s, notes)
    runs = {load: LoadRuns(tuple(policies)) for load in loads}
    goals = {load: _num_blocks(sizes, load, num_requests, repeats, minutes) for load in loads}
    spent = dict.fromkeys(loads, 0.0)
    longest = dict.fromkeys(loads, 0.0)
    interrupted = False

    def elapsed_s() -> float:
        return time.perf_counter() - start_s

    def fits(load: int) -> bool:
        return runs[load].num_blocks < goals[load] and (
            not runs[load].num_blocks or elapsed_s() + longest[load] <= budget_s
        )

    try:
        _warm_up(decoder, policies, requests, loads)
        while open_loads := [load for load in loads if fits(load)]:
            # First a block for each load, then whoever has had the least time.
            load = min(open_loads, key=lambda x: (runs[x].num_blocks > 0, spent[x]))
            before_s = elapsed_s()
            block, repeat = _block(runs[load].num_blocks, sizes[load], len(requests))
            workload = Workload(
                requests=tuple(requests[i] for i in block), process=ClosedLoop.constant(load)
            )
            served: dict[str, ServeResult] = {}
            for i, name in enumerate(_rotated(tuple(policies), runs[load].num_blocks)):
                # A copy: the counts of a block that is not completed must not stay.
                metrics = copy.deepcopy(runs[load].metrics.get(name))
                served[name] = serve(decoder.engine, workload, policies[name], metrics=metrics)
                share = (runs[load].num_blocks + (i + 1) / len(policies)) / goals[load]
                done = [r.num_blocks / goals[x] for x, r in runs.items() if x != load] + [share]
                share = sum(done) / len(done) if math.isinf(budget_s) else elapsed_s() / budget_s
                report(min(share, 1.0), f"load {load}, {name}")
            runs[load].add(block, repeat, served)
            took_s = elapsed_s() - before_s
            spent[load] += took_s
            longest[load] = max(longest[load], took_s)
    except KeyboardInterrupt:
        interrupted = True
        notes.append("Interrupted: only blocks that all policies had served are counted.")
    over_s = elapsed_s() - budget_s
    if over_s > 0.1 * budget_s:
        notes.append(
            f"This took {elapsed_s():.0f} s instead of {budget_s:.0f} s: not even one block of each "
            "load fits into less."
        )
    # With one thread on a CPU, the thread's own time is all the work.
    is_one_thread = decoder.target.device.type == "cpu" and torch.get_num_threads() == 1
    found = Comparison(
        runs={load: run for load, run in runs.items() if run.num_blocks},
        has_cpu_time=is_one_thread,
        interrupted=interrupted,
        notes=notes,
    )
    notes.insert(0, found.what_was_done)
    notes.extend(found.machine_noise())
    return found


def _warm_up(
    decoder: SpeculativeDecoder,
    policies: Mapping[str, DepthScheduler],
    requests: Sequence[WorkloadRequest],
    loads: Sequence[int],
) -> None:
    """Touch what the runs will touch, with a few tokens each; not counted.

    The kernels of a CPU need no more than a run a load; a GPU captures a graph for each pass size.
    """
    deepest = FixedDepth(decoder.config.max_num_speculative_tokens)
    chosen = [deepest] if decoder.target.device.type == "cpu" else [*policies.values(), deepest]
    for load in loads:
        short = tuple(
            replace(
                request,
                prompt_token_ids=request.prompt_token_ids[:8],
                sampling=replace(request.sampling, max_new_tokens=4, stop=(), ignore_eos=True),
            )
            for request in requests[:load]
        )
        for policy in chosen:
            workload = Workload(requests=short, process=ClosedLoop.constant(load))
            serve(decoder.engine, workload, policy)


def _block(number: int, size: int, num_requests: int) -> tuple[tuple[int, ...], int]:
    """Requests of a load's block `number`, as indices, and which repeat of them it is."""
    per_pass = max(num_requests // size, 1)
    repeat, place = divmod(number, per_pass)
    return tuple(range(place * size, (place + 1) * size)), repeat


def _block_size(load: int, num_requests: int) -> int:
    """Half as many again as run at once, so that slots are refilled while a block runs."""
    return min(load + load // 2, num_requests)


def _num_blocks(
    sizes: dict[int, int],
    load: int,
    num_requests: int | None,
    repeats: int,
    minutes: float | None,
) -> float:
    if num_requests is None and minutes is not None:
        return math.inf
    wanted = max(num_requests or DEFAULT_NUM_REQUESTS, load)
    return max(round(wanted / sizes[load]), 1) * repeats


def _rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    by %= len(names)
    return names[by:] + names[:by]


def _fit(
    cost: CostModel,
    num_policies: int,
    requests: Sequence[WorkloadRequest],
    sizes: dict[int, int],
    budget_s: float,
    notes: list[str],
) -> tuple[Sequence[WorkloadRequest], dict[int, int]]:
    """Make a first block of each load fit: shorter answers first, then blocks as wide as the load."""

    def total_s() -> float:
        return num_policies * sum(
            _block_s(cost, requests[:size], load) for load, size in sizes.items()
        )

    longest = max(request.sampling.max_new_tokens for request in requests)
    limit = longest
    while total_s() > budget_s and limit > MIN_NEW_TOKENS:
        limit = max(int(limit * 0.8), MIN_NEW_TOKENS)
        requests = [
            replace(r, sampling=replace(r.sampling, max_new_tokens=limit))
            if r.sampling.max_new_tokens > limit
            else r
            for r in requests
        ]
    if limit < longest:
        notes.append(f"Answers were cut to {limit} instead of {longest} tokens to keep the time.")
    if total_s() > budget_s:
        sizes = {load: min(load, size) for load, size in sizes.items()}
    return requests, sizes


def _block_s(cost: CostModel, block: Sequence[WorkloadRequest], load: int) -> float:
    """Seconds that a block may take: all tokens asked for, at a depth of 1, half of it accepted."""
    prompts = sum(len(request.prompt_token_ids) for request in block)
    answers = sum(request.sampling.max_new_tokens for request in block)
    return float(
        prompts * cost.pass_s(256, 256) / 256
        + answers / load * (cost.pass_s(2 * load) + cost.overhead_s) / 1.5
    )


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
