"""A few-parameter policy of offsets, searched on replay: a start for PPO, and its rival.

Replay has no noise, so two policies on the same requests differ by what they are, not by luck: an evolution
strategy with mirrored samples and common requests [Salimans et al. 2017, arXiv 1703.03864] sees tenths of a
percent. Loads are searched one by one.

Legend: K deepest depth, F features, P parameters, H hidden units of the rule's survival model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdepth.decoder.trace import Trace
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights
from specdepth.scheduler.state import Floats

from .offset_weights import FLAGS, SCALES, offset_weights
from .replay_evaluate import evaluate_replay
from .rule_tuning import TrainingReplay

CHECK_ORDERS = 2
"""Of all training requests, after the search of a load."""
STOP_PRICES = (1.0, 0.7, 0.85, 1.2, 1.45, 1.75)
"""Tried at each load, the first of equals kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """How long and how widely to search.

    Raises:
        ValueError: a number out of range.
    """

    iterations: int = 14
    """Steps a load."""
    pairs: int = 7
    """Mirrored pairs of samples a step."""
    sigma: float = 0.5
    """Standard deviation of samples, in units of `SCALES`."""
    step: float = 0.9
    """Length of the first step; it falls to 0 along a line."""
    num_requests: int = 96
    """Training requests of each replay, or as many as the load."""
    num_replays: int = 4
    """Different choices of requests, taken in turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("iterations", "pairs", "num_requests", "num_replays"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not (self.sigma > 0 and self.step > 0):
            raise ValueError(f"sigma and step must be above 0, got {self.sigma} and {self.step}.")


def search_offsets(
    trace: Trace,
    cost: CostModel,
    rule: CappedGreedyDepth,
    loads: Sequence[int],
    config: SearchConfig | None = None,
    progress: Callable[[float], None] | None = None,
) -> PolicyWeights:
    """Search offsets under `rule` on the training split; deterministic. A load at which they gain no more
    than luck explains keeps the rule.

    With a draft model the policy has stops too (`PricedStops`), during the search and after it; their price
    is searched first, over a grid, with and without the rule's shrinkage, on all choices of requests.

    Args:
        trace: whose training requests are replayed.
        cost: prices of the machine.
        rule: over a fitted survival model; a policy with all parameters 0 decides as it does.
        loads: out of `FLAGS`.
        config: see `SearchConfig`.
        progress: called with the share that is done, 0..1.

    Raises:
        ValueError: another load, or a rule over something else.
    """
    config = config or SearchConfig()
    unknown = sorted(set(loads) - set(FLAGS))
    if unknown or not loads:
        raise ValueError(f"offsets are searched at loads out of {list(FLAGS)}, got {list(loads)}.")
    stops = trace.info.drafter == "draft-model"
    # Each load has numbers of its own from now on, so that tuning one leaves the others as they were.
    own = {load: rule.shrinkage_at(load) for load in loads}
    rule = CappedGreedyDepth(rule.survival, {**rule.shrinkage, **own})
    found: dict[int, Floats] = {}
    for number, load in enumerate(loads):
        replays = [
            TrainingReplay(trace, cost, [load], num_requests=config.num_requests, seed=seed)
            for seed in range(config.seed, config.seed + config.num_replays)
        ]

        def throughput(
            rule: CappedGreedyDepth, load: int = load, replays: list[TrainingReplay] = replays
        ) -> float:
            scheduler = _policy(rule, trace, {})
            return sum(float(np.log(one.throughput(scheduler, load))) for one in replays)

        if stops:
            rule = tune_stops(rule, load, throughput)

        def score(
            values: Floats,
            step: int,
            rule: CappedGreedyDepth = rule,
            load: int = load,
            replays: list[TrainingReplay] = replays,
        ) -> float:
            scheduler = _policy(rule, trace, {load: values})
            return float(np.log(replays[step % len(replays)].throughput(scheduler, load)))

        def report(share: float, number: int = number) -> None:
            if progress is not None:
                progress((number + share) / len(loads))

        values = ascend(score, config, config.seed + load, report)
        if _hold(rule, trace, cost, load, values, config.seed):
            found[load] = values
    return offset_weights(rule, found, stops=stops)


def _hold(
    rule: CappedGreedyDepth, trace: Trace, cost: CostModel, load: int, values: Floats, seed: int
) -> bool:
    """Whether offsets gain more over the rule, on all training requests, than one standard error of it.

    A search always finds something for the requests that it looks at. What is within the differences
    between requests would be luck for others, and the rule is the better guess.
    """
    found = evaluate_replay(
        trace,
        cost,
        {"rule": _policy(rule, trace, {}), "offsets": _policy(rule, trace, {load: values})},
        [load],
        rows=trace.rows("train"),
        seed=seed,
        orders=CHECK_ORDERS,
        oracles=False,
    )
    ratio = found.runs[load].ratio("offsets", "rule")
    # A 95 % interval is nearly four standard errors wide.
    return ratio.value - 1 > (ratio.high - ratio.low) / 4


def tune_stops(
    rule: CappedGreedyDepth, load: int, score: Callable[[CappedGreedyDepth], float]
) -> CappedGreedyDepth:
    """The rule with the best price of stops at a load, and its own numbers or none.

    Its own were tuned for it alone. Under stops it only says who drafts, and shrinkage that keeps it from
    drafts which are too deep keeps sequences from any (load 8 of the shipped pair: 2 % of throughput).

    Args:
        rule: with its numbers.
        load: one of `FLAGS`.
        score: of a rule, the more the better; the first of equals is taken.
    """
    starts = rule.shrinkage_at(load), Shrinkage()
    return max(
        (
            CappedGreedyDepth(
                rule.survival, {**rule.shrinkage, load: replace(start, stop_price=price)}
            )
            for start in starts
            for price in STOP_PRICES
        ),
        key=score,
    )


def ascend(
    score: Callable[[Floats, int], float],
    config: SearchConfig,
    seed: int,
    report: Callable[[float], None] = lambda share: None,
    *,
    num_values: int = len(SCALES),
) -> Floats:
    """Climb from 0 along the mirrored estimate of the gradient, with momentum and steps of given length.

    Args:
        score: of parameters [num_values] at a step; the same requests for all samples of a step.
        config: of the search.
        seed: of the samples.
        report: called with the share that is done.
        num_values: P by default.
    """
    rng = np.random.default_rng(seed)
    values: Floats = np.zeros(num_values)
    momentum = np.zeros(num_values)
    for step in range(config.iterations):
        slope = np.zeros(num_values)
        for _ in range(config.pairs):
            noise = rng.standard_normal(num_values)
            up = score(values + config.sigma * noise, step)
            slope += (up - score(values - config.sigma * noise, step)) * noise
        momentum = 0.6 * momentum + 0.4 * slope
        length = config.step * (1 - step / config.iterations)
        values = values + length * momentum / max(float(np.linalg.norm(momentum)), 1e-12)
        report((step + 1) / config.iterations)
    return values


def _policy(
    rule: CappedGreedyDepth, trace: Trace, by_load: Mapping[int, Floats]
) -> LearnedScheduler:
    """The rule with offsets by load, for the trace's pair."""
    info = trace.info
    card = PolicyCard(
        model_pair=info.model_pair,
        drafter=info.drafter,
        max_num_speculative_tokens=info.max_num_speculative_tokens,
    )
    stops = info.drafter == "draft-model"
    return LearnedScheduler(offset_weights(rule, by_load, stops=stops), card)
