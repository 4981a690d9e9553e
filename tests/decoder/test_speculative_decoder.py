"""`SpeculativeDecoder`: pairs of models, their vocabularies, and what `generate` fills in."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.drafters import PromptLookup
from specdepth.decoder.kv_cache import BlockPool
from specdepth.decoder.models import PackedModel
from specdepth.decoder.sequences import SequenceTable
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from tests.decoder.tiny import (
    VOCAB,
    Watched,
    build_decoder,
    char_tokenizer,
    greedy_text,
    noisy_copy,
    ragged,
    repetitive_prompts,
    target_only_text,
    tiny_llama,
)

TARGET = tiny_llama()
DRAFT = noisy_copy(TARGET, 0.05)
PROMPTS = repetitive_prompts()


def padded(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The same model with `rows` rows of embedding and head, the new ones louder than all others."""
    wider = tiny_llama(vocab_size=rows)
    with torch.no_grad():
        for mine, other in zip(wider.parameters(), model.parameters(), strict=True):
            if mine.shape == other.shape:
                mine.copy_(other)
                continue
            mine[:VOCAB] = other
            # Whatever the hidden state, one of two opposite rows has a large logit.
            mine[VOCAB:] = 50 * torch.randn(1, mine.shape[1], dtype=mine.dtype)
            mine[VOCAB::2] *= -1
    return wider


class TestVocabularyPadding:
    """One tokenizer of 97 tokens; models with 100 and 128 rows."""

    def folders(self, tmp_path: Path) -> tuple[Path, Path]:
        for name, model, rows in (("target", TARGET, 128), ("draft", DRAFT, 100)):
            padded(model, rows).save_pretrained(tmp_path / name)
            char_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / "target", tmp_path / "draft"

    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_family_with_different_padding_works_and_never_says_padding(
        self, tmp_path: Path, swapped: bool
    ) -> None:
        target, draft = self.folders(tmp_path)
        if swapped:
            target, draft = draft, target
        model = DRAFT if swapped else TARGET
        # Padding would win by far, were it allowed.
        loud = padded(model, 100 if swapped else 128)
        firsts = [greedy_text(loud, prompt, 1)[0] for prompt in PROMPTS]
        assert all(token >= VOCAB for token in firsts)
        decoder = SpeculativeDecoder.from_pretrained(
            target, draft, device="cpu", dtype="float64", verification="coupled", block_size=4
        )
        params = [SamplingParams(temperature=i % 3 / 2, seed=i) for i in range(len(PROMPTS))]
        batch = decoder.generate(PROMPTS, 16, params, depth_scheduler=Watched(ragged(0)))
        for result, prompt, one in zip(batch, PROMPTS, params, strict=True):
            assert result.token_ids == target_only_text(model, prompt, 16, one)
        assert batch.metrics.acceptance_rate > 0.2

    def test_rejection_does_not_say_padding_either(self, tmp_path: Path) -> None:
        target, draft = self.folders(tmp_path)
        decoder = SpeculativeDecoder.from_pretrained(target, draft, device="cpu", dtype="float64")
        batch = decoder.generate(PROMPTS, 16, SamplingParams(temperature=1.0))
        assert max(token for result in batch for token in result.token_ids) < VOCAB
        assert batch.metrics.num_accepted_tokens > 0


class TestPairs:
    def test_folders_without_a_tokenizer_work_on_token_lists(self, tmp_path: Path) -> None:
        copy.deepcopy(TARGET).save_pretrained(tmp_path / "big")
        copy.deepcopy(DRAFT).save_pretrained(tmp_path / "small")
        decoder = SpeculativeDecoder.from_pretrained(
            tmp_path / "big", tmp_path / "small", device="cpu", dtype="float64"
        )
        batch = decoder.generate(PROMPTS, 8)
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 8) for p in PROMPTS]
        assert {result.text for result in batch} == {None}
        assert decoder.model_pair == "big+small"
        assert decoder.tokenizer is None

    def test_a_drafter_of_ones_own_may_be_plugged_in(self) -> None:
        made = []

        def factory(seqs: SequenceTable, pool: BlockPool, target: PackedModel) -> PromptLookup:
            made.append((seqs, pool, target))
            return PromptLookup(seqs, target.device)

        decoder = SpeculativeDecoder.from_pretrained(
            copy.deepcopy(TARGET), factory, device="cpu", dtype=torch.float64
        )
        assert made == [(decoder.engine.seqs, decoder.engine.pool, decoder.target)]
        batch = decoder.generate(PROMPTS, 8)
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 8) for p in PROMPTS]
        assert decoder.model_pair == "LlamaForCausalLM+prompt-lookup"

    def test_one_model_may_be_target_and_draft(self) -> None:
        model = copy.deepcopy(TARGET)
        decoder = SpeculativeDecoder.from_pretrained(
            model, model, device="cpu", dtype=torch.float64
        )
        batch = decoder.generate(PROMPTS, 8, depth_scheduler=3)
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 8) for p in PROMPTS]
        assert batch.metrics.acceptance_rate == 1.0

    def test_a_draft_of_another_shape_works(self) -> None:
        small = tiny_llama(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        decoder = build_decoder(TARGET, small)
        batch = decoder.generate(PROMPTS, 8, depth_scheduler=Watched(ragged(0)))
        assert [r.token_ids for r in batch] == [greedy_text(TARGET, p, 8) for p in PROMPTS]


class TestSizes:
    def test_bytes_cover_the_kv_of_both_models(self) -> None:
        per_token = 2 * 2 * (8 + 8) * 8  # layers, KV heads, key and value sizes, float64
        for draft, models in (("prompt-lookup", 1), (DRAFT, 2)):
            decoder = build_decoder(
                TARGET,
                draft,
                num_kv_blocks=None,
                block_size=None,
                kv_cache_bytes=models * per_token * 16 * 10 + 5,
            )
            assert decoder.config.block_size == 16
            assert decoder.config.num_kv_blocks == 10
            assert decoder.engine.pool.num_blocks == 10

    def test_no_more_blocks_than_all_slots_can_use(self) -> None:
        decoder = build_decoder(TARGET, num_kv_blocks=None, max_num_seqs=2, max_model_len=30)
        assert decoder.config.num_kv_blocks == 2 * math.ceil(30 / 4)

    def test_the_longest_sequence_is_the_shorter_models(self) -> None:
        draft = tiny_llama(max_position_embeddings=100)
        assert build_decoder(TARGET, draft).config.max_model_len == 100
        assert build_decoder(TARGET).config.max_model_len == 512
        assert build_decoder(TARGET, max_model_len=40).config.max_model_len == 40


class TestGenerate:
    def test_depth_4_is_the_default_and_k_if_that_is_less(self) -> None:
        for top, wanted in ((8, 4), (2, 2)):
            decoder = build_decoder(TARGET, TARGET, max_num_speculative_tokens=top)
            batch = decoder.generate([PROMPTS[1]], 40)
            assert batch.metrics.acceptance_length == pytest.approx(1 + wanted, abs=0.5)

    def test_seeds_default_to_the_place_in_the_call(self) -> None:
        decoder = build_decoder(TARGET, verification="coupled")
        drawn = SamplingParams(temperature=1.0)
        batch = decoder.generate([PROMPTS[1]] * 3, 8, drawn)
        for place, result in enumerate(batch):
            seeded = SamplingParams(temperature=1.0, seed=place)
            assert result.token_ids == target_only_text(TARGET, PROMPTS[1], 8, seeded)
        assert len({tuple(result.token_ids) for result in batch}) == 3

    def test_a_batch_is_a_sequence_of_results_with_the_metrics_of_the_call(self) -> None:
        decoder = build_decoder(TARGET)
        batch = decoder.generate(PROMPTS, 4)
        assert len(batch) == len(PROMPTS)
        assert [result.request_id for result in batch] == [str(i) for i in range(len(PROMPTS))]
        assert [r.request_id for r in batch[1:3]] == ["1", "2"]
        assert batch.metrics.num_committed_tokens == 4 * len(PROMPTS)
        again = decoder.generate(PROMPTS[:2], 4)
        assert again.metrics.num_committed_tokens == 8
        assert batch.metrics.num_committed_tokens == 4 * len(PROMPTS)

    def test_prompts_may_be_arrays_and_tensors(self) -> None:
        decoder = build_decoder(TARGET)
        wanted = greedy_text(TARGET, PROMPTS[1], 4)
        for prompt in (np.array(PROMPTS[1]), torch.tensor(PROMPTS[1]), tuple(PROMPTS[1])):
            assert decoder.generate([prompt], 4)[0].token_ids == wanted  # type: ignore[list-item]
