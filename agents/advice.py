"""What `advise` finds for one drafter: `Advice`, load by load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specdepth.decoder.trace import TraceInfo
from specdepth.scheduler.baselines import TableDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.cost import CostModel

from .intervals import Interval
from .load_runs import LoadRuns

TABLE, RULE = "table", "per-sequence"
"""Names of the policies that are judged, besides none."""

Verdict = Literal["yes", "no", "unclear"]


def pays(over_off: Interval) -> Verdict:
    """Whether a policy of this throughput over that of decoding without speculation pays."""
    if over_off.low > 1:
        return "yes"
    return "no" if over_off.high <= 1 else "unclear"


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
    runs: LoadRuns = field(repr=False, compare=False)
    """What the ratios on the other half are of: off, `TABLE` and `RULE`."""

    @property
    def pays(self) -> Verdict:
        """Whether the table's depth beats none on requests that it was not chosen on."""
        return pays(self.table) if self.depth else "no"


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
