"""The search for depths and a per-sequence rule: on the training half of a trace, judged on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile
from specdepth.decoder.trace import Trace
from specdepth.scheduler.baselines import Off, TableDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.table import OPEN_END
from specdepth.scheduler.baselines.tuned_table import tuned_table
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints
from specdepth.scheduler.survival import SurvivalEstimator

from .advice import RULE, TABLE, Advice, LoadAdvice
from .advice_replays import AdviceReplays, halves_of
from .comparison import OFF
from .counted_prior import match_length_survival
from .replay_evaluate import ORACLE
from .rule_tuning import TrainingReplay, best_single_depth

PULLS, PRICES = (0.0, 0.3), (1.0, 1.3, 1.7)
"""Shrinkage of the per-sequence rule to choose from at each load, one after the other."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A drafter to advise on: what it would propose, and what its passes cost."""

    trace: Trace
    """Of requests like those to be served."""
    cost: CostModel
    """Pass times of the machine that serves them, with those of the draft model if there is one."""
    survival: SurvivalEstimator | None = None
    """Of the per-sequence rule; None: counts by match length, starting from those of the training
    half, or what a draft model was sure of."""


class AdviceSearch:
    """The search for depths and a rule for one drafter, and what they are worth.

    Args:
        drafter: see `Drafting`.
        depths: fixed depths to sweep; 0 is added, those above K are left out.
        top: K; None: the trace's.
        max_load: highest load that may be looked at.
        profile: how the engine differs from ours.
        seed: of choice and order of requests.
        tokens_per_request: see `AdviceReplays`.

    Attributes:
        sweep: tokens a second by load and fixed depth, on the training half.

    Raises:
        ValueError: a trace with requests in one half only, a K deeper than recorded, or no depth.
    """

    def __init__(
        self,
        drafter: Drafting,
        *,
        depths: Sequence[int],
        top: int | None,
        max_load: int,
        profile: EngineProfile,
        seed: int,
        tokens_per_request: float,
    ) -> None:
        trace = drafter.trace
        top = trace.info.depth_limit(top)
        _check_depths(depths, top, trace.info.max_num_speculative_tokens)
        training, judged = halves_of(trace)
        self.replay = AdviceReplays(
            trace=trace,
            cost=drafter.cost,
            training=training,
            judged=judged,
            config=EngineConfig(max_num_speculative_tokens=top, max_num_seqs=max_load),
            profile=profile,
            seed=seed,
            tokens_per_request=tokens_per_request,
        )
        self.survival = drafter.survival or _survival(trace, training)
        self.grid = sorted({0, *(depth for depth in depths if depth <= top)})
        self.sweep: dict[int, dict[int, float]] = {}

    def look(self, load: int) -> None:
        """Try the fixed depths."""
        self.sweep[load] = self.replay.at(load).sweep(self.grid)[load]

    @property
    def is_over(self) -> bool:
        """Whether no depth paid at the last two loads."""
        last = list(self.sweep.values())[-2:]
        return len(last) == 2 and all(figures[0] >= max(figures.values()) for figures in last)

    def conclude(self, tell: Progress) -> Advice:
        """Choose the table and the rule, and judge them."""
        replay, sweep = self.replay, self.sweep
        table = _switched_off(tuned_table(sweep, monotone=True), sweep, replay)
        shrinkage: dict[int, Shrinkage] = {}
        for load in sweep:
            tell(0.4 * len(shrinkage) / len(sweep), f"load {load}, per-sequence rule")
            shrinkage[load] = _best_shrinkage(replay.at(load), load, self.survival)
        rule = CappedGreedyDepth(self.survival, shrinkage)
        found: list[LoadAdvice] = []
        for load, figures in sweep.items():
            tell(0.4 + 0.6 * len(found) / len(sweep), f"load {load}, judging")
            found.append(_judged(replay, load, figures, table, rule))
        trace, cost = replay.trace, replay.cost
        return Advice(
            info=trace.info,
            cost=cost,
            num_training=len(replay.training),
            num_judged=len(replay.judged),
            looping_share=float(trace.looping.mean()),
            loads=tuple(found),
            table=table,
            best_single=best_single_depth(sweep),
            rule=rule,
            extrapolation=cost.extrapolation(max(sweep) * (1 + self.grid[-1])),
        )


def _check_depths(depths: Sequence[int], top: int, recorded: int) -> None:
    if not 1 <= top <= recorded:
        raise ValueError(
            f"max_num_speculative_tokens={top}, but the trace was recorded up to {recorded}; choose "
            f"1..{recorded} or record deeper."
        )
    if min(depths, default=0) < 0 or not any(0 < depth <= top for depth in depths):
        raise ValueError(f"advice needs a depth in 1..{top} to try, got {list(depths)}.")


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
        runs=runs,
    )
