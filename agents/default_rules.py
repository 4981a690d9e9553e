"""The rules that a replay compares unless it is told which: all that a deployment could run untuned."""

from __future__ import annotations

from specdepth.decoder.trace_info import TraceInfo
from specdepth.scheduler.baselines.greedy_file import load_greedy, shipped_rules
from specdepth.scheduler.baselines.survival_names import shipped_survival_for

RULES = (
    *("mlc", "heuristic", "goodput", "goodput:adaspec", "goodput:positions", "goodput:window"),
    *("ema-greedy", "dspark", "adaptive-verification", "sglang-ladder", "ucb", "tlt", "eps-greedy"),
)
STOPS = ("hf-confidence", "llamacpp", "adaedl", "svip", "specdec++")
"""Stops between the passes of a draft model; with any other drafter they are the deepest fixed depth."""
PRICED = "priced-stops"
"""Caps by the greedy rule, and stops below them; takes an estimator too. Without a draft model it is the
greedy rule."""
WITH_SURVIVAL = ("blind-greedy", "greedy", "dspark", "adaptive-verification")
"""Rules that take an estimator of survival."""


def default_rules(info: TraceInfo) -> tuple[str, ...]:
    """Names for `make_scheduler`.

    Those with an estimator take the first shipped model that fits, else one that learns while it runs.

    Args:
        info: what models have to fit: the pair and drafter of a trace.
    """
    has_draft_model = info.drafter == "draft-model"
    estimator = shipped_survival_for(info.model_pair, info.drafter)
    if estimator is None:
        estimator = "confidence" if has_draft_model else "match"

    return (
        *RULES,
        *(STOPS if has_draft_model else ()),
        *(f"{rule}:{estimator}" for rule in WITH_SURVIVAL),
        *((f"{PRICED}:{estimator}",) if has_draft_model else ()),
        *fitting_rules(info),
    )


def fitting_rules(info: TraceInfo) -> tuple[str, ...]:
    """Names of the shipped tuned rules that fit a pair and drafter."""

    def fits(name: str) -> bool:
        try:
            load_greedy(name, model_pair=info.model_pair, drafter=info.drafter)
        except ValueError:
            return False
        return True

    return tuple(f"rule:{rule}" for rule in shipped_rules() if fits(rule))
