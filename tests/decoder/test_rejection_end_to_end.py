"""Rejection sampling through the whole engine has the target's law, and a planted fault bends it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

from specdepth.decoder import drafters, sampling
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.sampling import uniform
from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, Ints, RoundState
from tests.decoder.tiny import (
    Watched,
    bigram_model,
    build_decoder,
    next_law,
    noisy_copy,
    ragged,
    repetitive_prompts,
    tiny_llama,
)
from tests.decoder.tiny_eagle import tiny_eagle

VOCAB = 5
LENGTH = 3
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
NUM_SEEDS = 3000
FALSE_ALARM = 1e-4
TARGET = tiny_llama(3, vocab_size=VOCAB, initializer_range=0.12)
DRAFT = noisy_copy(TARGET, 0.7)
EAGLE = tiny_eagle(TARGET, num_named=4)
"""It cannot name one of the tokens."""


@cache
def law_of_texts(temperature: float, top_p: float) -> np.ndarray:
    """Probability of each text of `LENGTH` tokens, [VOCAB ** LENGTH], by enumeration."""
    params = SamplingParams(temperature=temperature, top_p=top_p)
    law = np.ones(1)
    for length in range(LENGTH):
        laws = [
            next_law(TARGET, [*PROMPT, *text], params)[0].numpy()
            for text in itertools.product(range(VOCAB), repeat=length)
        ]
        law = (law[:, None] * np.stack(laws)).ravel()
    return law


def sampled_texts(
    draft: PreTrainedModel | str, scheduler: Watched, params: SamplingParams, **options: Any
) -> tuple[np.ndarray, Any]:
    decoder = build_decoder(
        TARGET,
        draft,
        **{"max_num_seqs": 250, "max_num_batched_tokens": 4096, "num_kv_blocks": 1000} | options,
    )
    seeded = [
        SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            seed=seed,
            max_new_tokens=LENGTH,
        )
        for seed in range(NUM_SEEDS)
    ]
    batch = decoder.generate([PROMPT] * NUM_SEEDS, None, seeded, depth_scheduler=scheduler)
    return np.array([result.token_ids for result in batch]), batch.metrics


def assert_law(texts: np.ndarray, law: np.ndarray) -> None:
    index = texts @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
    counts, expected = np.bincount(index, minlength=len(law)), len(texts) * law
    assert counts[law == 0].sum() == 0  # what top-p cut off never comes up
    common = expected >= 5
    rest = counts[~common].sum(), expected[~common].sum()
    seen, wanted = np.append(counts[common], rest[0]), np.append(expected[common], rest[1])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert len(seen) > 10
    assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model", "eagle"])
def test_the_law_is_the_targets_at_ragged_depths(drafter: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    drafts: dict[str, Any] = {"draft-model": DRAFT, "eagle": EAGLE}
    draft = drafts.get(drafter, drafter)
    texts, metrics = sampled_texts(draft, Watched(ragged(0)), params)
    assert_law(texts, law_of_texts(temperature, 0.9))
    assert 0.2 < metrics.acceptance_rate < 0.9


def test_the_law_is_the_targets_at_full_depth_and_across_preemptions() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    short = {"num_kv_blocks": 1500, "block_size": 1}
    texts, metrics = sampled_texts(DRAFT, Watched(8), params, **short)
    assert metrics.num_preemptions > 100
    assert_law(texts, law_of_texts(1.0, 0.9))


class Remembers(Watched):
    """Lawful by its own word; goes by what drafts looked like that were thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def choose(self, state: RoundState) -> Ints:
        self.state = state
        confident = [self.seen.get(number, 0.0) > 0.45 for number in state.request_ids.tolist()]
        latest = np.nan_to_num(state.draft_top1[:, 0], nan=1.0) > 0.5
        return np.where(confident, 8, np.where(latest, 2, 0))

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        for row, top1 in zip(signals.rows, signals.top1[:, -1], strict=True):
            self.seen[int(state.request_ids[row])] = float(top1)
        return signals.top1[:, -1] > 0.3


def test_a_scheduler_that_remembers_discarded_drafts_cannot_bend_the_law() -> None:
    scheduler = Remembers()
    texts, metrics = sampled_texts(DRAFT, scheduler, SamplingParams(temperature=1.0, top_p=0.9))
    assert_law(texts, law_of_texts(1.0, 0.9))
    assert metrics.num_drafted_tokens > 0
    assert len(scheduler.seen) > NUM_SEEDS / 2


class SureOnesLast(Watched):
    """Draws a likely token and none after it, in every other request: they all start alike."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
        sure = (signals.top1[:, -1] > 0.45) & (state.request_ids[signals.rows] % 2 == 0)
        depths: Ints = np.where(sure, signals.num_drafted + 1, 8)
        return depths


def test_the_law_is_the_targets_where_a_stop_says_which_token_is_the_last() -> None:
    scheduler = SureOnesLast(8)
    texts, _ = sampled_texts(DRAFT, scheduler, SamplingParams(temperature=1.0, top_p=0.9))
    assert_law(texts, law_of_texts(1.0, 0.9))
    num_drafted = {int(n) for outcome in scheduler.outcomes for n in outcome.num_drafted}
    assert len(num_drafted) > 2


# A target that says a with 0.7 and b with 0.3, and a draft that says either with 0.5. After the start
# the draft is nearly always wrong, so its second token is thrown away unseen by anybody, except that
# the draft's confidence after a and after b differs a little. If the next round drew that token again
# from the same uniform, a scheduler could verify it only when it is an a: 0.5 + 0.5 x 0.7 = 0.85.
START, A, B, C = range(4)
NEVER = -1e4


def logits_of(*probs: float) -> list[float]:
    return [float(np.log(p)) if p else NEVER for p in probs]


ATTACKED = bigram_model([logits_of(0, 0.01, 0.99, 0), *[logits_of(0, 0.7, 0.3, 0)] * 3])
REVEALING = bigram_model(
    [
        logits_of(0, 0.99, 0.01, 0),
        logits_of(0, 0.5, 0.5, 0),
        logits_of(0, 0.49, 0.49, 0.02),
        logits_of(0, 0.5, 0.5, 0),
    ]
)


class Attacker(Watched):
    """Reads off the thrown-away second token, and drafts again only if it was an a."""

    def __init__(self) -> None:
        super().__init__()
        self.was_a: dict[int, bool] = {}

    def choose(self, state: RoundState) -> Ints:
        depths = [
            3 if generated == 0 else int(self.was_a.get(number, False)) if generated == 1 else 0
            for number, generated in zip(
                state.request_ids.tolist(), state.num_generated.tolist(), strict=True
            )
        ]
        return np.array(depths)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        if signals.num_drafted == 2:
            for row, top1 in zip(signals.rows, signals.top1[:, 2], strict=True):
                self.was_a[int(state.request_ids[row])] = bool(top1 > 0.495)
        return np.ones(len(signals.rows), np.bool_)


def share_of_a_under_attack() -> tuple[float, float]:
    """Share of a as the second token, and the p-value of 0.7."""
    decoder = build_decoder(
        ATTACKED, REVEALING, max_num_seqs=250, max_num_batched_tokens=4096, num_kv_blocks=1000
    )
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4) for seed in range(2000)]
    attacker = Attacker()
    batch = decoder.generate([[START]] * 2000, None, params, depth_scheduler=attacker)
    # Nearly all lost their first draft; then the second position was the attacker's to decide.
    second = [r.token_ids[1] for r in batch if r.token_ids[0] == B]
    assert len(second) > 1900
    assert len(attacker.was_a) == 2000
    num_a = second.count(A)
    counts = [num_a, len(second) - num_a]
    return num_a / len(second), chisquare(counts, np.array([0.7, 0.3]) * len(second)).pvalue


def test_fresh_draws_withstand_the_attack() -> None:
    share, p_value = share_of_a_under_attack()
    assert share == pytest.approx(0.7, abs=0.05)
    assert p_value > FALSE_ALARM


def test_reused_draws_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: draws keyed by seed and position alone. The test above must fail then."""

    def reused(
        seed: torch.Tensor, position: torch.Tensor, attempt: torch.Tensor, stream: Any
    ) -> Any:
        return uniform(seed, position, torch.zeros_like(attempt), stream)

    monkeypatch.setattr(drafters, "uniform", reused)
    monkeypatch.setattr(sampling, "uniform", reused)
    share, p_value = share_of_a_under_attack()
    assert share == pytest.approx(0.85, abs=0.05)
    assert p_value < FALSE_ALARM


def test_no_draw_is_ever_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not across rounds that repeat a position, preemptions, cancelled rounds, or failed ones."""
    seen: set[tuple[int, ...]] = set()

    def recorded(seed: Any, position: Any, attempt: Any, stream: Any) -> torch.Tensor:
        keys = torch.broadcast_tensors(seed, position, attempt)
        for key in zip(*(k.flatten().tolist() for k in keys), strict=True):
            assert (*key, int(stream)) not in seen
            seen.add((*key, int(stream)))
        return uniform(seed, position, attempt, stream)

    monkeypatch.setattr(drafters, "uniform", recorded)
    monkeypatch.setattr(sampling, "uniform", recorded)
    target = tiny_llama()
    decoder = build_decoder(target, noisy_copy(target, 0.05), num_kv_blocks=20)
    engine = decoder.engine
    engine.set_scheduler(Watched(ragged(0)))
    for place, prompt in enumerate(repetitive_prompts()):
        engine.add_request(
            prompt, SamplingParams(temperature=1.0, seed=place, max_new_tokens=16), str(place)
        )
    forward = decoder.target.forward
    calls = itertools.count()

    def flaky(*args: Any) -> torch.Tensor:
        if next(calls) % 4 == 2:
            raise RuntimeError("the device fell over")
        return forward(*args)

    monkeypatch.setattr(decoder.target, "forward", flaky)
    failures = 0
    while engine.has_work:
        engine.begin_round()
        engine.cancel_round()
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    assert failures > 3
    assert engine.metrics.num_preemptions > 0
    assert len(seen) > 300


class Undeclared:
    """Two methods and nothing else."""

    def choose(self, state: RoundState) -> Ints:
        return np.full(state.num_running, 2)

    def observe(self, outcome: object) -> None:
        pass


class Trims(Undeclared):
    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        return signals.num_proposed


class Stops(Watched):
    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        return signals.top1[:, -1] > 0.5


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (Undeclared, "Undeclared does not declare that it is lossless"),
    (Trims, "Trims does not declare that it is lossless"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_schedulers_that_could_bend_the_law_are_refused_by_name(
    make: Callable[[], Any], message: str
) -> None:
    decoder = build_decoder(TARGET, DRAFT)
    engine, drawn = decoder.engine, SamplingParams(temperature=1.0, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        decoder.generate([PROMPT], None, drawn, depth_scheduler=make())
    assert not engine.has_work
    engine.set_scheduler(make())  # nobody samples yet
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, drawn)
    engine.set_scheduler(Watched(2))
    engine.add_request(PROMPT, drawn)
    with pytest.raises(ValueError, match=message):
        engine.set_scheduler(make())
    while engine.has_work:  # with the scheduler that it had
        engine.step()
    assert len(engine.take_finished()[0].token_ids) == 4
    # Greedy requests, the coupled rule and prompt lookup take them.
    decoder.generate([PROMPT], 1, SamplingParams(), depth_scheduler=make())
    coupled = build_decoder(TARGET, DRAFT, verification="coupled")
    coupled.generate([PROMPT], 1, drawn, depth_scheduler=make())
    build_decoder(TARGET, "prompt-lookup").generate([PROMPT], 1, drawn, depth_scheduler=make())


def test_stopping_by_confidence_before_a_draw_is_lawful() -> None:
    batch = build_decoder(TARGET, DRAFT).generate(
        [PROMPT], 8, SamplingParams(temperature=1.0), depth_scheduler=Stops(8)
    )
    assert len(batch[0].token_ids) == 8
