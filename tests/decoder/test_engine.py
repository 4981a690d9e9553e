"""Continuous batching: ends, stop strings, streaming, aborts, memory, and what a state shows."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.engine import Engine
from specdepth.decoder.request import GenerationResult
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import (
    Watched,
    build_decoder,
    char_tokenizer,
    greedy_text,
    noisy_copy,
    ragged,
    repetitive_prompts,
    tiny_llama,
)

TARGET = tiny_llama()
DRAFT = noisy_copy(TARGET, 0.05)
PROMPTS = repetitive_prompts()
NUM_TOKENS = 24


@cache
def reference() -> list[list[int]]:
    return [greedy_text(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]


def model_that_ends(*ends: int) -> PreTrainedModel:
    model = copy.deepcopy(TARGET)
    model.generation_config.eos_token_id = list(ends)
    return model


def drain(engine: Engine) -> dict[str, GenerationResult]:
    while engine.has_work:
        engine.step()
        engine.pool.check()
    return {result.request_id: result for result in engine.take_finished()}


class TestEnds:
    ENDS = (reference()[0][9], reference()[2][4], reference()[5][17])

    @pytest.mark.parametrize("draft", ["prompt-lookup", DRAFT], ids=["lookup", "model"])
    def test_text_ends_with_the_first_of_several_end_tokens(
        self, draft: PreTrainedModel | str
    ) -> None:
        target = model_that_ends(*self.ENDS)
        decoder = build_decoder(target, draft)
        for depth in (0, 3, 8):
            batch = decoder.generate(PROMPTS, NUM_TOKENS, depth_scheduler=depth)
            for result, prompt in zip(batch, PROMPTS, strict=True):
                assert result.token_ids == greedy_text(target, prompt, NUM_TOKENS)
                ended = result.token_ids[-1] in self.ENDS
                assert result.finish_reason == ("stop" if ended else "length")
                assert not set(result.token_ids[:-1]) & set(self.ENDS)
            assert {result.finish_reason for result in batch} == {"stop", "length"}

    def test_an_accepted_draft_past_an_end_is_not_committed(self) -> None:
        target = model_that_ends(*self.ENDS)
        decoder = build_decoder(target, TARGET)  # the draft is the target: all is accepted
        scheduler = Watched(8)
        batch = decoder.generate(PROMPTS, NUM_TOKENS, depth_scheduler=scheduler)
        assert [r.token_ids for r in batch] == [greedy_text(target, p, NUM_TOKENS) for p in PROMPTS]
        committed = sum(int(outcome.num_committed.sum()) for outcome in scheduler.outcomes)
        assert committed == sum(len(result.token_ids) for result in batch)
        for outcome in scheduler.outcomes:
            assert (outcome.num_accepted <= outcome.num_committed).all()

    def test_ignore_eos_goes_on_to_max_new_tokens(self) -> None:
        decoder = build_decoder(model_that_ends(*self.ENDS))
        batch = decoder.generate(PROMPTS, NUM_TOKENS, SamplingParams(ignore_eos=True))
        assert [result.token_ids for result in batch] == reference()
        assert {result.finish_reason for result in batch} == {"length"}

    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_no_more_than_max_new_tokens_however_deep(self, count: int) -> None:
        batch = build_decoder(TARGET, TARGET).generate(PROMPTS, count, depth_scheduler=8)
        assert [result.token_ids for result in batch] == [text[:count] for text in reference()]
        assert {result.finish_reason for result in batch} == {"length"}

    def test_an_end_token_in_the_prompt_ends_nothing(self) -> None:
        end = next(t for t in range(97) if t not in greedy_text(TARGET, [5, 6], 8))
        decoder = build_decoder(model_that_ends(end))
        prompt = [end, 5, end]
        result = decoder.generate([prompt], 8)[0]
        assert result.token_ids == greedy_text(model_that_ends(end), prompt, 8)


class TestStopStrings:
    TOKENIZER = char_tokenizer()

    def decoder(self, **options: object) -> SpeculativeDecoder:
        return build_decoder(TARGET, DRAFT, tokenizer=self.TOKENIZER, **options)

    def text(self, place: int) -> str:
        return str(self.TOKENIZER.decode(reference()[place], skip_special_tokens=True))

    @pytest.mark.parametrize("depth", [0, 4, 8])
    def test_text_stops_before_a_stop_string_that_spans_rounds(self, depth: int) -> None:
        stops = [self.text(place)[5:9] for place in range(len(PROMPTS))]
        sampling = [SamplingParams(stop=("no such text", stop)) for stop in stops]
        # A tiny pool: the text so far is watched across preemptions too.
        decoder = self.decoder(num_kv_blocks=20)
        batch = decoder.generate(PROMPTS, NUM_TOKENS, sampling, depth_scheduler=depth)
        assert batch.metrics.num_preemptions > 0
        for place, (result, stop) in enumerate(zip(batch, stops, strict=True)):
            cut = self.text(place).index(stop)
            assert result.text == self.text(place)[:cut]
            assert result.finish_reason == "stop"
            # Tokens up to the one that completed the stop string.
            assert result.token_ids == reference()[place][: len(result.token_ids)]
            decoded = self.TOKENIZER.decode(result.token_ids, skip_special_tokens=True)
            assert decoded == self.text(place)[: cut + len(stop)]

    def test_text_without_the_stop_string_is_whole(self) -> None:
        never = SamplingParams(stop=("no such text",))
        batch = self.decoder().generate(PROMPTS, NUM_TOKENS, never)
        assert [result.text for result in batch] == [self.text(i) for i in range(len(PROMPTS))]

    def test_the_end_token_is_in_the_tokens_and_not_in_the_text(self) -> None:
        end = reference()[0][9]
        decoder = build_decoder(model_that_ends(end), tokenizer=self.TOKENIZER)
        result = decoder.generate([PROMPTS[0]], NUM_TOKENS)[0]
        assert result.token_ids[-1] == end
        assert result.text == self.TOKENIZER.decode(result.token_ids[:-1], skip_special_tokens=True)

    def test_prompts_may_be_texts(self) -> None:
        decoder = self.decoder()
        batch = decoder.generate(["to be or not to be", "x"], 6)
        for result, prompt in zip(batch, ("to be or not to be", "x"), strict=True):
            tokens = [ord(char) - 32 for char in prompt]
            assert result.prompt_token_ids == tokens
            assert result.token_ids == greedy_text(TARGET, tokens, 6)
        assert decoder.generate("x", 6)[0].token_ids == batch[1].token_ids


class TestServing:
    def test_streamed_tokens_add_up_to_the_results(self) -> None:
        decoder = build_decoder(TARGET, DRAFT, num_kv_blocks=20)
        streamed: dict[str, list[int]] = {}
        batch = decoder.generate(
            PROMPTS,
            NUM_TOKENS,
            depth_scheduler=Watched(ragged(0)),
            on_token=lambda name, tokens: streamed.setdefault(name, []).extend(tokens),
        )
        assert batch.metrics.num_preemptions > 0
        assert streamed == {str(i): text for i, text in enumerate(reference())}

    def test_deltas_come_each_round_and_name_the_finish(self) -> None:
        engine = build_decoder(TARGET, DRAFT).engine
        engine.set_scheduler(Watched(4))
        engine.collect_deltas = True
        engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=9))
        rounds = []
        while engine.has_work:
            engine.step()
            (delta,) = engine.take_deltas()
            rounds.append(delta)
        assert [t for delta in rounds for t in delta.token_ids] == reference()[1][:9]
        assert [delta.finish_reason for delta in rounds] == [None] * (len(rounds) - 1) + ["length"]
        assert engine.take_deltas() == []

    def test_requests_may_join_at_any_time(self) -> None:
        engine = build_decoder(TARGET, DRAFT, num_kv_blocks=20).engine
        engine.set_scheduler(Watched(ragged(2)))
        results: dict[str, GenerationResult] = {}
        for place, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS), str(place))
            engine.step()
            engine.step()
            results |= {result.request_id: result for result in engine.take_finished()}
        results |= drain(engine)
        assert [results[str(i)].token_ids for i in range(len(PROMPTS))] == reference()

    def test_no_more_than_max_num_seqs_run_and_the_first_come_first(self) -> None:
        decoder = build_decoder(TARGET, max_num_seqs=3)
        scheduler = Watched(0)
        decoder.generate(PROMPTS, 6, depth_scheduler=scheduler)
        assert max(state.num_running for state in scheduler.states) == 3
        firsts: dict[int, int] = {}
        for state in scheduler.states:
            for number in state.request_ids.tolist():
                firsts.setdefault(number, state.round_index)
        assert list(firsts) == sorted(firsts)

    @pytest.mark.parametrize("blocks", [20, 200])
    def test_an_abort_hands_back_what_there_is_and_leaves_the_others(self, blocks: int) -> None:
        engine = build_decoder(TARGET, DRAFT, num_kv_blocks=blocks).engine
        engine.set_scheduler(Watched(2))
        for place, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS), str(place))
        for _ in range(4):
            engine.step()
        assert engine.abort("0")  # running
        assert engine.abort("7")  # waiting
        assert not engine.abort("0")
        assert not engine.abort("nobody")
        results = drain(engine)
        for place, text in enumerate(reference()):
            got = results[str(place)]
            if place in (0, 7):
                assert got.finish_reason == "abort"
                assert got.token_ids == text[: len(got.token_ids)]
                assert len(got.token_ids) < NUM_TOKENS
            else:
                assert got.token_ids == text
        assert len(results["0"].token_ids) > 0
        assert results["7"].token_ids == []
        assert np.isnan(results["7"].metrics.first_token_s)

    def test_a_stream_hears_of_an_abort(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.set_scheduler(Watched(0))
        engine.collect_deltas = True
        for name in ("a", "b"):
            engine.add_request(PROMPTS[1], SamplingParams(), name)
        engine.step()
        assert {delta.finish_reason for delta in engine.take_deltas()} == {None}
        engine.abort("a")
        engine.abort_all()
        deltas = [(d.request_id, d.token_ids, d.finish_reason) for d in engine.take_deltas()]
        assert deltas == [("a", [], "abort"), ("b", [], "abort")]

    def test_an_abort_within_a_round_waits_for_its_end(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.set_scheduler(Watched(0))
        engine.add_request(PROMPTS[1], SamplingParams(), "a")
        engine.step()
        assert engine.begin_round() is not None
        assert engine.abort("a")
        assert engine.num_running == 1
        engine.finish_round(np.zeros(1, np.int64))
        assert engine.num_running == 0
        (result,) = engine.take_finished()
        assert result.token_ids == reference()[1][:2]

    def test_an_abort_within_a_round_that_is_cancelled_still_happens(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.add_request(PROMPTS[1], SamplingParams(), "a")
        engine.begin_round()
        engine.abort("a")
        engine.cancel_round()
        assert not engine.has_work
        assert [result.finish_reason for result in engine.take_finished()] == ["abort"]

    def test_a_cancelled_round_leaves_no_trace(self) -> None:
        engine = build_decoder(TARGET, DRAFT, num_kv_blocks=30).engine
        engine.set_scheduler(Watched(3))
        for place, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS), str(place))
        while engine.has_work:
            engine.step()
            if engine.begin_round() is not None:
                free = engine.pool.num_free
                engine.cancel_round()
                assert engine.pool.num_free == free
        results = {result.request_id: result for result in engine.take_finished()}
        assert [results[str(i)].token_ids for i in range(len(PROMPTS))] == reference()

    def test_rounds_must_be_begun_and_finished_in_turn(self) -> None:
        engine = build_decoder(TARGET).engine
        with pytest.raises(RuntimeError, match="needs a begin_round"):
            engine.finish_round(np.zeros(0, np.int64))
        assert engine.begin_round() is None
        engine.add_request([1, 2], SamplingParams())
        engine.begin_round()
        with pytest.raises(RuntimeError, match="begin_round was called twice"):
            engine.begin_round()

    def test_generate_is_refused_while_requests_are_under_way(self) -> None:
        decoder = build_decoder(TARGET)
        decoder.engine.add_request([1, 2], SamplingParams())
        with pytest.raises(RuntimeError, match="requests of its own"):
            decoder.generate([[1]], 2)
        decoder.engine.abort_all()
        assert len(decoder.generate([[1]], 2)[0].token_ids) == 2

    def test_generate_of_nothing_is_nothing(self) -> None:
        assert len(build_decoder(TARGET).generate([], 4)) == 0

    def test_metrics_of_a_request_count_what_its_rounds_did(self) -> None:
        scheduler = Watched(ragged(4))
        batch = build_decoder(TARGET, DRAFT, num_kv_blocks=20).generate(
            PROMPTS, NUM_TOKENS, depth_scheduler=scheduler
        )
        numbers = sorted({n for s in scheduler.states for n in s.request_ids.tolist()})
        for number, result in zip(numbers, batch, strict=True):
            rows = [
                (outcome, row)
                for outcome in scheduler.outcomes
                for row in np.flatnonzero(outcome.request_ids == number)
            ]
            lived = [(outcome, row) for outcome, row in rows if not outcome.preempted[row]]
            metrics = result.metrics
            assert metrics.num_rounds == len(lived)
            assert metrics.num_generated_tokens == sum(o.num_committed[r] for o, r in lived)
            assert metrics.num_drafted_tokens == sum(o.num_drafted[r] for o, r in lived)
            assert metrics.num_accepted_tokens == sum(o.num_accepted[r] for o, r in lived)
            assert metrics.num_preemptions >= len(rows) - len(lived)
        wanted = sum(result.metrics.num_preemptions for result in batch)
        assert batch.metrics.num_preemptions == wanted > 0


class TestState:
    def test_it_shows_the_sequences_as_they_are(self) -> None:
        decoder = build_decoder(TARGET, DRAFT, num_kv_blocks=20, max_num_batched_tokens=12)
        engine, scheduler = decoder.engine, Watched(ragged(6))
        engine.set_scheduler(scheduler)
        lengths = {}
        for prompt in PROMPTS:
            request = engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS))
            lengths[request.number] = len(prompt)
        generated = dict.fromkeys(lengths, 0)
        drafted, accepted = dict(generated), dict(generated)
        alone = 0  # rounds without prompts
        while engine.has_work:
            seen = len(scheduler.states)
            outcome = engine.step()
            if len(scheduler.states) == seen:
                continue
            state = scheduler.states[-1]
            assert outcome is not None
            for row, number in enumerate(state.request_ids.tolist()):
                assert state.num_generated[row] == generated[number]
                assert state.positions[row] == lengths[number] + generated[number]
                assert state.num_remaining[row] == NUM_TOKENS - generated[number]
                assert state.max_depths[row] == min(8, state.num_remaining[row] - 1)
                assert state.num_drafted_tokens[row] == drafted[number]
                assert state.num_accepted_tokens[row] == accepted[number]
                generated[number] += int(outcome.num_committed[row])
                drafted[number] += int(outcome.num_drafted[row])
                accepted[number] += int(outcome.num_accepted[row])
            assert state.num_blocks == 20
            assert state.kv_used_fraction == pytest.approx(1 - state.num_free_blocks / 20)
            extra = int((outcome.num_drafted + 1)[~outcome.preempted].sum())
            assert outcome.num_pass_tokens == extra + outcome.num_prefill_tokens
            contexts = int((state.positions + outcome.num_drafted).sum())
            if state.num_prefill_tokens == 0 and not outcome.preempted.any():
                assert state.num_context_tokens == int(state.positions.sum())
                assert outcome.num_context_tokens == contexts
                alone += 1
        assert alone > 5

    def test_prices_are_those_of_sampling_where_most_sequences_sample(self) -> None:
        cost = replace(CostModel.linear(), rejection_row_s=1e-3)
        decoder = build_decoder(TARGET, cost=cost)
        for temperatures, expected in (
            ((0.0, 0.0, 0.7), cost),
            ((0.0, 0.7), cost),
            ((0.7, 0.7, 0.0), cost.sampled("rejection")),
        ):
            scheduler = Watched(2)
            sampling = [SamplingParams(temperature=t, max_new_tokens=6) for t in temperatures]
            prompts = PROMPTS[: len(sampling)]
            decoder.generate(prompts, sampling=sampling, depth_scheduler=scheduler)
            full = [s for s in scheduler.states if s.num_running == len(sampling)]
            assert full
            assert all(state.cost == expected for state in full)
        decoder.engine.cost = CostModel.linear(base_s=1.0)  # has no price of sampling
        assert decoder.engine._prices(np.zeros(0, np.int64)) is decoder.engine.cost

    def test_draft_signals_end_with_the_first_rejected_token(self) -> None:
        scheduler = Watched(6)
        build_decoder(TARGET, DRAFT).generate(PROMPTS, NUM_TOKENS, depth_scheduler=scheduler)
        full = 0
        for outcome in scheduler.outcomes:
            known = ~np.isnan(outcome.draft_top1)
            shown = np.minimum(outcome.num_accepted + 1, outcome.num_drafted)
            cut = outcome.finished  # an end inside the accepted run hides what follows it
            assert (known.sum(1) == shown)[~cut].all()
            assert (known == (np.arange(8) < known.sum(1)[:, None])).all()
            full += int((outcome.num_accepted == outcome.num_drafted).sum())
        assert full > 0

    def test_scheduling_time_and_the_rest_add_up_to_the_round(self) -> None:
        scheduler = Watched(2)
        build_decoder(TARGET).generate(PROMPTS[:3], 6, depth_scheduler=scheduler)
        for outcome in scheduler.outcomes:
            parts = (outcome.draft_s, outcome.verify_s, outcome.schedule_s, outcome.other_s)
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(outcome.elapsed_s)


class TestMemory:
    @settings(max_examples=25)
    @given(data=st.data())
    def test_the_pool_is_never_overdrawn_and_no_block_is_lost(self, data: st.DataObject) -> None:
        """Random loads, arrivals, aborts, depths, pool sizes and both ways to run short."""
        decoder = small_decoder(
            data.draw(st.sampled_from(["prompt-lookup", "draft-model"])),
            data.draw(st.integers(6, 14), "blocks"),
            data.draw(st.sampled_from(["reserve", "clip"])),
        )
        engine, pool = decoder.engine, decoder.engine.pool
        engine.abort_all()  # what a failed example left
        engine.take_finished()
        engine.set_scheduler(Watched(ragged(data.draw(st.integers(0, 99), "depths"))))
        loads = st.lists(
            st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3)),
            min_size=1,
            max_size=8,
        )
        wanted = set()
        for place, (length, count, rounds) in enumerate(data.draw(loads, "loads")):
            engine.add_request(
                list(range(length)), SamplingParams(max_new_tokens=count), str(place)
            )
            wanted.add(str(place))
            for _ in range(rounds):
                self.checked_step(engine)
            if data.draw(st.booleans(), "abort"):
                engine.abort(data.draw(st.sampled_from(sorted(wanted)), "victim"))
                pool.check()
        while engine.has_work:
            self.checked_step(engine)
        assert {result.request_id for result in engine.take_finished()} == wanted
        assert pool.num_free == pool.num_blocks

    @staticmethod
    def checked_step(engine: Engine) -> None:
        engine.step()
        pool, seqs = engine.pool, engine.seqs
        pool.check()
        assert 0 <= pool.num_free <= pool.num_blocks
        held = pool.num_allocated[seqs.active]
        # Drafts that fell have given their blocks back; the last token's own may come next round.
        assert (held <= pool.blocks_for(seqs.num_tokens[seqs.active])).all()
        assert (held >= pool.blocks_for(seqs.num_tokens[seqs.active] - 1)).all()
        assert pool.num_allocated[~seqs.active].sum() == 0
        assert (seqs.num_computed < seqs.num_tokens)[seqs.active].all()
        assert (seqs.draft_computed < seqs.num_tokens)[seqs.active].all()

    def test_200_requests_through_a_pool_for_3_all_finish_with_their_text(self) -> None:
        rng = np.random.default_rng(0)
        prompts = [np.resize(rng.integers(0, 97, 2), 3).tolist() for _ in range(10)]
        texts = [greedy_text(TARGET, prompt, 9) for prompt in prompts]
        # 12 tokens are 3 blocks: three sequences at full length, a few more while they are short.
        decoder = build_decoder(
            TARGET, DRAFT, max_num_seqs=8, num_kv_blocks=3 * 3, max_num_batched_tokens=16
        )
        scheduler = Watched(ragged(0))
        batch = decoder.generate(prompts * 20, 9, depth_scheduler=scheduler)
        assert [result.token_ids for result in batch] == texts * 20
        assert batch.metrics.num_preemptions > 50
        assert max(state.kv_used_fraction for state in scheduler.states) <= 1


@cache
def small_decoder(drafter: str, blocks: int, lookahead: str) -> SpeculativeDecoder:
    return build_decoder(
        TARGET,
        DRAFT if drafter == "draft-model" else drafter,
        num_kv_blocks=blocks,
        lookahead=lookahead,
        max_num_batched_tokens=7,
        max_num_speculative_tokens=5,
    )
