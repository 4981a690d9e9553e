"""Recording, against what each drafter does by itself at each position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specdepth.decoder import trace_text
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompt_lookup import LookupConfig
from specdepth.decoder.sampling import gumbel_argmax
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.decoder.trace_recorder import decode_texts, record_proposals
from specdepth.decoder.trace_text import TextToRecord, record_lookup
from specdepth.scheduler.state import DrafterKind
from tests.decoder.test_text_lookup import NAMES, by_search
from tests.decoder.tiny import (
    build_decoder,
    greedy_text,
    next_law,
    next_logits,
    noisy_copy,
    repetitive_prompts,
    target_only_text,
    tiny_llama,
)

TARGET = tiny_llama(eos_token_id=[5, 17, 29, 41, 53])
DRAFT = noisy_copy(TARGET, 0.05)
PROMPTS = repetitive_prompts()
TOP = 4


def info_for(drafter: DrafterKind = "prompt-lookup", **changed: Any) -> TraceInfo:
    fields: dict[str, Any] = {
        "model_pair": "a+b",
        "drafter": drafter,
        "max_num_speculative_tokens": TOP,
    }
    return TraceInfo(**(fields | changed))


def to_answer(prompts: list[list[int]], tokens: int = 12, temperature: float = 0.0) -> Any:
    return [
        TextToRecord(
            id=f"p{i}",
            kind="toy",
            split="held-out" if i % 2 else "train",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=temperature, seed=i, max_new_tokens=tokens),
        )
        for i, prompt in enumerate(prompts)
    ]


def given_text(prompt: list[int], tokens: list[int], **changed: Any) -> TextToRecord:
    fields: dict[str, Any] = {
        "id": "text",
        "kind": "toy",
        "split": "train",
        "prompt_token_ids": prompt,
        "sampling": SamplingParams(max_new_tokens=len(tokens) or 1),
        "token_ids": tokens,
    }
    return TextToRecord(**(fields | changed))


# ------------------------------------------------------------------ decoding


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_texts_are_the_targets_own(temperature: float) -> None:
    decoder = build_decoder(TARGET, verification="coupled")
    texts = to_answer(PROMPTS, temperature=temperature)
    calls: list[int] = []
    answered = decode_texts(decoder, texts, calls.append)
    for text, before in zip(answered, texts, strict=True):
        wanted = target_only_text(TARGET, before.prompt_token_ids, 12, before.sampling)
        assert list(text.token_ids) == wanted
        assert text.stopped == (wanted[-1] in (5, 17, 29, 41, 53))
        assert (text.id, text.split) == (before.id, before.split)
    assert any(text.stopped for text in answered)
    assert not all(text.stopped for text in answered)
    assert calls[-1] == len(texts)


def test_target_signals_belong_to_the_law_that_each_token_was_taken_from() -> None:
    (text,) = decode_texts(build_decoder(TARGET), to_answer([PROMPTS[2]]))
    assert len(text.target_top1) == len(text.token_ids)
    for place in range(len(text.token_ids)):
        before = [*text.prompt_token_ids, *text.token_ids[:place]]
        law = torch.softmax(next_logits(TARGET, before).double(), 0)
        assert text.target_top1[place] == pytest.approx(float(law.max()), rel=1e-6)
        entropy = -float((law * law.log()).sum())
        assert text.target_entropy[place] == pytest.approx(entropy, rel=1e-6)


def test_an_interrupt_leaves_the_decoder_idle() -> None:
    decoder = build_decoder(TARGET)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_texts(decoder, to_answer(PROMPTS), stop)
    assert not decoder.engine.has_work
    (again,) = decode_texts(decoder, to_answer([PROMPTS[2]]))
    assert list(again.token_ids) == greedy_text(TARGET, PROMPTS[2], 12)


def test_a_decoder_with_requests_of_its_own_is_refused() -> None:
    decoder = build_decoder(TARGET)
    decoder.engine.add_request([1, 2, 3], SamplingParams())
    with pytest.raises(RuntimeError, match="requests of its own"):
        decode_texts(decoder, to_answer(PROMPTS))
    with pytest.raises(RuntimeError, match="requests of its own"):
        record_proposals(decoder, [given_text([1], [2])], info_for())


# ------------------------------------------------------------------ prompt lookup


@pytest.mark.parametrize("lookup", [LookupConfig(), LookupConfig(min_ngram=2, max_ngram=3)])
def test_prompt_lookup_is_recorded_as_it_would_propose(lookup: LookupConfig) -> None:
    decoder = build_decoder(TARGET, lookup=lookup)
    texts = decode_texts(decoder, to_answer(PROMPTS))
    trace = record_proposals(decoder, texts, info_for())
    found = [
        by_search(list(text.prompt_token_ids), list(text.token_ids), TOP, lookup) for text in texts
    ]
    for name in NAMES:
        wanted = [value for one in found for value in one[name]]
        assert getattr(trace, name).tolist() == wanted, name
    assert trace.accepted.max() > 1
    assert trace.num_tokens.tolist() == [len(text.token_ids) for text in texts]
    assert trace.target_top1.tolist() == [p for text in texts for p in text.target_top1]


def test_a_trace_says_what_the_texts_were() -> None:
    looping = given_text([1, 2], [7] * 40, stopped=True, split="held-out", id="loop", kind="loops")
    trace = record_lookup([looping, given_text([3], [1, 2, 3])], info_for())
    assert trace.ids == ("loop", "text")
    assert trace.kinds == ("loops", "toy")
    assert trace.held_out.tolist() == [True, False]
    assert trace.looping.tolist() == [True, False]
    assert trace.stopped.tolist() == [True, False]
    assert trace.num_prompt.tolist() == [2, 1]
    assert trace.max_new_tokens.tolist() == [40, 3]
    assert np.isnan(trace.target_top1).all()


def test_how_many_texts_are_looked_up_at_once_does_not_matter(monkeypatch: Any) -> None:
    texts = [given_text(prompt, prompt) for prompt in PROMPTS]
    whole = record_lookup(texts, info_for())
    calls: list[int] = []
    monkeypatch.setattr(trace_text, "BATCH_TOKENS", 40)
    parts = record_lookup(texts, info_for(), progress=calls.append)
    assert len(calls) > 3
    assert calls[-1] == len(texts)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


# ------------------------------------------------------------------ draft models


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_draft_model_is_recorded_as_it_would_propose(temperature: float) -> None:
    decoder = build_decoder(TARGET, DRAFT, verification="coupled", max_num_seqs=3)
    texts = decode_texts(decoder, to_answer(PROMPTS[:3], 8, temperature))
    trace = record_proposals(decoder, texts, info_for("draft-model"))
    assert trace.draft_top1 is not None
    assert trace.draft_entropy is not None
    assert trace.draft_margin is not None
    for row, text in enumerate(texts):
        for place in range(len(text.token_ids)):
            at = trace.starts[row] + place
            committed = [*text.prompt_token_ids, *text.token_ids[:place]]
            run, agrees = 0, True
            for step in range(TOP):
                logits = next_logits(DRAFT, committed).double()
                two = torch.softmax(logits, 0).topk(2).values
                assert trace.draft_top1[at, step] == pytest.approx(float(two[0]), rel=1e-6)
                margin = float(two[0] - two[1])
                assert trace.draft_margin[at, step] == pytest.approx(margin, rel=1e-6)
                committed.append(draft_token(committed, text.sampling))
                rest = text.token_ids[place + step :]
                agrees = agrees and len(rest) > 0 and rest[0] == committed[-1]
                run += agrees
            assert trace.accepted[at] == run
    assert trace.proposal_length.tolist() == [TOP] * trace.num_positions
    assert trace.match_length.max() == 0
    assert len(set(trace.accepted.tolist())) > 2


def draft_token(tokens: list[int], sampling: SamplingParams) -> int:
    if not sampling.temperature:
        return int(next_logits(DRAFT, tokens).argmax())
    law = next_law(DRAFT, tokens, sampling)
    return int(gumbel_argmax(law, torch.tensor([sampling.seed]), torch.tensor([len(tokens)])))


def test_few_slots_and_blocks_give_the_same_trace() -> None:
    texts = decode_texts(build_decoder(TARGET), to_answer(PROMPTS[1:5], 6))

    def recorded(**options: Any) -> Trace:
        decoder = build_decoder(TARGET, DRAFT, **options)
        return record_proposals(decoder, texts, info_for("draft-model"))

    one, many = recorded(max_num_seqs=1), recorded(max_num_seqs=4, num_kv_blocks=20)
    np.testing.assert_array_equal(one.accepted, many.accepted)
    np.testing.assert_allclose(one.draft_entropy, many.draft_entropy, rtol=1e-9)  # type: ignore[arg-type]


def test_a_decoder_serves_again_after_a_recording() -> None:
    decoder = build_decoder(TARGET, DRAFT)
    texts = decode_texts(decoder, to_answer(PROMPTS[1:4], 4))
    record_proposals(decoder, texts, info_for("draft-model"))
    result = decoder.generate([PROMPTS[2]], max_new_tokens=10, depth_scheduler=3)[0]
    assert result.token_ids == greedy_text(TARGET, PROMPTS[2], 10)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least one text"),
        ([given_text([1], [])], "text has no tokens"),
        ([given_text([], [1])], "text has no prompt"),
    ],
)
def test_texts_that_a_trace_cannot_hold_are_named(texts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record_lookup(texts, info_for())
    with pytest.raises(ValueError, match=message):
        record_proposals(build_decoder(TARGET), texts, info_for())


def test_an_info_that_does_not_fit_the_decoder_is_refused() -> None:
    decoder, texts = build_decoder(TARGET), [given_text([1], [2])]
    with pytest.raises(ValueError, match="of draft-model, the decoder has prompt-lookup"):
        record_proposals(decoder, texts, info_for("draft-model"))
    with pytest.raises(ValueError, match=r"a trace of depth 9 needs .* the decoder has 8"):
        record_proposals(decoder, texts, replace(info_for(), max_num_speculative_tokens=9))


def test_a_text_that_is_too_long_for_the_draft_model_is_named() -> None:
    decoder = build_decoder(TARGET, DRAFT, num_kv_blocks=4)
    texts = [given_text([1, 2], [3]), given_text([1] * 20, [2] * 20, id="long one")]
    with pytest.raises(ValueError, match="long one has 40 tokens, the decoder holds 16"):
        record_proposals(decoder, texts, info_for("draft-model"))
    assert not decoder.engine.has_work
