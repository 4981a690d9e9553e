"""The stops in the real decoder with a draft model: which tokens they verify, and the law of the texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.scheduler.baselines.adaedl import AdaEDL
from specdepth.scheduler.baselines.confidence import HFConfidence, LlamaCppConfidence
from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
from specdepth.scheduler.baselines.svip import SVIP
from specdepth.scheduler.state import RoundOutcome, RoundState
from tests.decoder.test_rejection_end_to_end import DRAFT as SMALL_DRAFT
from tests.decoder.test_rejection_end_to_end import assert_law, law_of_texts, sampled_texts
from tests.decoder.tiny import (
    build_decoder,
    greedy_text,
    noisy_copy,
    repetitive_prompts,
    tiny_llama,
)

TARGET = tiny_llama(3, initializer_range=0.5)  # half of its laws have a top-1 probability above 0.4
DRAFT = noisy_copy(TARGET, 0.02)
PROMPTS = repetitive_prompts()[2:7]
NUM_TOKENS = 16
TEXTS = [greedy_text(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]
STOPS: list[Callable[[], Any]] = [
    AdaEDL,
    HFConfidence,
    lambda: LlamaCppConfidence(0.3),
    lambda: SVIP(1.6),
    lambda: SpecDecPlusPlus(0.9),
]


class Recorded:
    """A stop, and what each of its rounds showed."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.lawful_under = rule.lawful_under
        self.keep_drafting = rule.keep_drafting
        self.rounds: list[tuple[RoundState, RoundOutcome]] = []

    def choose(self, state: RoundState) -> Any:
        self.state = state
        return self.rule.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        self.rounds.append((self.state, outcome))
        self.rule.observe(outcome)


def decode(rule: Any, drafter: Any = DRAFT) -> tuple[Recorded, Any]:
    recorded = Recorded(rule)
    decoder = build_decoder(TARGET, drafter, num_kv_blocks=40)
    batch = decoder.generate(PROMPTS, NUM_TOKENS, depth_scheduler=recorded)
    assert [result.token_ids for result in batch] == TEXTS
    return recorded, batch.metrics


@pytest.mark.parametrize("make", STOPS)
def test_texts_are_the_targets_and_depths_vary(make: Callable[[], Any]) -> None:
    recorded, metrics = decode(make())
    drafted = np.concatenate([outcome.num_drafted for _, outcome in recorded.rounds])
    assert len(set(drafted.tolist())) > 3
    assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens


@pytest.mark.parametrize("make", STOPS)
def test_with_prompt_lookup_all_on_offer_is_drafted(make: Callable[[], Any]) -> None:
    recorded, _ = decode(make(), "prompt-lookup")
    for state, outcome in recorded.rounds:
        stayed = ~outcome.preempted
        assert (outcome.num_drafted[stayed] == state.max_depths[stayed]).all()
    assert any(outcome.num_drafted.any() for _, outcome in recorded.rounds)


def test_llamacpp_verifies_sure_tokens_only() -> None:
    recorded, _ = decode(LlamaCppConfidence(0.3))
    shown = np.concatenate([outcome.draft_top1.ravel() for _, outcome in recorded.rounds])
    assert np.nanmin(shown) >= 0.3


def test_hf_verifies_one_unsure_token_at_most_and_it_is_the_last() -> None:
    recorded, _ = decode(HFConfidence(0.5, window=0))
    num_stopped = 0
    for state, outcome in recorded.rounds:
        last = outcome.num_drafted - 1
        before_last = np.arange(outcome.draft_top1.shape[1]) < last[:, None]
        assert not (outcome.draft_top1[before_last] < 0.5).any()
        early = (last >= 0) & (outcome.num_drafted < state.max_depths)
        ends = outcome.draft_top1[early, last[early]]
        ends = ends[~np.isnan(ends)]  # not hidden behind a rejection
        assert (ends < 0.5).all()
        num_stopped += len(ends)
        assert (outcome.num_drafted[(state.max_depths > 0) & ~outcome.preempted] > 0).all()
    assert num_stopped > 10


def test_rejection_sampling_keeps_the_targets_law_under_a_refitted_threshold() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    rule = HFConfidence()
    texts, metrics = sampled_texts(SMALL_DRAFT, Recorded(rule), params)  # type: ignore[arg-type]
    assert_law(texts, law_of_texts(1.0, 0.9))
    assert rule.threshold != rule.initial_threshold
    assert 0.2 < metrics.acceptance_rate < 0.9
