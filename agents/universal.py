"""One policy for many machines and drafters: trained on several traces, at prices of random machines.

What a token earns is a matter of the models, what it costs one of the machine. A survival model is fitted
to all traces at once, and the greedy rule over it reads the prices of whatever machine it runs on. Then
offsets of the rule are searched, each step on other machines, so that what is learned holds for all of
them. With a draft model it has stops too (`PricedStops`).

Legend: K deepest depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from specdepth.decoder.trace import Trace
from specdepth.envs import REPLAY_DECODE
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.model_folder import ANY
from specdepth.scheduler.policy_file import PolicyCard
from specdepth.scheduler.state import Floats
from specdepth.scheduler.survival_model import SurvivalCard, SurvivalModel

from .offset_search import SearchConfig, ascend, tune_stops
from .offset_weights import FLAGS, offset_weights
from .policy_card import git_sha
from .random_costs import random_cost
from .replay_engines import content_sha256
from .results import collect_versions
from .rule_tuning import TrainingReplay
from .survival_fit import SurvivalFitConfig, fit_survival, inputs_for
from .survival_rows import (
    Behaviour,
    SurvivalRows,
    collect_rows,
    exploring_behaviours,
    greedy_behaviours,
)

START = {1: Shrinkage(price=1.25), 2: Shrinkage(pull=0.2, price=1.25)}
"""Shrinkage that a load starts at unless none is better there: about what tuning gives on one machine."""
TRIES = 2
"""Machines of each trace on which the start of a load is chosen (`tune_stops`)."""
CHECKS, CHECK_REQUESTS = 3, 96
"""Machines of each trace, and requests of each, on which what the search found for a load must be faster
than its start with every trace. A short search sees few machines, and may follow their luck."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UniversalConfig:
    """How to train.

    Raises:
        ValueError: a number out of range.
    """

    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Concurrent requests to search at; 1 to 32, each once."""
    machines_per_step: int = 2
    """Machines, each with a trace and requests of its own, that a sample is scored on."""
    survival: SurvivalFitConfig = field(
        default_factory=lambda: SurvivalFitConfig(hidden_units=48, num_steps=8000)
    )
    search: SearchConfig = field(
        default_factory=lambda: SearchConfig(iterations=16, num_requests=64)
    )
    seed: int = 0
    """Of machines, requests, fits and samples."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.loads) - set(FLAGS))
        if unknown or not self.loads:
            raise ValueError(f"loads must be out of {list(FLAGS)}, got {list(self.loads)}.")
        if self.machines_per_step < 1:
            raise ValueError(f"machines_per_step must be at least 1, got {self.machines_per_step}.")


def train_universal(
    traces: Mapping[str, Trace],
    config: UniversalConfig | None = None,
    *,
    command: str = "",
    progress: Progress = lambda share, detail: None,
) -> LearnedScheduler:
    """Train on the training splits of all traces.

    Args:
        traces: by name, of any models, drafters and K; the policy's K is the largest.
        config: see `UniversalConfig`.
        command: how to do it again, for the card.
        progress: told the share done and what is going on.

    Raises:
        ValueError: no traces.
    """
    config = config or UniversalConfig()
    if not traces:
        raise ValueError("a universal policy needs at least one trace.")
    card = _card(max(trace.info.max_num_speculative_tokens for trace in traces.values()))
    rng = np.random.default_rng(config.seed)
    model = _fit(traces, config, rng, progress)
    start = CappedGreedyDepth(model, START)
    rule = CappedGreedyDepth(model, {load: start.shrinkage_at(load) for load in config.loads})
    settings = replace(config.search, seed=config.seed)
    found: dict[int, Floats] = {}
    for number, load in enumerate(config.loads):
        # All are drawn before the search, so that its samples do not change them.
        machines = [
            _machines(traces, load, config.machines_per_step, settings.num_requests, rng)
            for _ in range(settings.iterations)
        ]
        others = _machines(
            traces, load, CHECKS * len(traces), max(settings.num_requests, CHECK_REQUESTS), rng
        )
        tried = _machines(traces, load, TRIES * len(traces), settings.num_requests, rng)

        def tuning(
            rule: CappedGreedyDepth, load: int = load, tried: list[TrainingReplay] = tried
        ) -> float:
            return _log_throughput(rule, {}, card, tried, load)

        done = number / len(config.loads)
        progress(0.3 + 0.7 * done, f"choosing the start of load {load}")
        rule = tune_stops(rule, load, tuning)

        def score(
            values: Floats,
            step: int,
            rule: CappedGreedyDepth = rule,
            load: int = load,
            machines: list[list[TrainingReplay]] = machines,
        ) -> float:
            return _log_throughput(rule, {load: values}, card, machines[step], load)

        def report(share: float, number: int = number, load: int = load) -> None:
            done = (number + share) / len(config.loads)
            progress(0.3 + 0.7 * done, f"searching at load {load}")

        values = ascend(score, settings, config.seed + load, report)
        none = np.zeros_like(values)
        by_trace = [others[one :: len(traces)] for one in range(len(traces))]
        gains = [
            _log_throughput(rule, {load: values}, card, ones, load)
            - _log_throughput(rule, {load: none}, card, ones, load)
            for ones in by_trace
        ]
        found[load] = values if min(gains) > 0 else none
    weights = offset_weights(rule, found, stops=True)
    training = {
        "command": command,
        "method": "survival fitted to all traces; offsets searched over random machines",
        "traces": {name: content_sha256(trace) for name, trace in traces.items()},
        "config": asdict(config),
        "loads": list(config.loads),
        "seed": config.seed,
    }
    return LearnedScheduler(weights, replace(card, training=training))


def _fit(
    traces: Mapping[str, Trace],
    config: UniversalConfig,
    rng: np.random.Generator,
    progress: Progress,
) -> SurvivalModel:
    """Fit to exploring schedules first, then also to those of the rule over that fit (see
    `study_survival`).
    """
    settings = replace(config.survival, seed=config.seed)
    inputs = tuple(dict.fromkeys(inputs_for("prompt-lookup") + inputs_for("draft-model")))
    card = SurvivalCard(model_pair=ANY, drafter=ANY)
    progress(0.0, "replaying exploring schedules")
    explored = _rows(traces, rng, lambda top: exploring_behaviours(config.seed, top))
    progress(0.1, "fitting")
    model = SurvivalModel(fit_survival(explored, inputs, settings).weights, card)
    progress(0.15, "replaying its own rule")
    own = _rows(traces, rng, lambda _: greedy_behaviours(model))
    progress(0.25, "fitting again")
    rows = SurvivalRows.concatenate([explored, own])
    return SurvivalModel(fit_survival(rows, inputs, settings).weights, card)


def _rows(
    traces: Mapping[str, Trace],
    rng: np.random.Generator,
    behaviours: Callable[[int], list[Behaviour]],
) -> SurvivalRows:
    """Rows of all training splits, under the behaviours for the K of each."""
    parts = []
    for trace in traces.values():
        chosen = behaviours(trace.info.max_num_speculative_tokens)
        rows = collect_rows(trace, _cost(trace, rng), trace.rows("train"), chosen)
        parts.append(rows.as_other_engines(rng))
    return SurvivalRows.concatenate(parts)


def _machines(
    traces: Mapping[str, Trace],
    load: int,
    count: int,
    num_requests: int,
    rng: np.random.Generator,
) -> list[TrainingReplay]:
    """Some machines: traces in turn, at prices and with requests of their own."""
    named = list(traces.values())
    first = int(rng.integers(len(named)))
    chosen = [named[(first + i) % len(named)] for i in range(count)]
    return [
        TrainingReplay(
            trace,
            _cost(trace, rng),
            [load],
            num_requests=num_requests,
            seed=int(rng.integers(2**31)),
        )
        for trace in chosen
    ]


def _log_throughput(
    rule: CappedGreedyDepth,
    offsets: Mapping[int, Floats],
    card: PolicyCard,
    machines: list[TrainingReplay],
    load: int,
) -> float:
    """Mean over some machines, all of which count alike."""
    scheduler = LearnedScheduler(offset_weights(rule, offsets, stops=True), card)
    return float(np.mean([np.log(one.throughput(scheduler, load)) for one in machines]))


def _cost(trace: Trace, rng: np.random.Generator) -> CostModel:
    return random_cost(rng, draft_model=trace.info.drafter == "draft-model")


def _card(top: int) -> PolicyCard:
    return PolicyCard(
        model_pair=ANY,
        drafter=ANY,
        max_num_speculative_tokens=top,
        mask_depths=True,
        env_id=REPLAY_DECODE,
        git_sha=git_sha(),
        versions=collect_versions(),
    )
