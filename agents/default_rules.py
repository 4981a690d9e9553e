"""The rules that a replay compares unless it is told which: all that a deployment could run untuned."""

from __future__ import annotations

from specdepth.decoder.trace_info import TraceInfo
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.baselines.greedy_file import shipped_rules
from specdepth.scheduler.baselines.survival_names import shipped_survival_models

RULES = (
    *("mlc", "heuristic", "goodput", "goodput:adaspec", "goodput:positions", "goodput:window"),
    *("ema-greedy", "dspark", "adaptive-verification", "sglang-ladder", "ucb", "tlt", "eps-greedy"),
)
STOPS = ("hf-confidence", "llamacpp", "adaedl", "svip", "specdec++")
"""Stops between the passes of a draft model; with any other drafter they are the deepest fixed depth."""
WITH_SURVIVAL = ("blind-greedy", "greedy", "dspark", "adaptive-verification")
"""Rules that take an estimator of survival."""


def default_rules(info: TraceInfo, max_num_speculative_tokens: int) -> tuple[str, ...]:
    """Names for `make_scheduler`.

    Those with an estimator take the first shipped model that fits, else one that learns while it runs.

    Args:
        info: what models have to fit: the pair and drafter of a trace.
        max_num_speculative_tokens: and K of the replay.
    """

    def fits(name: str) -> bool:
        try:
            make_scheduler(
                name,
                model_pair=info.model_pair,
                drafter=info.drafter,
                max_num_speculative_tokens=max_num_speculative_tokens,
            )
        except ValueError:
            return False
        return True

    has_draft_model = info.drafter == "draft-model"
    fitted = [name for name in shipped_survival_models() if fits(f"greedy:{name}")]
    estimator = next(iter(fitted), "confidence" if has_draft_model else "match")
    return (
        *RULES,
        *(STOPS if has_draft_model else ()),
        *(f"{rule}:{estimator}" for rule in WITH_SURVIVAL),
        *(name for rule in shipped_rules() if fits(name := f"rule:{rule}")),
    )
