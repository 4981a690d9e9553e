"""Advice on speculation for one's own requests and machine, from a trace and a cost model: `advise`.

Depths and the rule are chosen on the training half of the trace and judged on the other half, by replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.baselines import Off, TableDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.table import OPEN_END
from specdepth.scheduler.baselines.tuned_table import tuned_table
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints
from specdepth.scheduler.survival import SurvivalEstimator

from .advice_replays import AdviceReplays, halves_of
from .comparison import OFF
from .counted_prior import match_length_survival
from .intervals import Interval
from .replay_evaluate import ORACLE
from .replay_workloads import check_loads
from .rule_tuning import TrainingReplay, best_single_depth

MAX_DEFAULT_LOAD = 64
DEPTHS = (0, 1, 2, 3, 4, 6, 8)
"""Fixed depths to sweep, as far as they were recorded."""
PULLS, PRICES = (0.0, 0.3), (1.0, 1.3, 1.7)
"""Shrinkage of the per-sequence rule to choose from at each load, one after the other."""
TABLE, RULE = "table", "per-sequence"

Progress = Callable[[float, str], None]
Verdict = Literal["yes", "no", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdvice:
    """What replay says of one load. Ratios are of throughput, with intervals over requests."""

    load: int
    """Requests that are always in the engine."""
    sweep: Mapping[int, float]
    """Fixed depth to its ratio to decoding without speculation, on the training half."""
    depth: int
    """What the table says here."""
    table: Interval
    """The table over decoding without speculation, on the other half, as all below."""
    rule: Interval
    """The per-sequence rule over decoding without speculation."""
    rule_gain: Interval
    """The per-sequence rule over the table."""
    oracle: float
    """Best depths of each round in hindsight over decoding without speculation."""
    table_without_looping: Interval | None
    """`table` for requests whose text does not repeat itself; None if all are so, or too few."""
    rule_without_looping: Interval | None
    extrapolated: bool
    """Whether passes at the table's depth are larger than any in the cost model."""

    @property
    def pays(self) -> Verdict:
        """Whether the table's depth beats none on requests that it was not chosen on."""
        if not self.depth or self.table.high < 1:
            return "no"
        return "yes" if self.table.low > 1 else "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do with speculation, and how sure that is."""

    info: TraceInfo
    cost: CostModel
    num_training: int
    """Requests of the trace that depths were chosen on."""
    num_judged: int
    """Others, which figures are of."""
    looping_share: float
    """Of all requests, those that end in verbatim repetition."""
    loads: tuple[LoadAdvice, ...]
    table: TableDepth
    """Best depth by batch size; never rises with it."""
    best_single: int
    """Best depth if there must be one for all loads."""
    rule: CappedGreedyDepth
    """The per-sequence rule, with what was chosen for it."""
    extrapolation: str | None
    """A sentence on passes beyond the cost model's largest; None if there are none."""

    @property
    def max_load(self) -> int:
        """Highest load that was replayed."""
        return self.loads[-1].load

    @property
    def off_above(self) -> int | None:
        """Largest batch size that should draft; 0: none should; None: all that were replayed."""
        low, _, depth = self.table.ranges[-1]
        return low - 1 if not depth else None

    def mean(self, ratio: Literal["table", "rule", "rule_gain", "oracle"]) -> float:
        """Geometric mean of a ratio over the loads."""
        values = [getattr(one, ratio) for one in self.loads]
        logs = [math.log(v.value if isinstance(v, Interval) else v) for v in values]
        return math.exp(sum(logs) / len(logs))


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
        trace: of requests like those to be served.
        cost: pass times of the machine that serves them.
        loads: concurrent requests; by default 1, 2, 4, ... until drafting pays at two of them no more,
            as far as the trace has requests, and at most `MAX_DEFAULT_LOAD`.
        depths: fixed depths to sweep; 0 is added, those above K are left out.
        max_num_speculative_tokens: K; the trace's by default.
        survival: of the per-sequence rule; by default counts by match length, starting from those of
            the training half, or what a draft model was sure of.
        profile: how the engine differs from ours.
        seed: of choice and order of requests.
        progress: told the share done and what is going on.

    Raises:
        ValueError: a trace with requests in one half only, bad loads, or more than there are requests
            for, a K deeper than recorded, or no depth.
    """
    halves = halves_of(trace)
    fewest = min(map(len, halves))
    if loads is not None:
        check_loads(loads, fewest)
    planned = _default_loads(fewest) if loads is None else sorted(loads)
    recorded = trace.info.max_num_speculative_tokens
    top = recorded if max_num_speculative_tokens is None else max_num_speculative_tokens
    _check_depths(depths, top, recorded)
    replay = AdviceReplays(
        trace=trace,
        cost=cost,
        training=halves[0],
        judged=halves[1],
        config=EngineConfig(max_num_speculative_tokens=top, max_num_seqs=planned[-1]),
        profile=profile or EngineProfile(),
        seed=seed,
    )
    tell = progress or (lambda share, detail: None)
    grid = sorted({0, *(depth for depth in depths if depth <= top)})
    sweep: dict[int, dict[int, float]] = {}
    for load in planned:
        tell(0.5 * len(sweep) / len(planned), f"load {load}, fixed depths")
        sweep[load] = replay.at(load).sweep(grid)[load]
        if loads is None and _is_over(sweep):
            break
    table = _switched_off(tuned_table(sweep, monotone=True), sweep, replay)
    if survival is None:
        survival = _survival(trace, halves[0])
    shrinkage: dict[int, Shrinkage] = {}
    for load in sweep:
        tell(0.5 + 0.2 * len(shrinkage) / len(sweep), f"load {load}, per-sequence rule")
        shrinkage[load] = _best_shrinkage(replay.at(load), load, survival)
    rule = CappedGreedyDepth(survival, shrinkage)
    found: list[LoadAdvice] = []
    for load, figures in sweep.items():
        tell(0.7 + 0.3 * len(found) / len(sweep), f"load {load}, judging")
        found.append(_judged(replay, load, figures, table, rule))
    return Advice(
        info=trace.info,
        cost=cost,
        num_training=len(halves[0]),
        num_judged=len(halves[1]),
        looping_share=float(trace.looping.mean()),
        loads=tuple(found),
        table=table,
        best_single=best_single_depth(sweep),
        rule=rule,
        extrapolation=cost.extrapolation(max(sweep) * (1 + grid[-1])),
    )


def _default_loads(fewest: int) -> list[int]:
    return [2**i for i in range(min(fewest, MAX_DEFAULT_LOAD).bit_length())]


def _check_depths(depths: Sequence[int], top: int, recorded: int) -> None:
    if not 1 <= top <= recorded:
        raise ValueError(
            f"max_num_speculative_tokens={top}, but the trace was recorded up to {recorded}; choose "
            f"1..{recorded} or record deeper."
        )
    if min(depths, default=0) < 0 or not any(0 < depth <= top for depth in depths):
        raise ValueError(f"advice needs a depth in 1..{top} to try, got {list(depths)}.")


def _is_over(sweep: Mapping[int, Mapping[int, float]]) -> bool:
    """Whether no depth paid at the last two loads."""
    last = list(sweep.values())[-2:]
    return len(last) == 2 and all(figures[0] >= max(figures.values()) for figures in last)


def _switched_off(
    table: TableDepth, sweep: Mapping[int, Mapping[int, float]], replay: AdviceReplays
) -> TableDepth:
    """Put the batch size above which it drafts no more where it is, to an eighth."""
    loads = sorted(sweep)
    drafting = [load for load in loads if table.depth_at(load)]
    if not drafting or len(drafting) == len(loads):
        return table
    low, high = drafting[-1], loads[len(drafting)]
    depths = [depth for depth in sweep[low] if depth <= table.depth_at(low)]
    while high - low > max(1, low // 8):
        middle = max(math.isqrt(low * high), low + 1)
        figures = replay.at(middle).sweep(depths)[middle]
        if max(figures.values()) > figures[0]:
            low = middle
        else:
            high = middle
    *before, (start, _, depth), _ = table.ranges
    return TableDepth([*before, (start, low, depth), (low + 1, OPEN_END, 0)])


def _survival(trace: Trace, rows: Ints) -> SurvivalEstimator:
    if trace.info.drafter == "draft-model":
        return ConfidenceSurvival()
    return match_length_survival(trace, rows)


def _best_shrinkage(training: TrainingReplay, load: int, survival: SurvivalEstimator) -> Shrinkage:
    def score(shrinkage: Shrinkage) -> float:
        return training.throughput(CappedGreedyDepth(survival, shrinkage), load)

    best, best_score = Shrinkage(), score(Shrinkage())
    # One sequence is its own mean, so nothing can pull it.
    for pull in PULLS[1:] if load > 1 else ():
        if (found := score(replace(best, pull=pull))) > best_score:
            best, best_score = replace(best, pull=pull), found
    for price in PRICES[1:]:
        if (found := score(replace(best, price=price))) <= best_score:
            break
        best, best_score = replace(best, price=price), found
    return best


def _judged(
    replay: AdviceReplays,
    load: int,
    figures: Mapping[int, float],
    table: TableDepth,
    rule: DepthScheduler,
) -> LoadAdvice:
    policies: dict[str, DepthScheduler] = {OFF: Off(), TABLE: table, RULE: rule}
    runs = replay.judge(load, policies)
    assert runs is not None  # loads were checked
    has_looping = bool(replay.trace.looping[replay.judged].any())
    others = replay.judge(load, policies, looping=False) if has_looping else None
    depth = table.depth_at(load)
    return LoadAdvice(
        load=load,
        sweep={depth: figure / figures[0] for depth, figure in figures.items()},
        depth=depth,
        table=runs.ratio(TABLE, OFF),
        rule=runs.ratio(RULE, OFF),
        rule_gain=runs.ratio(RULE, TABLE),
        oracle=runs.ratio(ORACLE, OFF).value,
        table_without_looping=None if others is None else others.ratio(TABLE, OFF),
        rule_without_looping=None if others is None else others.ratio(RULE, OFF),
        extrapolated=load * (1 + depth) > replay.cost.tokens[-1],
    )
