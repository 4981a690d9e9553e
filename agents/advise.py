"""Advice on speculation for one's own requests and machine, from a trace and a cost model: `advise`."""

from __future__ import annotations

from collections.abc import Sequence

from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.trace import Trace
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.survival import SurvivalEstimator

from .advice import Advice
from .advice_replays import halves_of
from .advice_search import AdviceSearch, Drafting, Progress
from .replay_workloads import check_loads

MAX_DEFAULT_LOAD = 64
DEPTHS = (0, 1, 2, 3, 4, 6, 8)
"""Fixed depths to sweep, as far as they were recorded."""


def advise(
    trace: Trace,
    cost: CostModel,
    loads: Sequence[int] | None = None,
    *,
    depths: Sequence[int] = DEPTHS,
    max_num_speculative_tokens: int | None = None,
    survival: SurvivalEstimator | None = None,
    profile: EngineProfile | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Advice:
    """Find the best depth at each load, and what finer control would add.

    Args:
        trace: see `Drafting`.
        cost: see `Drafting`.
        loads: concurrent requests; by default 1, 2, 4, ... until drafting pays at two of them no more,
            as far as the trace has requests, and at most `MAX_DEFAULT_LOAD`.
        depths: fixed depths to sweep; 0 is added, those above K are left out.
        max_num_speculative_tokens: K; the trace's by default.
        survival: see `Drafting`.
        profile: how the engine differs from ours.
        seed: of choice and order of requests.
        progress: told the share done and what is going on.

    Raises:
        ValueError: a trace with requests in one half only, bad loads, or more than there are requests
            for, a K deeper than recorded, or no depth.
    """
    (found,) = advise_each(
        [Drafting(trace=trace, cost=cost, survival=survival)],
        loads,
        depths=depths,
        max_num_speculative_tokens=max_num_speculative_tokens,
        profile=profile,
        seed=seed,
        progress=progress,
    )
    return found


def advise_each(
    drafters: Sequence[Drafting],
    loads: Sequence[int] | None = None,
    *,
    depths: Sequence[int] = DEPTHS,
    max_num_speculative_tokens: int | None = None,
    profile: EngineProfile | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Advice]:
    """`advise` for several drafters at the same loads: by default until drafting pays with none.

    Traces with the same requests in the same order are replayed in the same order too.

    Args:
        drafters: at least one.
        loads: see `advise`, as all below.
        depths: fixed depths.
        max_num_speculative_tokens: K; by default of each as it was recorded.
        profile: of the engine.
        seed: of choice and order.
        progress: told how far it is.

    Raises:
        ValueError: see `advise`.
    """
    fewest = min(len(half) for one in drafters for half in halves_of(one.trace))
    if loads is not None:
        check_loads(loads, fewest)
    planned = _default_loads(fewest) if loads is None else sorted(loads)
    tell = progress or (lambda share, detail: None)
    searches = [
        AdviceSearch(
            one,
            depths=depths,
            top=max_num_speculative_tokens,
            max_load=planned[-1],
            profile=profile or EngineProfile(),
            seed=seed,
            tokens_per_request=float(drafters[0].trace.num_tokens.mean()),
        )
        for one in drafters
    ]
    for number, load in enumerate(planned):
        for place, search in enumerate(searches):
            share = (number + place / len(searches)) / len(planned)
            tell(0.5 * share, f"load {load}, fixed depths")
            search.look(load)
        if loads is None and all(search.is_over for search in searches):
            break
    found: list[Advice] = []
    for search in searches:
        start = len(found)

        def tell_more(share: float, detail: str, start: int = start) -> None:
            tell(0.5 + 0.5 * (start + share) / len(searches), detail)

        found.append(search.conclude(tell_more))
    return found


def _default_loads(fewest: int) -> list[int]:
    return [2**i for i in range(min(fewest, MAX_DEFAULT_LOAD).bit_length())]
