"""Stop rules that do their worst under rejection sampling: the lawful ones can't bend the law of the
texts, and the same checks catch unlawful ones.

Each check is done twice: exactly, over all fates of a rule in a small world (`RuleLaw`), and on texts
that the real engine sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare
from transformers import PreTrainedModel

from specdepth.decoder.clock import VirtualClock
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.engine import Engine
from specdepth.decoder.request import GenerationResult
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundOutcome, RoundState
from tests.decoder.rule_law import EXACT, AppendixA, RuleLaw, TwoTokens
from tests.decoder.stop_rules import (
    LAWFUL,
    Adversary,
    AnswersBadlyUntilLiked,
    BudgetOfThisRound,
    CutsByTheNextLaw,
    FailsInTrim,
    FailsUntilLiked,
    Honest,
    Peeks,
    StopsWhenUnsure,
    TrimsLate,
    as_depths,
)
from tests.decoder.test_rejection_end_to_end import DRAFT, FALSE_ALARM, PROMPT, TARGET, logits_of
from tests.decoder.test_verification_exact import World
from tests.decoder.tiny import bigram_model, build_decoder, next_law

COST = CostModel.linear(base_s=1.0, token_s=0.02, draft_base_s=0.1, draft_token_s=0.01)


# ---------------------------------------------------------------- exactly


@cache
def one_sequence() -> RuleLaw:
    return RuleLaw(World(1, None), length=3)


@cache
def short_text() -> RuleLaw:
    return RuleLaw(World(4, None))


@cache
def two_sequences() -> RuleLaw:
    return RuleLaw(TwoTokens(2, None), num_seqs=2)


@pytest.mark.parametrize("law", [one_sequence, two_sequences])
@pytest.mark.parametrize("make", LAWFUL)
def test_no_lawful_rule_bends_the_law(make: Callable[[], Any], law: Callable[[], RuleLaw]) -> None:
    assert law().worst_error(make) < EXACT
    assert len(law().depths) > 1  # it did stop, and not always


@pytest.mark.parametrize("law", [short_text, two_sequences])
@pytest.mark.parametrize("make", [CutsByTheNextLaw, BudgetOfThisRound])
def test_planted_unlawful_rules_are_caught(
    make: Callable[[], Any], law: Callable[[], RuleLaw]
) -> None:
    assert law().worst_error(make) > 1e-3


def test_the_counterexample_of_dspark_has_its_published_numbers() -> None:
    """Appendix A of arXiv 2607.05147: 0.7 becomes 0.85."""
    law = RuleLaw(AppendixA())
    assert law.law(CutsByTheNextLaw).sum(1) == pytest.approx([0.85, 0.15], abs=EXACT)
    assert law.law(StopsWhenUnsure).sum(1) == pytest.approx([0.7, 0.3], abs=EXACT)


# ------------------------------------------------------- through the engine


class Mixed(Adversary):
    """Several rules over one batch: each sees all of it, and rules the requests of its own number."""

    def __init__(self, rules: list[Any]) -> None:
        self.rules = rules
        self.depths: set[int] = set()

    def choose(self, state: RoundState) -> Ints:
        answers = np.stack([rule.choose(state) for rule in self.rules])
        return answers[state.request_ids % len(self.rules), np.arange(state.num_running)]

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
        answers = np.stack([as_depths(rule.keep_drafting(state, signals)) for rule in self.rules])
        own = state.request_ids[signals.rows] % len(self.rules)
        return answers[own, np.arange(len(signals.rows))]

    def observe(self, outcome: RoundOutcome) -> None:
        self.depths.update(outcome.num_drafted.tolist())
        for rule in self.rules:
            rule.observe(outcome)


SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)


def sampled(
    scheduler: Any,
    target: PreTrainedModel = TARGET,
    draft: PreTrainedModel = DRAFT,
    prompt: list[int] = PROMPT,
    count: int = 300,
    length: int = 2,
) -> Ints:
    """The first tokens of `count` texts, [count, length]."""
    decoder = build_decoder(
        target,
        draft,
        max_num_seqs=300,
        max_num_batched_tokens=4096,
        num_kv_blocks=1500,
        max_num_speculative_tokens=3,
        clock=VirtualClock(COST),
        cost=COST,
    )
    if isinstance(scheduler, Peeks):
        scheduler.decoder = decoder
    texts: list[list[int]] = []
    for start in range(0, count, 600):
        params = [replace(SAMPLING, seed=seed) for seed in range(start, min(start + 600, count))]
        batch = decoder.generate([prompt] * len(params), 4, params, depth_scheduler=scheduler)
        texts += [result.token_ids[:length] for result in batch]
    return np.array(texts)


def p_value(texts: Ints, target: PreTrainedModel = TARGET, prompt: list[int] = PROMPT) -> float:
    """Of the target's own law of the first two tokens."""
    first = next_law(target, prompt, SAMPLING)[0]
    size = len(first)
    law = np.concatenate(
        [first[x].item() * next_law(target, [*prompt, x], SAMPLING)[0].numpy() for x in range(size)]
    )
    counts, expected = np.bincount(texts @ [size, 1], minlength=size**2), len(texts) * law
    assert counts[law == 0].sum() == 0
    seen, wanted = counts[law > 0], expected[law > 0]
    common = wanted >= 5
    seen = np.append(seen[common], seen[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    positive = wanted > 0
    assert positive.sum() > 1
    return float(chisquare(seen[positive], wanted[positive]).pvalue)


@cache
def texts_under_all() -> Ints:
    scheduler = Mixed([make() for make in LAWFUL])
    texts = sampled(scheduler, count=1800)
    assert scheduler.depths == {0, 1, 2, 3}
    return texts


@pytest.mark.parametrize("place", range(len(LAWFUL)))
def test_texts_under_a_lawful_rule_have_the_targets_law(place: int) -> None:
    assert p_value(texts_under_all()[place :: len(LAWFUL)]) > FALSE_ALARM


def test_texts_under_all_lawful_rules_have_the_targets_law() -> None:
    assert p_value(texts_under_all()) > FALSE_ALARM


@pytest.mark.parametrize("make", [CutsByTheNextLaw, Peeks])
def test_texts_under_a_planted_unlawful_rule_do_not(make: Callable[[], Any]) -> None:
    """With as many texts as a single lawful rule has."""
    assert p_value(sampled(make())) < FALSE_ALARM


# Token 0 starts; the target says 1 with 0.7 and 2 with 0.3, the draft either with 0.5, and is sure of
# what follows a 1.
APPENDIX_TARGET = bigram_model([logits_of(0, 0.7, 0.3)] * 3)
APPENDIX_DRAFT = bigram_model(
    [logits_of(0, 0.5, 0.5), logits_of(0, 0.9, 0.1), logits_of(0, 0.5, 0.5)]
)


@pytest.mark.parametrize(("make", "share"), [(StopsWhenUnsure, 0.7), (CutsByTheNextLaw, 0.85)])
def test_the_counterexample_in_the_engine(make: Callable[[], Any], share: float) -> None:
    texts = sampled(make(), APPENDIX_TARGET, APPENDIX_DRAFT, [0], count=400)
    assert (texts[:, 0] == 1).mean() == pytest.approx(share, abs=0.07)  # 3 sigma
    is_right = p_value(texts, APPENDIX_TARGET, [0]) > FALSE_ALARM
    assert is_right == (share == 0.7)


# ---------------------------------------------------------- rounds that fail


class Retried:
    """Requests of one prompt, each run alone, by a caller who steps again whatever happens."""

    def __init__(self, scheduler: Any, verification: str = "rejection") -> None:
        decoder = build_decoder(
            APPENDIX_TARGET, APPENDIX_DRAFT, max_num_speculative_tokens=2, verification=verification
        )
        self.engine = decoder.engine
        self.engine.set_scheduler(scheduler)
        self.errors: list[Exception] = []

    def texts(self, count: int = 12) -> list[GenerationResult]:
        for seed in range(count):
            sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=3)
            self.engine.add_request([0], sampling, str(seed))
            self.run()
        return self.engine.take_finished()

    def run(self) -> None:
        for _ in range(200):
            if not self.engine.has_work:
                return
            try:
                self.engine.step()
            except (ZeroDivisionError, ValueError) as error:
                self.errors.append(error)
        raise AssertionError("it goes on for ever")


FAILING = [FailsUntilLiked, AnswersBadlyUntilLiked, FailsInTrim]


@cache
def texts_of_whole_drafts() -> list[list[int]]:
    texts = [result.token_ids for result in Retried(Adversary()).texts()]
    assert {tokens[0] for tokens in texts} == {1, 2}
    return texts


@pytest.mark.parametrize("make", FAILING)
def test_a_rule_can_not_have_a_round_drawn_again(make: Callable[[], Any]) -> None:
    retried = Retried(make())
    results = retried.texts()
    aborted = [result for result in results if result.finish_reason == "abort"]
    assert len(aborted) == len(retried.errors) > 3
    for result, tokens in zip(results, texts_of_whole_drafts(), strict=True):
        assert result.token_ids == ([] if result in aborted else tokens)
    assert all("1 sampled requests were aborted" in e.__notes__[0] for e in retried.errors)


@pytest.mark.parametrize("make", FAILING)
def test_drawing_it_again_would_be_caught(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: 0.7 becomes 1."""
    monkeypatch.setattr(Engine, "_abort_asked", lambda *_: None)
    results = Retried(make()).texts()
    assert all(result.token_ids[0] == 1 for result in results)


class FailsOnce(Adversary):
    """And drafts nothing for the request with the number 2."""

    num_calls = 0

    def choose(self, state: RoundState) -> Ints:
        return np.where(state.request_ids == 2, 0, state.max_depths)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        self.num_calls += 1
        if self.num_calls == 2:
            raise ZeroDivisionError
        return np.ones(len(signals.rows), np.bool_)


def test_requests_whose_drafts_were_not_shown_or_are_not_drawn_go_on() -> None:
    retried = Retried(FailsOnce())
    for temperature in (0.0, 1.0, 1.0):
        retried.engine.add_request([0], SamplingParams(temperature=temperature, max_new_tokens=3))
    retried.run()
    reasons = {r.request_id: r.finish_reason for r in retried.engine.take_finished()}
    assert reasons == {"0": "length", "1": "abort", "2": "length"}


def test_where_draws_do_not_change_a_failed_round_is_run_again() -> None:
    plain = Retried(Adversary(), "coupled").texts(8)
    retried = Retried(FailsOnce(), "coupled")
    assert [r.token_ids for r in retried.texts(8)] == [r.token_ids for r in plain]
    assert len(retried.errors) == 1
    assert not hasattr(retried.errors[0], "__notes__")


# ----------------------------------------------------------------- refusal


def test_a_hook_that_appears_later_is_not_used() -> None:
    texts = sampled(TrimsLate(), APPENDIX_TARGET, APPENDIX_DRAFT, [0])
    assert (texts == sampled(Adversary(), APPENDIX_TARGET, APPENDIX_DRAFT, [0])).all()


def test_the_engine_refuses_an_unlawful_rule_that_does_not_lie() -> None:
    decoder = build_decoder(TARGET, DRAFT)
    with pytest.raises(ValueError, match="Honest does not declare that it is lossless"):
        decoder.generate([PROMPT], 4, SAMPLING, depth_scheduler=Honest())


def test_where_it_is_lawful_the_unlawful_rule_leaves_the_text() -> None:
    decoder = build_decoder(TARGET, DRAFT, verification="coupled")
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    plain, cut = (
        [r.token_ids for r in decoder.generate([PROMPT] * 4, 12, params, depth_scheduler=rule)]
        for rule in (0, Honest())
    )
    assert cut == plain
