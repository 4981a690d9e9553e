"""Bad input, failures and interrupts: one clear sentence, and an engine that works afterwards."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import specdepth.decoder.engine
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.drafters import PromptLookup, Proposal
from specdepth.decoder.runner import RoundPlan
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.verification import DraftProbs
from specdepth.scheduler.depth import DraftSignals, ProposalSignals
from specdepth.scheduler.state import RoundOutcome, RoundState
from tests.decoder.tiny import (
    VOCAB,
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
NUM_TOKENS = 12
STRIDE = 43
"""Lines between the places at which a call is interrupted; 1 takes a minute and found no more."""


@cache
def reference() -> list[list[int]]:
    return [greedy_text(TARGET, prompt, NUM_TOKENS) for prompt in PROMPTS]


@cache
def decoder(drafter: str = "draft-model") -> SpeculativeDecoder:
    return build_decoder(TARGET, DRAFT if drafter == "draft-model" else drafter, num_kv_blocks=18)


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """A failed test must not fail the next."""
    for drafter in ("draft-model", "prompt-lookup"):
        decoder(drafter).engine.abort_all()
        decoder(drafter).engine.take_finished()


def assert_usable(one: SpeculativeDecoder) -> None:
    """Nothing is left over, and the next call is right."""
    engine = one.engine
    assert not engine.has_work
    engine.pool.check()
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.seqs.active.any()
    batch = one.generate(PROMPTS, NUM_TOKENS, depth_scheduler=3)
    assert [result.token_ids for result in batch] == reference()


class TestRequests:
    @pytest.mark.parametrize(
        ("prompt", "sampling", "message"),
        [
            (
                [],
                SamplingParams(max_new_tokens=4),
                r"The prompt is empty; at least one token is needed\.",
            ),
            ([5, VOCAB], SamplingParams(), r"holds the token id 97, the vocabulary has 0\.\.96\."),
            ([-1], SamplingParams(), r"holds the token id -1"),
            (
                [5] * 60,
                SamplingParams(max_new_tokens=20),
                r"needs 20 KV blocks of 4 tokens, the pool has 18; raise kv_cache_bytes",
            ),
            (
                [5] * 500,
                SamplingParams(max_new_tokens=13),
                r"has 500 tokens and asks for 13 more; the model holds 512 \(max_model_len\)",
            ),
            ([5], SamplingParams(stop=("x",), max_new_tokens=4), r"Stop strings need a tokenizer"),
        ],
        ids=["empty", "vocabulary", "negative", "pool", "model", "stop"],
    )
    def test_a_bad_request_is_refused_and_nothing_is_queued(
        self, prompt: list[int], sampling: SamplingParams, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            decoder().engine.add_request(prompt, sampling)
        with pytest.raises(ValueError, match=message):
            decoder().generate([[1, 2], prompt], None, sampling)
        assert_usable(decoder())

    def test_the_longest_prompt_that_fits_is_taken(self) -> None:
        tight = build_decoder(TARGET, max_model_len=20, num_kv_blocks=5)
        with pytest.raises(ValueError, match="the model holds 20"):
            tight.generate([[5] * 11], 10)
        for depth in (0, 8):
            batch = tight.generate([[5] * 10], 10, depth_scheduler=depth)
            assert batch[0].token_ids == greedy_text(TARGET, [5] * 10, 10)

    def test_texts_without_a_tokenizer_are_refused(self) -> None:
        with pytest.raises(ValueError, match="has no tokenizer, so prompts must be lists of token"):
            decoder().generate(["hello"], 4)
        assert_usable(decoder())

    def test_a_list_of_tokens_instead_of_prompts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="generate takes a list of prompts, also for one"):
            decoder().generate([1, 2, 3], 4)  # type: ignore[list-item]

    def test_as_many_sampling_settings_as_prompts_or_one(self) -> None:
        with pytest.raises(ValueError, match="2 sampling settings for 3 prompts"):
            decoder().generate([[1]] * 3, 4, [SamplingParams()] * 2)

    def test_an_id_in_use_is_refused(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.add_request([1], SamplingParams(), "a")
        with pytest.raises(ValueError, match="id 'a' is still in the engine"):
            engine.add_request([2], SamplingParams(), "a")
        assert engine.num_waiting == 1

    def test_an_id_is_free_again_when_its_request_is_gone(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.set_scheduler(Watched(0))

        def finish() -> None:
            while engine.has_work:
                engine.step()

        for leave in (finish, lambda: engine.abort("a"), engine.abort_all):
            assert not engine.abort("a")
            engine.add_request([1], SamplingParams(max_new_tokens=2), "a")
            engine.step()
            with pytest.raises(ValueError, match="id 'a' is still in the engine"):
                engine.add_request([2], SamplingParams(), "a")
            leave()
            assert not engine.has_work

    def test_sampling_under_greedy_verification_is_refused(self) -> None:
        greedy = build_decoder(TARGET, verification="greedy")
        with pytest.raises(ValueError, match='verification="greedy" samples nothing'):
            greedy.generate([[1]], 4, SamplingParams(temperature=0.5))
        assert greedy.generate([PROMPTS[1]], NUM_TOKENS)[0].token_ids == reference()[1]


class TestSchedulers:
    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda s: np.full(s.num_running, np.nan), "nan.*, expected whole numbers in 0..8"),
            (lambda s: np.full(s.num_running, 1.5), "1.5.*, expected whole numbers"),
            (lambda s: np.full(s.num_running, 9), "a depth of 9, expected whole numbers in 0..8"),
            (lambda s: np.full(s.num_running, -1), "a depth of -1, expected whole numbers in 0..8"),
            (lambda s: np.zeros(s.num_running + 1, int), "one depth for each running sequence"),
            (lambda s: 3, r"shape \(\), expected"),
            (lambda s: None, "Watched.choose returned"),
            (lambda s: ["deep"] * s.num_running, "expected whole numbers"),
        ],
        ids=["nan", "fraction", "deep", "negative", "shape", "scalar", "none", "text"],
    )
    def test_bad_depths_are_refused_and_the_next_round_goes_on(
        self, answer: Callable[[RoundState], Any], message: str
    ) -> None:
        def sometimes(state: RoundState) -> Any:
            return answer(state) if state.round_index == fails_at else np.full(state.num_running, 2)

        engine = decoder().engine
        fails_at = engine.round_index + 3
        engine.set_scheduler(Watched(sometimes))
        for place, prompt in enumerate(PROMPTS[:3]):
            engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS), str(place))
        for _ in range(3):
            engine.step()
        with pytest.raises(ValueError, match=message):
            engine.step()
        engine.pool.check()
        engine.set_scheduler(Watched(2))
        while engine.has_work:
            engine.step()
        results = {result.request_id: result.token_ids for result in engine.take_finished()}
        assert [results[str(place)] for place in range(3)] == reference()[:3]
        with pytest.raises(ValueError, match=message):
            decoder().generate(PROMPTS, 4, depth_scheduler=Watched(answer))
        assert_usable(decoder())

    def test_an_environment_may_finish_a_round_again_after_bad_depths(self) -> None:
        engine = decoder().engine
        engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=2), "a")
        state = engine.begin_round()
        assert state is not None
        with pytest.raises(ValueError, match=r"whole numbers in 0\.\.8"):
            engine.finish_round(np.array([77]))
        engine.finish_round(np.array([1]))
        while engine.has_work:
            engine.begin_round()
            engine.finish_round(np.array([0]))
        assert engine.take_finished()[0].token_ids == reference()[1][:2]

    @pytest.mark.parametrize("scheduler", ["heuristic", object(), np.int64(3)])
    def test_what_is_no_scheduler_is_refused(self, scheduler: Any) -> None:
        with pytest.raises(ValueError, match="is no depth scheduler"):
            decoder().generate(PROMPTS, 4, depth_scheduler=scheduler)
        assert_usable(decoder())

    @pytest.mark.parametrize("depth", [-1, 9])
    def test_a_fixed_depth_outside_the_range_is_refused(self, depth: int) -> None:
        with pytest.raises(ValueError, match=rf"depth of {depth} is outside 0\.\.8"):
            decoder().generate(PROMPTS, 4, depth_scheduler=depth)

    def test_a_step_without_a_scheduler_says_so(self) -> None:
        engine = build_decoder(TARGET).engine
        engine.add_request([1], SamplingParams())
        with pytest.raises(RuntimeError, match="call set_scheduler first"):
            engine.step()
        engine.set_scheduler(Watched(0))
        assert engine.step() is not None

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda n: np.ones(n + 1, np.bool_), r"keep_drafting returned bool of shape"),
            (lambda n: np.ones((n, 1), np.int64), r"keep_drafting returned int64 of shape"),
            (lambda n: np.ones(n), r"keep_drafting returned float64 .* expected bool or whole"),
            (lambda n: np.full(n, -1), r"keep_drafting returned a depth of -1, expected 0 or more"),
            (lambda n: None, r"keep_drafting returned object"),
        ],
        ids=["shape", "depths' shape", "floats", "negative", "none"],
    )
    def test_bad_answers_of_keep_drafting_are_refused(
        self, answer: Callable[[int], Any], message: str
    ) -> None:
        class Stops(Watched):
            def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Any:
                return answer(len(signals.rows))

        with pytest.raises(ValueError, match=message):
            decoder().generate(PROMPTS, NUM_TOKENS, depth_scheduler=Stops(3))
        assert_usable(decoder())

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (lambda n: np.zeros(len(n) + 1, np.int64), r"trim returned int64 of shape"),
            (lambda n: n * np.nan, r"trim returned float64"),
            (lambda n: None, r"trim returned object"),
        ],
        ids=["shape", "nan", "none"],
    )
    def test_bad_answers_of_trim_are_refused(
        self, answer: Callable[[Any], Any], message: str
    ) -> None:
        class Trims(Watched):
            def trim(self, state: RoundState, signals: ProposalSignals) -> Any:
                return answer(signals.num_proposed)

        with pytest.raises(ValueError, match=message):
            decoder().generate(PROMPTS, NUM_TOKENS, depth_scheduler=Trims(3))
        assert_usable(decoder())

    @pytest.mark.parametrize("method", ["choose", "observe", "keep_drafting"])
    def test_an_error_in_a_scheduler_comes_through_and_leaves_no_trace(self, method: str) -> None:
        class Fails(Watched):
            def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Any:
                return np.ones(len(signals.rows), np.bool_)

        scheduler, calls = Fails(3), itertools.count()
        working = getattr(scheduler, method)

        def fail_later(*args: Any) -> Any:
            if next(calls) == 5:
                raise ZeroDivisionError("a bug in a policy")
            return working(*args)

        setattr(scheduler, method, fail_later)
        with pytest.raises(ZeroDivisionError, match="a bug in a policy"):
            decoder().generate(PROMPTS, NUM_TOKENS, depth_scheduler=scheduler)
        assert_usable(decoder())

    def test_an_interrupted_stream_does_not_leak_into_the_next_call(self) -> None:
        class Fails(Watched):
            def observe(self, outcome: RoundOutcome) -> None:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            decoder().generate(PROMPTS, 4, depth_scheduler=Fails(0), on_token=lambda *_: None)
        streamed: list[int] = []
        batch = decoder().generate(
            [PROMPTS[1]], 4, on_token=lambda _, tokens: streamed.extend(tokens)
        )
        assert streamed == batch[0].token_ids
        assert_usable(decoder())


class TestFailures:
    @pytest.mark.parametrize(("model", "period"), [("target", 2), ("target", 3), ("draft", 3)])
    def test_a_failed_pass_leaves_the_round_to_be_done_again(
        self, monkeypatch: pytest.MonkeyPatch, model: str, period: int
    ) -> None:
        engine, packed = decoder().engine, getattr(decoder(), model)
        forward, calls, failures = packed.forward, itertools.count(1), 0

        def flaky(*args: Any) -> torch.Tensor:
            if next(calls) % period == 0:
                raise RuntimeError("the device fell over")
            return forward(*args)

        monkeypatch.setattr(packed, "forward", flaky)
        engine.set_scheduler(Watched(ragged(0)))
        for place, prompt in enumerate(PROMPTS[:5]):
            engine.add_request(prompt, SamplingParams(max_new_tokens=NUM_TOKENS), str(place))
        while engine.has_work:
            try:
                engine.step()
            except RuntimeError as error:
                assert str(error) == "the device fell over"  # noqa: PT017
                failures += 1
            engine.pool.check()
            active = engine.seqs.active
            held = engine.pool.num_allocated[active]
            assert (held <= engine.pool.blocks_for(engine.seqs.num_tokens[active])).all()
        assert failures > 3
        results = {result.request_id: result.token_ids for result in engine.take_finished()}
        assert [results[str(i)] for i in range(5)] == reference()[:5]
        monkeypatch.undo()
        assert_usable(decoder())

    def test_out_of_memory_names_the_knobs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        monkeypatch.setattr(decoder().target, "forward", full)
        with pytest.raises(
            MemoryError, match="lower kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
        ):
            decoder().generate(PROMPTS, 4)
        monkeypatch.undo()
        assert_usable(decoder())

    @pytest.mark.parametrize("after", [0, 1, 7])
    def test_ctrl_c_while_streaming_aborts_everything(self, after: int) -> None:
        calls = itertools.count()

        def interrupt(name: str, tokens: list[int]) -> None:
            if next(calls) == after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            decoder().generate(PROMPTS, NUM_TOKENS, on_token=interrupt)
        assert decoder().engine.take_finished() == []
        assert_usable(decoder())

    def test_ctrl_c_at_any_line_leaves_nothing_behind(self) -> None:
        """A signal arrives between two bytecodes, so it may come at any line."""
        one = decoder("prompt-lookup")
        folder = str(Path(specdepth.decoder.engine.__file__).parent)

        def run(interrupt_at: int) -> int:
            """Lines of the decoder that a short call executes, up to the interrupt."""
            count = 0

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal count
                if not frame.f_code.co_filename.startswith(folder):
                    return None
                if event == "line" and frame.f_code.co_name not in ("abort_all", "take_all"):
                    count += 1
                    if count == interrupt_at:
                        raise KeyboardInterrupt
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                one.generate(PROMPTS[3:6:2], 3, depth_scheduler=2)
            finally:
                sys.settrace(before)
            return count

        total = run(-1)
        assert total > 500
        for at in range(1, total, STRIDE):
            with pytest.raises(KeyboardInterrupt):
                run(at)
            engine = one.engine
            assert not engine.has_work
            assert not engine.seqs.active.any()
            engine.pool.check()
            assert engine.pool.num_free == engine.pool.num_blocks
            assert engine.take_finished() == []
        assert_usable(one)


class TestModels:
    def test_cuda_asked_for_and_absent(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        with pytest.raises(ValueError, match=r'sees 0 CUDA devices; use device="cpu"'):
            build_decoder(TARGET, device="cuda")

    @pytest.mark.parametrize("device", ["tpu", "meta", "cpuu"])
    def test_an_unknown_device_is_refused(self, device: str) -> None:
        with pytest.raises(ValueError, match='device must be "cpu", "cuda"'):
            build_decoder(TARGET, device=device)

    @pytest.mark.parametrize("dtype", ["int8", "floaty", torch.int64])
    def test_an_unknown_dtype_is_refused(self, dtype: Any) -> None:
        with pytest.raises(ValueError, match='dtype must be "auto", float64, float32, float16'):
            build_decoder(TARGET, dtype=dtype)

    def test_a_pool_without_a_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"kv_cache_bytes=100 holds no block of 4 tokens"):
            build_decoder(TARGET, num_kv_blocks=None, kv_cache_bytes=100)

    def test_a_longer_model_len_than_the_models_is_refused(self) -> None:
        short = tiny_llama(max_position_embeddings=64)
        with pytest.raises(ValueError, match="max_model_len=65 exceeds the 64 positions"):
            build_decoder(TARGET, short, max_model_len=65)

    def test_a_model_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="'nobody/nothing' was not found, neither as a folder"):
            SpeculativeDecoder.from_pretrained("nobody/nothing", device="cpu")
        with pytest.raises(OSError, match=r"has no config\.json"):
            SpeculativeDecoder.from_pretrained(tmp_path, device="cpu")

    def test_an_unknown_drafter_is_named(self) -> None:
        with pytest.raises(OSError, match="'prompt-lokup' was not found"):
            build_decoder(TARGET, "prompt-lokup")

    def test_a_damaged_model_file_is_named(self, tmp_path: Path) -> None:
        copy.deepcopy(TARGET).save_pretrained(tmp_path)
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        with pytest.raises(OSError, match=rf"model {tmp_path.name!r} is damaged"):
            SpeculativeDecoder.from_pretrained(tmp_path, device="cpu")

    def test_models_that_do_not_fit_on_the_device_name_what_helps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any, **__: Any) -> torch.nn.Module:
            raise torch.OutOfMemoryError("CUDA out of memory")

        model = copy.deepcopy(TARGET)
        monkeypatch.setattr(torch.nn.Module, "to", full)
        with pytest.raises(MemoryError, match="do not fit on cpu; use smaller ones, a 16-bit"):
            SpeculativeDecoder.from_pretrained(model, device="cpu")

    def test_a_drafter_of_ones_own_may_not_hide_that_it_draws(self) -> None:
        class Draws(PromptLookup):
            def draft(self, plan: RoundPlan) -> Proposal:
                proposal = super().draft(plan)
                rows = torch.zeros(proposal.token_ids.shape, dtype=torch.int64)
                proposal.probs = DraftProbs(torch.ones(1, VOCAB) / VOCAB, rows)
                return proposal

        one = SpeculativeDecoder.from_pretrained(
            copy.deepcopy(TARGET), lambda seqs, _, target: Draws(seqs, target.device), device="cpu"
        )
        with pytest.raises(ValueError, match="kind 'prompt-lookup' gave laws of its tokens"):
            one.generate(PROMPTS, 4)
        assert not one.engine.has_work

    def test_different_vocabularies_are_refused_with_what_differs(self, tmp_path: Path) -> None:
        other = tiny_llama(vocab_size=60)
        with pytest.raises(ValueError, match="vocabulary of 97 and the draft model one of 60"):
            build_decoder(TARGET, other)

        def saved(name: str, model: PreTrainedModel, extra: tuple[str, ...]) -> Path:
            copy.deepcopy(model).save_pretrained(tmp_path / name)
            tokenizer = char_tokenizer(extra)
            if name == "swapped":
                vocabulary = tokenizer.get_vocab() | {"A": 34, "B": 33}
                assert vocabulary["A"] == 34
                from tokenizers import Tokenizer, models
                from transformers import PreTrainedTokenizerFast

                plain = {t: i for t, i in vocabulary.items() if i < 95}
                tokenizer = PreTrainedTokenizerFast(
                    tokenizer_object=Tokenizer(models.BPE(plain, []))
                )
            tokenizer.save_pretrained(tmp_path / name)
            return tmp_path / name

        target = saved("target", TARGET, ("<end>", "<more>"))
        draft = saved("swapped", DRAFT, ("<end>", "<more>"))
        with pytest.raises(ValueError, match=r"2 tokens differ .*'A' in the target and 'B' in the"):
            SpeculativeDecoder.from_pretrained(target, draft, device="cpu", dtype="float64")
