"""The draft model's cache is right after any sequence of depths; what it costs is counted."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompt_lookup import LookupConfig
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Ints, RoundState
from tests.decoder.tiny import (
    VOCAB,
    Watched,
    build_decoder,
    greedy_text,
    next_logits,
    noisy_copy,
    ragged,
    repetitive_prompts,
    tiny_llama,
)

TARGET = tiny_llama()
DRAFT = noisy_copy(TARGET, 0.05)
PROMPTS = repetitive_prompts()[1:5]


@cache
def small_decoder(budget: int) -> SpeculativeDecoder:
    return build_decoder(TARGET, DRAFT, max_num_batched_tokens=budget, num_kv_blocks=60)


def draft_signals_after(tokens: list[int]) -> tuple[float, float, float]:
    """Top-1 probability, entropy and margin of the draft's law, by a full forward."""
    law = torch.softmax(next_logits(DRAFT, tokens), 0)
    first, second = law.topk(2).values.tolist()
    entropy = float(torch.distributions.Categorical(law).entropy())
    return first, entropy, first - second


@settings(max_examples=10)
@given(
    budget=st.sampled_from([5, 64]),
    depths=st.lists(st.lists(st.integers(0, 8), min_size=4, max_size=4), min_size=3, max_size=8),
)
def test_after_any_depths_the_draft_sees_exactly_the_committed_text(
    budget: int, depths: list[list[int]]
) -> None:
    """Each law that it shows equals that of a full forward over the text that was committed.

    Depth 0 leaves it behind, and rejected drafts leave wrong keys in its cache; both are made good.
    """
    engine = small_decoder(budget).engine
    engine.abort_all()
    engine.take_finished()
    plan = iter(depths)

    def decide(state: RoundState) -> Ints:
        row = next(plan, [1] * 4)
        return np.array([row[slot] for slot in state.slots])

    scheduler = Watched(decide)
    engine.set_scheduler(scheduler)
    first_number = engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=16), "0").number
    for place, prompt in enumerate(PROMPTS[1:], 1):
        engine.add_request(prompt, SamplingParams(max_new_tokens=16), str(place))
    while engine.has_work:
        engine.step()
    texts = {int(r.request_id): r.prompt_token_ids + r.token_ids for r in engine.take_finished()}
    checked = 0
    for state, outcome in zip(scheduler.states, scheduler.outcomes, strict=True):
        for row in range(state.num_running):
            text = texts[int(state.request_ids[row]) - first_number]
            for step in np.flatnonzero(~np.isnan(outcome.draft_top1[row])):
                if checked > 40:
                    return
                known = text[: state.positions[row] + step]
                top1, entropy, margin = draft_signals_after(known)
                assert outcome.draft_top1[row, step] == pytest.approx(top1, abs=1e-8)
                assert outcome.draft_entropy[row, step] == pytest.approx(entropy, abs=1e-8)
                assert outcome.draft_margin[row, step] == pytest.approx(margin, abs=1e-8)
                checked += 1
    assert checked > 0


def test_the_state_shows_last_rounds_draft_signals() -> None:
    scheduler = Watched(ragged(1))
    build_decoder(TARGET, DRAFT).generate(PROMPTS, 20, depth_scheduler=scheduler)
    latest: dict[int, np.ndarray] = {}
    for state, outcome in zip(scheduler.states, scheduler.outcomes, strict=True):
        for row, number in enumerate(state.request_ids.tolist()):
            expected = latest.get(number, np.full(8, np.nan))
            np.testing.assert_array_equal(state.draft_top1[row], expected)
            if outcome.num_drafted[row]:
                latest[number] = outcome.draft_top1[row]


class TestCost:
    def rounds(self, depths: list[int], budget: int = 64) -> tuple[Watched, list[int]]:
        plan = iter(depths)
        scheduler = Watched(lambda state: np.array([next(plan, 0)]))
        decoder = build_decoder(TARGET, DRAFT, max_num_batched_tokens=budget)
        prompt = PROMPTS[2]  # 17 tokens
        decoder.generate([prompt], 20, depth_scheduler=scheduler)
        return scheduler, prompt

    def test_what_it_sat_out_is_caught_up_and_counted_when_it_drafts(self) -> None:
        scheduler, prompt = self.rounds([0, 0, 0, 2, 0, 1])
        lag = [int(state.draft_lag[0]) for state in scheduler.states[:5]]
        caught_up = [outcome.num_catch_up_tokens for outcome in scheduler.outcomes[:6]]
        passes = [outcome.draft_pass_sequences for outcome in scheduler.outcomes[:6]]
        # All of the prompt but the last token, which is the first pass's own.
        assert lag[0] == len(prompt) - 1
        assert lag[1:4] == [lag[0] + 1, lag[0] + 2, lag[0] + 3]
        assert caught_up[:4] == [0, 0, 0, lag[3]]
        assert passes[:4] == [(), (), (), (1, 1)]
        # At depth 2 it has fed itself the first draft: one more behind only if both were accepted.
        assert lag[4] == int(scheduler.outcomes[3].num_accepted[0] == 2)
        assert caught_up[5] == lag[4] + 1
        assert scheduler.outcomes[5].num_catch_up_tokens == scheduler.states[5].draft_lag[0]

    def test_catch_up_keeps_to_the_token_budget(self) -> None:
        scheduler, prompt = self.rounds([0] * 4 + [1], budget=5)
        outcome = next(o for o in scheduler.outcomes if o.num_drafted[0])
        behind = outcome.num_catch_up_tokens
        assert behind >= len(prompt) - 1
        assert len(outcome.draft_pass_sequences) == math.ceil((behind + 1) / 5)

    def test_passes_shrink_as_sequences_have_their_tokens(self) -> None:
        scheduler = Watched(lambda state: np.array([3, 0, 1, 3])[: state.num_running])
        build_decoder(TARGET, DRAFT, max_num_batched_tokens=200).generate(
            PROMPTS, 12, depth_scheduler=scheduler
        )
        assert scheduler.outcomes[0].draft_pass_sequences == (3, 2, 2)

    def test_a_sequence_that_keep_drafting_stops_is_in_no_later_pass(self) -> None:
        class FirstOnly(Watched):
            def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
                return (signals.rows == 0) | (signals.num_drafted < 1)

        scheduler = FirstOnly(4)
        batch = build_decoder(TARGET, DRAFT, max_num_batched_tokens=200).generate(
            PROMPTS, 12, depth_scheduler=scheduler
        )
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 12) for p in PROMPTS]
        outcome = scheduler.outcomes[0]
        # All learn their first two laws; only the first goes on to draw more than one token.
        assert outcome.draft_pass_sequences == (4, 4, 1, 1)
        assert outcome.num_drafted.tolist() == [4, 1, 1, 1]
        assert outcome.num_proposed.tolist() == [4, 1, 1, 1]

    def test_a_sequence_draws_up_to_the_depth_that_keep_drafting_says(self) -> None:
        class Says(Watched):
            """The last one goes on: what it said before the last answer does not bind it."""

            answers = ([2, 1, 0, 2], [2, 4], [4])

            def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
                if len(self.states) == 1 and signals.num_drafted < 3:
                    return np.array(self.answers[signals.num_drafted])
                return np.full(len(signals.rows), 99)

        scheduler = Says(4)
        batch = build_decoder(TARGET, DRAFT, max_num_batched_tokens=200).generate(
            PROMPTS, 12, depth_scheduler=scheduler
        )
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 12) for p in PROMPTS]
        outcome = scheduler.outcomes[0]
        # The second draws what the first pass showed, and no pass is run for it any more.
        assert outcome.draft_pass_sequences == (4, 2, 1, 1)
        assert outcome.num_drafted.tolist() == [2, 1, 0, 4]
        assert max(int(later.num_drafted.max()) for later in scheduler.outcomes) == 4


class TestVocabularies:
    def test_a_draft_with_fewer_rows_than_the_target_pads_drafts(self) -> None:
        """Both are padded beyond 97 tokens, differently; see test_speculative_decoder too."""
        from tests.decoder.tiny import char_tokenizer

        target = tiny_llama(vocab_size=128)
        draft = tiny_llama(vocab_size=104)
        for mine, other in zip(draft.parameters(), target.parameters(), strict=True):
            mine.data.copy_(other.data[: len(mine)])
        tokenizer = char_tokenizer()
        decoder = build_decoder(target, draft, tokenizer=tokenizer, verification="coupled")
        batch = decoder.generate(PROMPTS, 16, depth_scheduler=4)
        assert batch.metrics.acceptance_rate == 1.0  # the same 97 rows
        drawn = decoder.generate(
            PROMPTS, 16, SamplingParams(temperature=2.0), depth_scheduler=Watched(ragged(0))
        )
        tokens = {token for result in drawn for token in result.token_ids}
        assert max(tokens) < VOCAB
        assert drawn.metrics.acceptance_rate == 1.0


class TestPromptLookup:
    def test_lookup_settings_reach_the_search(self) -> None:
        scheduler = Watched(8)
        build_decoder(TARGET, lookup=LookupConfig(max_length=2, min_ngram=2)).generate(
            PROMPTS, 12, depth_scheduler=scheduler
        )
        lengths = np.concatenate([state.proposal_length for state in scheduler.states])
        matches = np.concatenate([state.match_length for state in scheduler.states])
        assert set(lengths.tolist()) == {0, 2}
        assert ((matches >= 2) == (lengths > 0)).all()

    def test_it_costs_no_pass_and_has_no_signals(self) -> None:
        scheduler = Watched(8)
        build_decoder(TARGET).generate(PROMPTS, 12, depth_scheduler=scheduler)
        for outcome in scheduler.outcomes:
            assert outcome.draft_pass_sequences == ()
            assert np.isnan(outcome.draft_top1).all()
        assert sum(int(outcome.num_drafted.sum()) for outcome in scheduler.outcomes) > 0
