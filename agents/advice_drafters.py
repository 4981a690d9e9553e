"""Which drafter of one target to serve with: the same requests, replayed with each of them.

Every drafter is compared with decoding without speculation at its own prices, so that two cost models
of one machine, measured on different days, can stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from specdepth.decoder.trace import Trace, TraceInfo

from .advice import RULE, TABLE, Advice, Verdict, pays
from .advice_search import Drafting
from .advise import advise_each
from .comparison import MIN_REQUESTS, OFF
from .intervals import CONFIDENCE, NUM_RESAMPLES, Interval
from .load_runs import LoadRuns

Judged = Literal["table", "rule"]
JUDGED: Mapping[Judged, str] = {"table": TABLE, "rule": RULE}
"""What drafters are compared by, and its name among the policies of a load."""

_SAMPLING = ("verification", "temperature", "top_k", "top_p")
_REQUEST = {
    "num_prompt": "prompt tokens",
    "max_new_tokens": "limit of tokens",
    "held_out": "half (training or held out)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterVerdict:
    """Which drafter is the fastest at one load."""

    load: int
    best: str
    """With the highest ratio to no speculation, of those that clearly pay if any does."""
    pays: Verdict
    """Whether that one pays."""
    over: Mapping[str, Interval]
    """Its ratio over that of each other drafter, requests in pairs."""

    @property
    def level(self) -> tuple[str, ...]:
        """Others that are not clearly slower."""
        return tuple(name for name, ratio in self.over.items() if not ratio.low > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterComparison:
    """Advice for each drafter, and which one is for which load."""

    advice: Mapping[str, Advice]
    """By the drafter's name, at the same loads."""
    by: Mapping[Judged, tuple[DrafterVerdict, ...]]
    """Load by load, by the tuned table and by the per-sequence rule."""
    share_of_other_lengths: float
    """Of requests whose text has another length with some drafter than with the first."""

    @property
    def best(self) -> str:
        """With the best table by the geometric mean over the loads."""
        return max(self.advice, key=lambda name: self.advice[name].mean("table"))


def compare_drafters(
    drafters: Mapping[str, Drafting], loads: Sequence[int] | None = None, **options: Any
) -> DrafterComparison:
    """Find out which drafter pays most at which load, on requests that depths were not chosen on.

    Args:
        drafters: by name, with traces of the same requests.
        loads: see `advise`.
        **options: those of `advise_each`.

    Raises:
        ValueError: traces of other requests, targets or sampling; a draft model without draft passes
            in its cost model; what `advise` refuses.
    """
    for name, one in drafters.items():
        if one.trace.info.drafter == "draft-model" and one.cost.drafter_is_free:
            raise ValueError(
                f"the cost model {one.cost.name} has no draft passes, so it cannot price {name}; "
                "profile the pair (specdepth profile --draft)."
            )
    traces = same_requests({name: one.trace for name, one in drafters.items()})
    aligned = [replace(one, trace=traces[name]) for name, one in drafters.items()]
    advice = dict(zip(drafters, advise_each(aligned, loads, **options), strict=True))
    places = range(len(next(iter(advice.values())).loads))
    lengths = np.stack([trace.num_tokens for trace in traces.values()])
    return DrafterComparison(
        advice=advice,
        by={
            judged: tuple(_verdict(advice, judged, place) for place in places) for judged in JUDGED
        },
        share_of_other_lengths=float((lengths != lengths[0]).any(axis=0).mean()),
    )


def drafter_name(info: TraceInfo) -> str:
    """What to call the drafter of a trace: "draft model org/small", "prompt lookup"."""
    if info.drafter == "draft-model":
        return f"draft model {_parts(info)[1]}"
    return info.drafter.replace("-", " ")


def same_requests(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """Put the requests of all traces in the order of the first one, paired by id.

    Args:
        traces: by the name of the drafter.

    Raises:
        ValueError: another target, sampling or set of requests than the first one's.
    """
    (first_name, first), *others = traces.items()
    found, ids = {first_name: first}, set(first.ids)
    target = _parts(first.info)[0]
    for name, trace in others:
        info = trace.info
        if _parts(info)[0] != target:
            raise ValueError(
                f"drafters are compared for one target, but {first_name} was recorded with {target} "
                f"and {name} with {_parts(info)[0]}; record both with the same --target."
            )
        for setting in _SAMPLING:
            one, other = getattr(first.info, setting), getattr(info, setting)
            if one != other:
                raise ValueError(
                    f"drafters are compared on the same texts, but {setting} is {one} in the trace of "
                    f"{first_name} and {other} in that of {name}; record both with the same sampling."
                )
        rows = {request: row for row, request in enumerate(trace.ids)}
        if set(rows) != ids or not len(ids) == first.num_requests == trace.num_requests:
            raise ValueError(
                f"drafters are compared on the same requests, each once, but of {first.num_requests} "
                f"ids in the trace of {first_name} and {trace.num_requests} in that of {name} only "
                f"{len(ids & set(rows))} are the same; record both from the same prompts."
            )
        found[name] = trace.select(np.array([rows[request] for request in first.ids]))
        for field, what in _REQUEST.items():
            differs = np.flatnonzero(getattr(first, field) != getattr(found[name], field))
            if len(differs):
                raise ValueError(
                    f"request {first.ids[differs[0]]} has another {what} in the trace of {name} than "
                    f"in that of {first_name}; record both from the same prompts."
                )
    return found


def ratio_of_speedups(mine: LoadRuns, theirs: LoadRuns, policy: str, seed: int = 0) -> Interval:
    """Throughput of `policy` over off in one trace, over the same in another.

    Requests are resampled in pairs: one that is drawn counts in all four sums.

    Args:
        mine: runs above the line.
        theirs: of the same requests.
        policy: name in both.
        seed: of the resampling.
    """
    sides = [runs.sums(name) for runs in (mine, theirs) for name in (policy, OFF)]
    rows = list(sides[0])
    sums = np.array([[side[row] for side in sides] for row in rows])  # [n, 4, tokens and seconds]

    def ratio(totals: Any) -> Any:
        rates = totals[..., 0] / totals[..., 1]
        return rates[..., 0] / rates[..., 1] / (rates[..., 2] / rates[..., 3])

    value, num = float(ratio(sums.sum(axis=0))), len(rows)
    if num < MIN_REQUESTS:
        return Interval(value, math.nan, math.nan)
    draws = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), NUM_RESAMPLES)
    samples = ratio(np.tensordot(draws.astype(np.float64), sums, 1))
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def _verdict(advice: Mapping[str, Advice], judged: Judged, place: int) -> DrafterVerdict:
    at = {name: one.loads[place] for name, one in advice.items()}
    ratios: dict[str, Interval] = {name: getattr(one, judged) for name, one in at.items()}
    by_pays: dict[Verdict, list[str]] = {"yes": [], "unclear": [], "no": []}
    for name, one in at.items():
        by_pays[one.pays if judged == "table" else pays(ratios[name])].append(name)
    verdict, names = next((verdict, names) for verdict, names in by_pays.items() if names)
    best = max(names, key=lambda name: ratios[name].value)
    return DrafterVerdict(
        load=at[best].load,
        best=best,
        pays=verdict,
        over={
            name: ratio_of_speedups(at[best].runs, one.runs, JUDGED[judged])
            for name, one in at.items()
            if name != best
        },
    )


def _parts(info: TraceInfo) -> tuple[str, str]:
    """Target and drafter, as in `TraceInfo.model_pair`."""
    target, _, drafter = info.model_pair.rpartition("+")
    return target.strip(), drafter.strip()
