"""Workloads of a replayed comparison: which requests, in which order, coming when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from specdepth.decoder.arrivals import Arrivals, ClosedLoop, OpenLoop, Phase
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Ints

ArrivalKind = Literal["constant", "varying", "ramp", "poisson", "bursty"]
"""`constant`: a closed loop of each load. `varying`: one day, the loads up and down again, an equal share
of the requests each. `ramp`: concurrency from 1 to the highest load. `poisson` and `bursty`: open
loops at the rate that each load sustains without speculation."""
ARRIVALS: tuple[ArrivalKind, ...] = get_args(ArrivalKind)

REQUESTS_PER_LOAD = 8
"""A closed loop of load L serves at least so many times L requests, or its end, where the batch drains,
would weigh too much."""
CHUNK = 256
"""Pass size that prompts are priced at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWorkload:
    """One column of a comparison."""

    load: int | str
    """Concurrency, or a name where it varies."""
    order: tuple[int, ...]
    """Rows of the trace, in order of arrival; each row as often as any other."""
    num_repeats: int
    """How often."""
    process: Arrivals


def make_workloads(
    trace: Trace,
    cost: CostModel,
    rows: Ints,
    loads: Sequence[int],
    kinds: Sequence[ArrivalKind],
    seed: int,
) -> list[ReplayWorkload]:
    """Return the workloads of all `kinds`.

    Args:
        trace: says how long requests are.
        cost: says how fast they are without speculation, for arrival rates.
        rows: requests.
        loads: concurrent requests.
        kinds: of arrivals.
        seed: of order and arrival times.

    Raises:
        ValueError: an unknown kind, no request, or a load that there are too few requests for.
    """
    check_arrivals(loads, len(rows), kinds)
    found = []
    for kind in dict.fromkeys(kinds):
        if kind in ("varying", "ramp"):
            order, repeats = shuffled(rows, max(loads), seed)
            steps = _day(loads) if kind == "varying" else list(range(1, max(loads) + 1))
            process: Arrivals = _steps(steps, len(order))
            found.append(
                ReplayWorkload(load=kind, order=order, num_repeats=repeats, process=process)
            )
            continue
        for load in loads:
            order, repeats = shuffled(rows, load, seed)
            name: int | str = load if kind == "constant" else f"{kind} {load}"
            if kind == "constant":
                process = ClosedLoop.constant(load)
            else:
                rate, rng = sustained_rate(trace, cost, rows, load), np.random.default_rng(seed)
                process = _open_loop(kind, len(order), rate, load, rng)
            found.append(
                ReplayWorkload(load=name, order=order, num_repeats=repeats, process=process)
            )
    return found


def check_arrivals(loads: Sequence[int], num_requests: int, kinds: Sequence[ArrivalKind]) -> None:
    """Refuse what `make_workloads` cannot make.

    Raises:
        ValueError: an unknown kind, or bad loads.
    """
    for kind in kinds:
        if kind not in ARRIVALS:
            raise ValueError(f"no arrivals {kind!r}; there are {', '.join(ARRIVALS)}.")
    if not kinds:
        raise ValueError(f"name some arrivals, out of {', '.join(ARRIVALS)}.")
    check_loads(loads, num_requests)


def check_loads(loads: Sequence[int], num_requests: int) -> None:
    """Refuse loads that so many requests cannot make.

    Raises:
        ValueError: no load, one below 1 or given twice, or too few requests.
    """
    if not loads or min(loads) < 1 or len(set(loads)) < len(loads):
        raise ValueError(f"loads are different whole numbers of at least 1, got {list(loads)}.")
    if max(loads) > num_requests:
        raise ValueError(
            f"load {max(loads)} needs at least {max(loads)} different requests, this choice of the "
            f"trace has {num_requests}; record more or lower the load."
        )


def shuffled(rows: Ints, load: int, seed: int) -> tuple[tuple[int, ...], int]:
    """Return `rows` in random order, again and again until a load has enough, and how often."""
    repeats = math.ceil(max(len(rows), REQUESTS_PER_LOAD * load) / len(rows))
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(rows) for _ in range(repeats)])
    return tuple(order.tolist()), repeats


def sustained_rate(trace: Trace, cost: CostModel, rows: Ints, load: int) -> float:
    """Requests a second that `load` sequences in flight get through without speculation."""
    num_tokens = float(trace.num_tokens[rows].mean())
    num_prompt = float(trace.num_prompt[rows].mean())
    context = load * (num_prompt + num_tokens / 2)
    prefill_s = num_prompt * cost.pass_s(CHUNK, CHUNK) / CHUNK
    round_s = cost.pass_s(load, 0, context) + cost.overhead_s
    return 1 / (prefill_s + num_tokens * round_s / load)


def _day(loads: Sequence[int]) -> list[int]:
    """Up to the highest load and down again."""
    rising = sorted(loads)
    return [*rising, *rising[-2:0:-1]]


def _steps(concurrencies: list[int], num_requests: int) -> ClosedLoop:
    """An equal share of the requests at each concurrency, in this order."""
    count = len(concurrencies)
    phases = tuple(
        Phase(concurrency=concurrency, until=(i + 1) / count)
        for i, concurrency in enumerate(concurrencies)
    )
    return ClosedLoop(phases=phases, num_requests=num_requests)


def _open_loop(
    kind: ArrivalKind, num_requests: int, rate: float, load: int, rng: np.random.Generator
) -> OpenLoop:
    if kind == "poisson":
        return OpenLoop.poisson(num_requests, rate, rng)
    # A fifth of the time at three times the rate, half of it otherwise: `rate` on average. A burst
    # lasts about as long as two requests stay.
    stay_s = load / rate
    return OpenLoop.bursty(
        num_requests,
        quiet_rate=rate / 2,
        burst_rate=3 * rate,
        mean_quiet_s=8 * stay_s,
        mean_burst_s=2 * stay_s,
        rng=rng,
    )
