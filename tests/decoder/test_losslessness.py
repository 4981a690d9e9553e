"""Greedy and coupled text equals target-only decoding, token for token, whatever else happens.

Each batch mixes temperatures, runs in a pool too small for it (so sequences are preempted) and under a
token budget shorter than its prompts (so prompts are prefilled in chunks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.speculative_decoder import GenerationBatch, SpeculativeDecoder
from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import Bools, Ints, RoundState
from tests.decoder.tiny import (
    Watched,
    build_decoder,
    noisy_copy,
    ragged,
    repetitive_prompts,
    target_only_text,
    tiny_llama,
)
from tests.decoder.tiny_eagle import tiny_eagle

PROMPTS = repetitive_prompts()
NUM_TOKENS = 24
BUDGET = 12
NOISE = 0.05
"""Weight noise that makes the draft: it agrees with the target often, and far from always."""
SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    SamplingParams(temperature=0.5, top_k=20, seed=-5),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_p=0.95, top_k=50, seed=7),
    SamplingParams(temperature=1.0, seed=2**63 + 5),
    SamplingParams(),
)
TARGET = tiny_llama()
DRAFTERS = ("prompt-lookup", "draft-model", "eagle")
"""The last is a draft model too, of EAGLE's kind."""


DRAFTS: dict[str, Callable[[], Any]] = {
    "prompt-lookup": lambda: "prompt-lookup",
    "draft-model": lambda: noisy_copy(TARGET, NOISE),
    "eagle": lambda: tiny_eagle(TARGET),
}


@cache
def reference() -> list[list[int]]:
    pairs = zip(PROMPTS, SAMPLING, strict=True)
    return [target_only_text(TARGET, prompt, NUM_TOKENS, one) for prompt, one in pairs]


@cache
def tight_decoder(drafter: str, lookahead: str = "reserve") -> SpeculativeDecoder:
    """Reused from test to test, as a server would."""
    return build_decoder(
        TARGET,
        DRAFTS[drafter](),
        verification="coupled",
        max_num_batched_tokens=BUDGET,
        num_kv_blocks=20,
        lookahead=lookahead,
    )


def token_ids(batch: GenerationBatch) -> list[list[int]]:
    return [result.token_ids for result in batch]


def generate(decoder: SpeculativeDecoder, scheduler: Watched) -> GenerationBatch:
    batch = decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING, depth_scheduler=scheduler)
    decoder.engine.pool.check()
    assert decoder.engine.pool.num_free == decoder.engine.pool.num_blocks
    return batch


def assert_crowded(batch: GenerationBatch, scheduler: Watched) -> None:
    """Preemptions and chunked prefill did take place."""
    assert batch.metrics.num_preemptions > 0
    assert max(map(len, PROMPTS)) > 3 * BUDGET
    assert 0 < max(outcome.num_prefill_tokens for outcome in scheduler.outcomes) < BUDGET


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", range(9))
def test_every_fixed_depth_gives_the_targets_text(depth: int, drafter: str) -> None:
    scheduler = Watched(depth)
    batch = generate(tight_decoder(drafter), scheduler)
    assert token_ids(batch) == reference()
    assert_crowded(batch, scheduler)
    if depth == 0:
        assert batch.metrics.num_drafted_tokens == 0
    elif drafter == "draft-model":
        assert 0.2 < batch.metrics.acceptance_rate < 0.9
    else:
        assert batch.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("depth", [12, 16, "ragged"])
def test_drafts_as_deep_as_prompt_lookup_goes_give_the_targets_text(depth: int | str) -> None:
    decoder = build_decoder(
        TARGET,
        "prompt-lookup",
        verification="coupled",
        max_num_batched_tokens=BUDGET,
        num_kv_blocks=20,
        max_num_speculative_tokens=16,
    )
    scheduler = Watched(depth if isinstance(depth, int) else ragged(0))
    batch = generate(decoder, scheduler)
    assert token_ids(batch) == reference()
    assert_crowded(batch, scheduler)
    assert max(int(outcome.num_drafted.max(initial=0)) for outcome in scheduler.outcomes) > 8


@pytest.mark.parametrize("lookahead", ["reserve", "clip"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ragged_depths_that_change_each_round_give_the_targets_text(
    drafter: str, lookahead: str
) -> None:
    decoder = tight_decoder(drafter, lookahead)
    for seed in range(2):
        scheduler = Watched(ragged(seed))
        batch = generate(decoder, scheduler)
        assert token_ids(batch) == reference()
        assert_crowded(batch, scheduler)
        assert batch.metrics.num_accepted_tokens > 0
        if drafter == "draft-model":
            assert 0.2 < batch.metrics.acceptance_rate < 0.9


def test_clip_cuts_depths_where_reserve_preempts() -> None:
    batches = {}
    for lookahead in ("reserve", "clip"):
        scheduler = Watched(8)
        batches[lookahead] = generate(tight_decoder("draft-model", lookahead), scheduler)
        cut = sum(
            int((outcome.num_drafted < np.minimum(8, state.max_depths))[~outcome.preempted].sum())
            for state, outcome in zip(scheduler.states, scheduler.outcomes, strict=True)
        )
        assert (cut > 0) == (lookahead == "clip")
    assert token_ids(batches["clip"]) == token_ids(batches["reserve"]) == reference()
    assert batches["clip"].metrics.num_preemptions < batches["reserve"].metrics.num_preemptions


def test_clip_preempts_only_where_the_text_itself_has_no_room() -> None:
    # With blocks of one token each sequence needs one for its last token, before any draft.
    decoder = build_decoder(
        TARGET,
        noisy_copy(TARGET, NOISE),
        verification="coupled",
        lookahead="clip",
        block_size=1,
        num_kv_blocks=80,
    )
    pool, short = decoder.engine.pool, []

    def deep(state: RoundState) -> Ints:
        short.append(int(pool.missing(state.slots, state.positions).sum()) > pool.num_free)
        return np.full(state.num_running, 8)

    scheduler = Watched(deep)
    generate(decoder, scheduler)
    preempted = [
        bool(outcome.preempted.any()) or outcome.num_preempted_prefills > 0
        for outcome in scheduler.outcomes
    ]
    assert preempted == short
    assert any(short)


class Whimsical(Watched):
    """Stops drafting and trims at random; lawful, since nothing here is rejection-sampled."""

    def __init__(self, seed: int) -> None:
        super().__init__(ragged(seed))
        self.rng = np.random.default_rng(seed + 1)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools | Ints:
        return self.rng.random(len(signals.rows)) < 0.8

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        return self.rng.integers(0, signals.num_proposed + 1)


class WhimsicalDepths(Whimsical):
    """The same in whole numbers, which go up again from one pass to the next."""

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
        return self.rng.integers(0, state.max_num_speculative_tokens + 2, len(signals.rows))


@pytest.mark.parametrize("make", [Whimsical, WhimsicalDepths])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stopping_early_and_trimming_leave_the_text(
    drafter: str, make: Callable[[int], Whimsical]
) -> None:
    scheduler = make(5)
    batch = generate(tight_decoder(drafter), scheduler)
    assert token_ids(batch) == reference()
    trimmed = sum(int((o.num_proposed - o.num_drafted).sum()) for o in scheduler.outcomes)
    stopped = sum(
        int((np.minimum(o.depths, s.max_depths) - o.num_proposed)[~o.preempted].sum())
        for s, o in zip(scheduler.states, scheduler.outcomes, strict=True)
    )
    assert trimmed > 0
    assert (stopped > 0) == (drafter != "prompt-lookup")  # only passes can be stopped


def test_without_a_drafter_and_at_k_0_it_is_plain_decoding() -> None:
    for drafter, top in (("none", 8), ("prompt-lookup", 0), ("none", 0)):
        decoder = build_decoder(
            TARGET, drafter, verification="coupled", max_num_speculative_tokens=top
        )
        batch = decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING)
        assert token_ids(batch) == reference()
        assert batch.metrics.acceptance_length == 1.0


def test_a_draft_model_at_k_0_never_runs() -> None:
    draft = noisy_copy(TARGET, NOISE)
    decoder = build_decoder(TARGET, draft, verification="coupled", max_num_speculative_tokens=0)
    batch = decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING)
    assert token_ids(batch) == reference()
    assert batch.metrics.num_draft_passes == 0


def test_the_order_of_the_prompts_changes_nothing() -> None:
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    batch = tight_decoder("draft-model").generate(
        [PROMPTS[i] for i in order],
        NUM_TOKENS,
        [SAMPLING[i] for i in order],
        depth_scheduler=Watched(ragged(3)),
    )
    assert token_ids(batch) == [reference()[i] for i in order]


def test_a_request_alone_has_the_text_that_it_has_in_a_batch() -> None:
    decoder = tight_decoder("draft-model")
    for place in (1, 2, 5):
        alone = decoder.generate([PROMPTS[place]], NUM_TOKENS, SAMPLING[place], depth_scheduler=5)
        assert token_ids(alone) == [reference()[place]]


def test_seeds_belong_to_requests_and_not_to_their_numbers() -> None:
    """The same engine has served others before; submission in another order changes no text."""
    texts = []
    for order in ((1, 2, 5), (5, 2, 1)):
        engine = tight_decoder("prompt-lookup").engine
        engine.set_scheduler(Watched(2))
        for place in order:
            sampling = replace(SAMPLING[place], max_new_tokens=NUM_TOKENS)
            engine.add_request(PROMPTS[place], sampling, request_id=str(place))
        while engine.has_work:
            engine.step()
        texts.append({result.request_id: result.token_ids for result in engine.take_finished()})
    assert texts[0] == texts[1]
    assert texts[0] == {str(place): reference()[place] for place in (1, 2, 5)}


def test_rejection_at_temperature_0_is_greedy_in_a_mixed_batch() -> None:
    for drafter in ("prompt-lookup", noisy_copy(TARGET, NOISE)):
        decoder = build_decoder(TARGET, drafter, verification="rejection", num_kv_blocks=20)
        batch = decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING, depth_scheduler=Watched(ragged(1)))
        for result, one, wanted in zip(batch, SAMPLING, reference(), strict=True):
            if one.temperature == 0:
                assert result.token_ids == wanted


def test_rejection_repeats_itself_with_the_same_seeds_and_depths() -> None:
    texts = []
    for _ in range(2):
        decoder = build_decoder(TARGET, noisy_copy(TARGET, NOISE), num_kv_blocks=20)
        texts.append(token_ids(decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING, depth_scheduler=3)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_draft_that_is_the_target_is_always_believed(verification: str) -> None:
    """Both laws go through the same temperature, top-k and top-p."""
    decoder = build_decoder(TARGET, TARGET, verification=verification)
    batch = decoder.generate(PROMPTS, NUM_TOKENS, SAMPLING, depth_scheduler=Watched(ragged(0)))
    assert batch.metrics.acceptance_rate == 1.0
