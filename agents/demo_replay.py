"""The demo's comparison in replay: rivals chosen on the training split, all judged on held-out requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdepth.decoder.config import EngineConfig
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.baselines.tuned_table import tuned_table
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler

from .comparison import OFF, Comparison
from .demo_ground import Ground
from .demo_pace import ReplayPace
from .demo_state import LEARNED
from .depth_limit import depths_to_try
from .evaluate_in_replay import TABLE
from .replay_evaluate import BEST_FIXED, ORACLE, evaluate_replay
from .rule_tuning import TrainingReplay, best_single_depth, strongest, tune
from .session import with_fixed
from .tuning import table_name

if TYPE_CHECKING:
    from .demo import Options

WITH_SURVIVAL = ("dspark", "adaptive-verification", "greedy")
"""Rules that take the survival model; with those tuned for the models, what has been the strongest."""
FIXED_WORK = 0.6
"""Time of replaying a fixed depth, over that of a rule."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedComparison:
    """What replay says."""

    found: Comparison
    strongest: str
    """Name of the rule that was the strongest on the training split, for `make_scheduler`."""
    strongest_label: str
    """The same as tables show it."""
    best_single: str
    """Name of the fixed depth that was best over all loads there."""
    table: str
    """The table that was best there."""

    @property
    def shown(self) -> tuple[str, ...]:
        """What a short table has, in its order."""
        fixed = (BEST_FIXED, self.best_single)
        return tuple(dict.fromkeys((LEARNED, self.strongest_label, TABLE, *fixed, OFF, ORACLE)))

    def live_names(self, policy_folder: Path) -> dict[str, str]:
        """Schedulers to compare live, by their label."""
        return {
            LEARNED: f"policy:{policy_folder}",
            self.strongest_label: self.strongest,
            TABLE: self.table,
            OFF: OFF,
        }


def compare_in_replay(
    options: Options,
    ground: Ground,
    cost: CostModel,
    policy_folder: Path,
    seconds: float,
    progress: Progress,
) -> ReplayedComparison:
    """Choose rivals on the training split and serve held-out requests under all.

    Args:
        options: of the demo.
        ground: trace and rules.
        cost: prices of the machine.
        policy_folder: of the trained policy.
        seconds: wall time, about: there are as many requests as fit, and as many as the highest load.
        progress: told the share done and what is going on.
    """
    trace, loads = ground.trace, sorted(set(options.loads))
    top = options.top
    config = EngineConfig(max_num_seqs=options.max_num_seqs, max_num_speculative_tokens=top)
    names = with_fixed((), options.fixed_depths or depths_to_try(top), top)
    fixed = {name: make_scheduler(name) for name in names}
    rules = {name: make_scheduler(name, max_num_speculative_tokens=top) for name in _rules(ground)}
    learned = make_scheduler(f"policy:{policy_folder}", max_num_speculative_tokens=top)
    # Fixed depths and rules on the training split; those depths and five others on the other one.
    num_runs = FIXED_WORK * 2 * len(fixed) + len(rules) + 5
    pace = ReplayPace(trace, cost, loads, learned, config)
    count = pace.affordable(seconds / num_runs, most=trace.num_requests)
    training = TrainingReplay(
        trace, cost, loads, num_requests=count, config=config, seed=options.seed
    )
    depths = [int(name.removeprefix("fixed:")) if name != OFF else 0 for name in fixed]
    progress(0.1, "fixed depths on training requests")
    sweep = training.sweep(depths)
    table, best = tuned_table(sweep), best_single_depth(sweep)
    progress(0.3, "rules on training requests")
    winner = strongest(tune(training, {name: [rule] for name, rule in rules.items()}))
    policies: Mapping[str, DepthScheduler] = {
        LEARNED: learned,
        ground.label(winner): rules[winner],
        TABLE: table,
        **fixed,
    }
    rows = np.random.default_rng(options.seed).permutation(trace.rows("held-out"))
    found = evaluate_replay(
        trace,
        cost,
        policies,
        loads,
        rows=rows[: max(count, *loads)],
        seed=options.seed,
        config=config,
        progress=lambda share, detail: progress(0.5 + share / 2, detail),
    )
    return ReplayedComparison(
        found=found,
        strongest=winner,
        strongest_label=ground.label(winner),
        best_single=f"fixed:{best}" if best else OFF,
        table=table_name(table),
    )


def _rules(ground: Ground) -> list[str]:
    names = [f"{rule}:{ground.survival}" for rule in WITH_SURVIVAL]
    return list(dict.fromkeys((*ground.rules, *names)))
