"""The goodput family in the real engine: the text never depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.scheduler.baselines.adaptive_verification import AdaptiveVerificationDepth
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.dspark import DSparkDepth
from specdepth.scheduler.baselines.goodput import GoodputDepth
from specdepth.scheduler.baselines.position_goodput import WindowGoodputDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.survival_estimators import MatchLengthSurvival
from tests.decoder.tiny import build_decoder, noisy_copy, tiny_llama

TARGET = tiny_llama()
DRAFT = noisy_copy(TARGET, 0.1)
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [40, 41, 40, 41, 40], [30, 2, 30, 2, 30]]
SAMPLING = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0.0, 0.7, 1.0))]
COST = CostModel.linear(base_s=0.05, token_s=0.001, draft_base_s=0.002)

RULES: dict[str, Callable[[], DepthScheduler]] = {
    "goodput": GoodputDepth,
    "goodput:window": lambda: WindowGoodputDepth(window=2, interval=2),
    "dspark": DSparkDepth,
    "adaptive-verification": lambda: AdaptiveVerificationDepth(warmup_refits=0),
    "shrunk": lambda: CappedGreedyDepth(MatchLengthSurvival(), Shrinkage(pull=0.3)),
}


def decode(drafter: str, scheduler: Any) -> Any:
    draft = DRAFT if drafter == "draft-model" else drafter
    decoder = build_decoder(
        TARGET,
        draft,
        verification="coupled",
        max_num_speculative_tokens=4,
        max_num_seqs=2,
        cost=COST,
    )
    return decoder.generate(PROMPTS, 12, SAMPLING, depth_scheduler=scheduler)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [result.token_ids for result in decode("prompt-lookup", 0)]


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
@pytest.mark.parametrize("rule", RULES)
def test_the_text_is_the_same_and_something_was_drafted(
    rule: str, drafter: str, plain: list[list[int]]
) -> None:
    batch = decode(drafter, RULES[rule]())
    assert [result.token_ids for result in batch] == plain
    assert batch.metrics.num_drafted_tokens > 0
