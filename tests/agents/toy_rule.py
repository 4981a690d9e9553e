"""A greedy rule over a made-up survival model, on the toy trace's terms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.greedy_file import save_greedy
from specdepth.scheduler.state import DrafterKind
from specdepth.scheduler.survival_model import (
    SurvivalCard,
    SurvivalModel,
    SurvivalWeights,
    save_survival,
)

SHRINKAGE = {1: Shrinkage(price=1.25), 4: Shrinkage(pull=0.3, exponent=0.9, price=1.5)}
CARD = SurvivalCard(model_pair="toy + toy", drafter="prompt-lookup")


def toy_rule(
    depth: int = 4, hidden: int = 5, drafter: DrafterKind = "prompt-lookup"
) -> CappedGreedyDepth:
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    inputs = ("acceptance", "match_3", "last_accepted", "match_agreement")
    weights = SurvivalWeights(
        inputs=inputs,
        hidden_weight=2 * draw(hidden, len(inputs)),
        hidden_bias=draw(hidden),
        out_weight=draw(depth, hidden),
        out_bias=np.full(depth, 0.5, np.float32),
    )
    return CappedGreedyDepth(SurvivalModel(weights, replace(CARD, drafter=drafter)), SHRINKAGE)


def save_toy_rule(folder: Path) -> str:
    """Write it into `folder`; returns the name for `make_scheduler`."""
    rule = toy_rule()
    assert isinstance(rule.survival, SurvivalModel)
    save_survival(folder / "survival", rule.survival.weights, CARD)
    save_greedy(folder / "rule.json", str(folder / "survival"), rule)
    return f"rule:{folder / 'rule.json'}"
