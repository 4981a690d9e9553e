"""Rules that go by a draft model's confidence, in the real decoder with one: the text is never theirs to
change, nor, under rejection sampling, its law.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.speculative_decoder import GenerationBatch, SpeculativeDecoder
from specdepth.scheduler.baselines.adaedl import AdaEDL
from specdepth.scheduler.baselines.adaptive_verification import AdaptiveVerificationDepth
from specdepth.scheduler.baselines.confidence import HFConfidence, LlamaCppConfidence
from specdepth.scheduler.baselines.dspark import DSparkDepth
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.priced_stops import PricedStops
from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
from specdepth.scheduler.baselines.svip import SVIP
from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import lawful_rules
from tests.decoder.test_rejection_end_to_end import FALSE_ALARM
from tests.decoder.test_stop_rule_law import p_value, sampled
from tests.decoder.tiny import build_decoder, noisy_copy, repetitive_prompts, tiny_llama

TARGET = tiny_llama(3, initializer_range=0.5)  # sure enough of its tokens for thresholds to bite
DRAFT = noisy_copy(TARGET, 0.02)
SMALL_TARGET = tiny_llama(5, vocab_size=5, initializer_range=0.2)
SMALL_DRAFT = noisy_copy(SMALL_TARGET, 0.2)
PROMPTS = repetitive_prompts()[1:7]
NUM_TOKENS = 14
COST = CostModel.linear(base_s=1.0, token_s=0.08, draft_base_s=0.02)
GREEDY = [SamplingParams()] * len(PROMPTS)
SAMPLED = [
    SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
    for seed, temperature in enumerate((0.0, 0.5, 0.7, 1.0, 1.0, 1.3))
]

RULES: dict[str, tuple[Callable[[float], Any], float, float]] = {
    "hf-confidence": (HFConfidence, 0.4, 0.33),
    "llamacpp": (LlamaCppConfidence, 0.3, 0.31),
    "adaedl": (lambda threshold: AdaEDL(0.1, threshold=threshold), 0.55, 0.617),
    "svip": (SVIP, 1.4, 1.21),
    "specdec++": (SpecDecPlusPlus, 0.7, 0.3),
    "specdec++, estimated": (
        lambda threshold: SpecDecPlusPlus(threshold, ConfidenceSurvival()),
        0.9,
        0.5,
    ),
    "priced-stops": (lambda _: PricedStops(FixedDepth(3)), 0.0, 0.0),
    "dspark": (lambda _: DSparkDepth(), 0.0, 0.0),
    "adaptive-verification": (lambda _: AdaptiveVerificationDepth(warmup_refits=0), 0.0, 0.0),
}
"""How to make each, and its threshold for the two pairs of models: it must stop here and there."""


@cache
def decoder(verification: str) -> SpeculativeDecoder:
    """In a pool that is too small for all, so that sequences are preempted."""
    return build_decoder(TARGET, DRAFT, verification=verification, num_kv_blocks=30, cost=COST)


def decode(verification: str, scheduler: Any) -> GenerationBatch:
    params = GREEDY if verification == "greedy" else SAMPLED
    return decoder(verification).generate(PROMPTS, NUM_TOKENS, params, depth_scheduler=scheduler)


@cache
def texts_at_depth_0(verification: str) -> list[list[int]]:
    return [result.token_ids for result in decode(verification, 0)]


@pytest.mark.parametrize("verification", ["greedy", "coupled"])
@pytest.mark.parametrize("name", RULES)
def test_the_text_is_that_of_depth_0(name: str, verification: str) -> None:
    make, threshold, _ = RULES[name]
    batch = decode(verification, make(threshold))
    assert [result.token_ids for result in batch] == texts_at_depth_0(verification)
    metrics = batch.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens
    assert metrics.num_preemptions > 0
    assert np.count_nonzero(metrics.accept_counts.sum(1)) > 2  # depths vary


@cache
def texts_at_full_depth() -> np.ndarray:
    return sampled(FixedDepth(3), SMALL_TARGET, SMALL_DRAFT, length=3)


@pytest.mark.parametrize("name", RULES)
def test_under_rejection_texts_have_the_targets_law_or_the_rule_is_refused(name: str) -> None:
    make, _, threshold = RULES[name]
    rule = make(threshold)
    if "rejection" not in lawful_rules(rule):
        with pytest.raises(ValueError, match=type(rule).__name__):
            sampled(rule, SMALL_TARGET, SMALL_DRAFT)
        return
    texts = sampled(rule, SMALL_TARGET, SMALL_DRAFT, length=3)
    assert p_value(texts[:, :2], SMALL_TARGET) > FALSE_ALARM
    assert (texts != texts_at_full_depth()).any()  # it stopped where that mattered
