"""From traces to a survival model: rows of the training split, fit, refit under its own rule, scores.

Legend: M rows, K deepest depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specdepth.decoder.prompts import Split
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Floats
from specdepth.scheduler.survival_model import SurvivalCard, SurvivalModel

from .calibration import Calibration, calibrate
from .policy_card import git_sha
from .results import collect_versions
from .survival_fit import SurvivalFit, SurvivalFitConfig, fit_survival, inputs_for
from .survival_rows import (
    Behaviour,
    SurvivalRows,
    collect_rows,
    exploring_behaviours,
    greedy_behaviours,
)

SCORED_DEPTHS = (1, 2, 4, 8)
MANY_REQUESTS, NUM_PARTS = 1000, 4
"""Of so many requests a part is enough for each behaviour."""
MODEL, TABLE, BASE = "model", "match length", "base rate"
"""Estimators that are scored. The last two count the training rows: by match length and position, and
by position alone."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScore:
    """How good an estimator is on held-out requests of a trace."""

    trace: str
    looping: bool
    """Whether requests that fell into verbatim repetition are among them."""
    estimator: str
    scores: tuple[Calibration, ...]
    """At `SCORED_DEPTHS`, and over all depths last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalStudy:
    """A fitted model and what it is worth."""

    model: SurvivalModel
    fit: SurvivalFit
    num_rows: int
    """Training rows."""
    held_out: tuple[HeldOutScore, ...]

    def find(self, trace: str, looping: bool, estimator: str) -> HeldOutScore:
        """One of the scores."""
        key = (trace, looping, estimator)
        return next(s for s in self.held_out if (s.trace, s.looping, s.estimator) == key)


def study_survival(
    traces: Mapping[str, Trace],
    cost: CostModel,
    config: SurvivalFitConfig | None = None,
    *,
    command: str = "",
    progress: Progress = lambda share, detail: None,
) -> SurvivalStudy:
    """Fit one model on the training splits of all traces, and score it on their held-out splits. A trace
    without held-out requests is learned from and not scored.

    Rows come from exploring schedules first; a second fit adds those of the greedy rule over the first
    one, since a deployed model sees the histories that it causes (one step of DAgger, Ross et al. 2011,
    arXiv 1011.0686).

    Args:
        traces: by name, of one model pair, drafter and K; the same prompts may be in several.
        cost: prices for the greedy rules.
        config: of the fit.
        command: how to do it again, for the card.
        progress: told the share done and what is going on.

    Raises:
        ValueError: no traces, traces that do not go together, a split without requests.
    """
    config = config or SurvivalFitConfig()
    info = _common_info(traces)
    top = info.max_num_speculative_tokens
    inputs = inputs_for(info.drafter)
    progress(0.0, "replaying exploring schedules")
    explored = _collect(traces, cost, "train", exploring_behaviours(config.seed, top))
    progress(0.4, "fitting")
    rng = np.random.default_rng(config.seed)
    fit = fit_survival(explored.as_other_engines(rng), inputs, config)
    model = SurvivalModel(fit.weights, _card(info))
    progress(0.55, "replaying its own rule")
    rows = SurvivalRows.concatenate(
        [explored, _collect(traces, cost, "train", greedy_behaviours(model))]
    )
    progress(0.7, "fitting again")
    fit = fit_survival(rows.as_other_engines(rng), inputs, config)
    model = SurvivalModel(fit.weights, _card(info))
    progress(0.85, "scoring held-out requests")
    held_out = tuple(
        score
        for name, trace in traces.items()
        if trace.held_out.any()
        for score in _score(name, trace, model, rows, cost)
    )
    training = {
        "command": command,
        "traces": {name: _describe(trace) for name, trace in traces.items()},
        "cost": cost.name,
        "rows": len(rows),
        "loss": fit.loss,
        "config": asdict(config),
        "held_out": [
            {
                "trace": one.trace,
                "looping": one.looping,
                "estimator": one.estimator,
                "scores": [score.as_dict() for score in one.scores],
            }
            for one in held_out
        ],
    }
    model = SurvivalModel(fit.weights, _card(info, training))
    progress(1.0, "done")
    return SurvivalStudy(model=model, fit=fit, num_rows=len(rows), held_out=held_out)


def counted_survival(seen: SurvivalRows, rows: SurvivalRows, *, by_match: bool) -> Floats:
    """What counting gives for `rows`, [M, K]: rates of each position in `seen`, multiplied.

    Args:
        seen: rows to count, from the training split.
        rows: to predict.
        by_match: one set of rates for each match length, or one for all rows.
    """
    zeros = np.zeros(1, np.int64)
    groups = seen.match_lengths if by_match else zeros.repeat(len(seen))
    wanted = rows.match_lengths if by_match else zeros.repeat(len(rows))
    member = np.arange(max(groups.max(), wanted.max()) + 1)[:, None] == groups
    accepted = member.astype(np.float64) @ (seen.reached & seen.survived)
    reached = member.astype(np.float64) @ seen.reached
    # Half a success in one try stands for cells that nothing reached.
    table: Floats = np.cumprod((accepted + 0.5) / (reached + 1.0), axis=1)
    return table[wanted]


def _common_info(traces: Mapping[str, Trace]) -> TraceInfo:
    if not traces:
        raise ValueError("a survival model needs at least one trace.")
    (first_name, first), *others = traces.items()
    for name, trace in others:
        for part in ("model_pair", "drafter", "max_num_speculative_tokens"):
            ours, theirs = getattr(first.info, part), getattr(trace.info, part)
            if ours != theirs:
                raise ValueError(
                    f"one survival model serves one {part}: trace {first_name} has {ours}, {name} "
                    f"has {theirs}; fit them apart."
                )
    if not any(trace.held_out.any() for trace in traces.values()):
        raise ValueError(
            f"no request of {', '.join(traces)} is held out; a model needs some to be judged on."
        )
    for name, trace in traces.items():
        if trace.held_out.all():
            raise ValueError(
                f"all {trace.num_requests} requests of trace {name} are held out; a model needs others "
                "to learn from."
            )
    return first.info


def _collect(
    traces: Mapping[str, Trace], cost: CostModel, split: Split, behaviours: Sequence[Behaviour]
) -> SurvivalRows:
    """Rows of a split of all traces; of a long trace each behaviour serves a part of the requests."""
    parts = []
    for trace in traces.values():
        rows = trace.rows(split)
        num_parts = NUM_PARTS if len(rows) > MANY_REQUESTS else 1
        parts += [
            collect_rows(trace, cost, rows[number % num_parts :: num_parts], [behaviour])
            for number, behaviour in enumerate(behaviours)
        ]
    return SurvivalRows.concatenate(parts)


def _score(
    name: str, trace: Trace, model: SurvivalModel, seen: SurvivalRows, cost: CostModel
) -> Iterable[HeldOutScore]:
    """Score on the rounds that the greedy rule over `model` has on held-out requests."""
    every = collect_rows(trace, cost, trace.rows("held-out"), greedy_behaviours(model))
    parts = {True: every}
    if trace.looping[trace.held_out].any():
        parts[False] = every.select(~trace.looping[every.requests])
    for looping, rows in parts.items():
        estimates: dict[str, Floats] = {
            MODEL: np.multiply.accumulate(
                model.conditional_acceptance(rows.features), axis=1, dtype=np.float64
            ),
            TABLE: counted_survival(seen, rows, by_match=True),
            BASE: counted_survival(seen, rows, by_match=False),
        }
        for estimator, chances in estimates.items():
            depths = [depth for depth in SCORED_DEPTHS if depth <= chances.shape[1]]
            scores = calibrate(chances, rows.survived, rows.offered, depths)
            yield HeldOutScore(trace=name, looping=looping, estimator=estimator, scores=scores)


def _card(info: TraceInfo, training: Mapping[str, Any] | None = None) -> SurvivalCard:
    return SurvivalCard(
        model_pair=info.model_pair,
        drafter=info.drafter,
        git_sha=git_sha(),
        versions=collect_versions(),
        training=training or {},
    )


def _describe(trace: Trace) -> dict[str, Any]:
    info, held_out = trace.info, trace.held_out
    return {
        "temperature": info.temperature,
        "verification": info.verification,
        "training_requests": int((~held_out).sum()),
        "held_out_requests": int(held_out.sum()),
        "held_out_looping": int((held_out & trace.looping).sum()),
        "tokens": int(trace.num_tokens.sum()),
    }
