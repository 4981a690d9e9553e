"""Vocabulary checks, end tokens and incremental detokenising, on small real tokenizers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from specdepth.decoder.tokenizers import (
    Detokenizer,
    check_same_vocabulary,
    decode,
    end_token_ids,
    vocabulary_size,
)

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "hello")]


def byte_level(extra: tuple[str, ...] = ("<end>",), **changes: str) -> PreTrainedTokenizerFast:
    """GPT-2's kind of tokenizer: 256 bytes, a few merges, then added tokens."""
    tokens = [changes.get(token, token) for token in _BYTES]
    merges = [] if changes else _MERGES
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(extra))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2's kind: words that begin with a space, bytes for the rest, first space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", *"abcdehlorw", "▁a", "▁b", "▁he", "llo"]
    merges = [("▁", "a"), ("▁", "b")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
SIZE = len(_BYTES) + len(_MERGES) + 1


def config(rows: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=rows)


class TestVocabularySize:
    def test_rows_beyond_the_last_token_are_padding(self) -> None:
        assert vocabulary_size(BYTE_LEVEL, config(512)) == SIZE

    def test_added_tokens_count(self) -> None:
        assert vocabulary_size(byte_level(("<end>", "<think>")), config(512)) == SIZE + 1

    def test_a_tokenizer_with_more_tokens_than_rows_is_cut_to_the_rows(self) -> None:
        assert vocabulary_size(BYTE_LEVEL, config(200)) == 200

    def test_without_a_tokenizer_all_rows_count(self) -> None:
        assert vocabulary_size(None, config(512)) == 512

    def test_an_end_token_that_the_tokenizer_lacks_counts(self) -> None:
        assert vocabulary_size(BYTE_LEVEL, config(512), end_tokens=(300,)) == 301

    def test_a_tokenizer_whose_get_vocab_leaves_out_added_tokens(self) -> None:
        class Slow(PreTrainedTokenizerFast):
            def get_vocab(self) -> dict[str, int]:
                return {t: i for t, i in super().get_vocab().items() if t != "<end>"}

        slow = Slow(tokenizer_object=byte_level().backend_tokenizer)
        assert vocabulary_size(slow, config(512)) == SIZE


class TestSameVocabulary:
    def test_different_padding_passes_with_the_real_number_of_tokens(self) -> None:
        pair = (BYTE_LEVEL, byte_level())
        assert check_same_vocabulary(*pair, config(320), config(512)) == SIZE
        assert check_same_vocabulary(*pair, config(512), config(320)) == SIZE

    def test_a_draft_that_lacks_the_targets_last_tokens_passes_if_it_has_rows(self) -> None:
        newer = byte_level(("<end>", "<think>"))
        assert check_same_vocabulary(newer, BYTE_LEVEL, config(512), config(300)) == SIZE + 1

    def test_a_draft_with_further_tokens_is_held_to_the_targets(self) -> None:
        newer = byte_level(("<end>", "<think>"))
        assert check_same_vocabulary(BYTE_LEVEL, newer, config(512), config(512)) == SIZE

    def test_a_draft_without_rows_for_all_tokens_is_refused_with_the_token(self) -> None:
        newer = byte_level(("<end>", "<think>"))
        with pytest.raises(ValueError, match=rf"only {SIZE} rows \(token {SIZE} is '<think>'\)"):
            check_same_vocabulary(newer, BYTE_LEVEL, config(512), config(SIZE))

    def test_different_vocabularies_are_refused_with_sizes_and_first_tokens(self) -> None:
        with pytest.raises(ValueError, match="different vocabularies") as refused:
            check_same_vocabulary(BYTE_LEVEL, BYTE_FALLBACK, config(512), config(512))
        message = str(refused.value)
        assert f"the target ({SIZE} tokens)" in message
        assert f"the draft model ({len(BYTE_FALLBACK)} tokens)" in message
        assert f"3 is {_BYTES[3]!r} in the target and '<0x00>' in the draft model" in message
        assert message.count(" is ") == 3

    def test_two_swapped_tokens_are_found(self) -> None:
        swapped = byte_level(a="b", b="a")
        plain = byte_level(a="a")
        a = _BYTES.index("a")
        with pytest.raises(ValueError, match=rf"2 tokens differ \({a} is 'a' .* and 'b'"):
            check_same_vocabulary(plain, swapped, config(512), config(512))

    def test_control_tokens_with_other_names_pass_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        renamed = byte_level(("<stop>",))
        assert check_same_vocabulary(BYTE_LEVEL, renamed, config(512), config(512)) == SIZE
        assert "'<end>' and '<stop>'" in caplog.text

    def test_without_a_tokenizer_equal_sizes_pass(self) -> None:
        assert check_same_vocabulary(None, None, config(512), config(512)) == 512
        assert check_same_vocabulary(BYTE_LEVEL, None, config(512), config(512)) == SIZE

    def test_without_a_tokenizer_different_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="vocabulary of 512 and the draft model one of 320"):
            check_same_vocabulary(None, None, config(512), config(320))


class TestEndTokens:
    def test_several(self) -> None:
        assert end_token_ids(GenerationConfig(eos_token_id=[7, 3])) == (3, 7)

    def test_none_at_all(self) -> None:
        nothing = LlamaConfig(eos_token_id=None)
        assert end_token_ids(GenerationConfig(), nothing, BYTE_LEVEL) == ()
        assert end_token_ids(None) == ()

    def test_the_generation_config_decides_then_the_config_then_the_tokenizer(self) -> None:
        named = LlamaConfig(eos_token_id=5)
        assert end_token_ids(GenerationConfig(eos_token_id=4), named, BYTE_FALLBACK) == (4,)
        assert end_token_ids(GenerationConfig(), named, BYTE_FALLBACK) == (5,)
        unnamed = LlamaConfig(eos_token_id=None)
        assert end_token_ids(None, unnamed, BYTE_FALLBACK) == (2,)

    def test_token_zero_is_a_token_and_minus_one_is_none(self) -> None:
        assert end_token_ids(GenerationConfig(eos_token_id=0)) == (0,)
        assert end_token_ids(None, LlamaConfig(eos_token_id=-1)) == ()


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut `ids` into chunks of `sizes`, again and again."""
    chunks: list[list[int]] = []
    position = 0
    while position < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[position : position + size])
        position += size
    return chunks


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60) | st.text(
    st.sampled_from("a b\n日é🙂 ,.'"), max_size=80
)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
class TestDetokenizer:
    @settings(deadline=None, max_examples=150)
    @given(text=TEXTS, sizes=SIZES)
    def test_pieces_add_up_to_the_whole_text_without_half_characters(
        self, tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int]
    ) -> None:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.append(chunk) for chunk in chunked(ids, sizes)]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + detokenizer.finish() == decode(tokenizer, ids)
        assert detokenizer.text == decode(tokenizer, ids)
        assert detokenizer.num_tokens == len(ids)

    def test_text_comes_out_as_soon_as_it_is_whole(
        self, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        ids = tokenizer("ab", add_special_tokens=False).input_ids
        detokenizer = Detokenizer(tokenizer)
        assert "".join(detokenizer.append([token]) for token in ids) == "ab"
        smile = [tokenizer("🙂", add_special_tokens=False).input_ids[-4:]]
        assert [detokenizer.append([token]) for token in smile[0]] == ["", "", "", "🙂"]

    def test_special_tokens_leave_no_trace(self, tokenizer: PreTrainedTokenizerFast) -> None:
        special = len(tokenizer) - 1 if tokenizer is BYTE_LEVEL else 2
        first = tokenizer("a b", add_special_tokens=False).input_ids
        ids = [*first, special, special, *first]
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.append([token]) for token in ids]
        assert "".join(pieces) == decode(tokenizer, ids)

    def test_work_goes_by_the_tokens_not_by_the_length(
        self, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoded: list[int] = []
        real = type(tokenizer).decode

        def counted(self, token_ids, **options):
            decoded.append(len(token_ids))
            return real(self, token_ids, **options)

        monkeypatch.setattr(type(tokenizer), "decode", counted)
        detokenizer = Detokenizer(tokenizer)
        for token in tokenizer("a b 日🙂, " * 400, add_special_tokens=False).input_ids:
            detokenizer.append([token])
        assert max(decoded) <= 64
        assert sum(decoded) <= 40 * detokenizer.num_tokens


class TestBrokenBytes:
    @settings(deadline=None, max_examples=150)
    @given(
        ids=st.lists(st.integers(0, SIZE - 1), max_size=120)
        | st.lists(st.sampled_from([_BYTES.index(b) for b in "ðŁĻĤé"]), max_size=200),
        sizes=SIZES,
    )
    def test_any_tokens_add_up_to_what_the_tokenizer_decodes(
        self, ids: list[int], sizes: list[int]
    ) -> None:
        detokenizer = Detokenizer(BYTE_LEVEL)
        for chunk in chunked(ids, sizes):
            detokenizer.append(chunk)
        detokenizer.finish()
        assert detokenizer.text == decode(BYTE_LEVEL, ids)

    def test_endless_broken_bytes_come_out_in_linear_time(self) -> None:
        broken = BYTE_LEVEL("🙂", add_special_tokens=False).input_ids[1]
        detokenizer = Detokenizer(BYTE_LEVEL)
        started = time.process_time()
        for _ in range(2000):
            detokenizer.append([broken])
        assert time.process_time() - started < 5
        assert len(detokenizer.text) >= 1900


class TestStopStrings:
    def run(self, text: str, stop: tuple[str, ...], size: int = 1) -> tuple[Detokenizer, list[str]]:
        ids = BYTE_LEVEL(text, add_special_tokens=False).input_ids
        detokenizer = Detokenizer(BYTE_LEVEL, stop)
        pieces = [detokenizer.append(chunk) for chunk in chunked(ids, [size])]
        pieces.append(detokenizer.finish())
        return detokenizer, pieces

    @pytest.mark.parametrize("size", [1, 2, 5, 50])
    def test_text_ends_before_the_stop_string_and_counts_its_last_token(self, size: int) -> None:
        detokenizer, pieces = self.run("abc END def", ("END",), size)
        assert detokenizer.stopped
        assert "".join(pieces) == detokenizer.text == "abc "
        assert detokenizer.num_tokens == len("abc END")

    def test_a_stop_string_inside_a_token_cuts_the_text_inside_it(self) -> None:
        detokenizer, _ = self.run("x hello y", ("ll",))
        assert detokenizer.text == "x he"
        assert detokenizer.num_tokens == 2

    def test_what_may_become_a_stop_string_is_held_and_given_out_if_it_does_not(self) -> None:
        _, pieces = self.run("aENxEN", ("END",))
        assert pieces == ["a", "", "", "ENx", "", "", "EN"]

    def test_the_earliest_of_several_stop_strings_counts(self) -> None:
        detokenizer, _ = self.run("one two three", ("three", "two"), size=50)
        assert detokenizer.text == "one "

    def test_nothing_is_taken_after_the_stop(self) -> None:
        detokenizer, _ = self.run("a.b", (".",))
        assert detokenizer.append(BYTE_LEVEL("more").input_ids) == ""
        assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)

    @settings(deadline=None, max_examples=150)
    @given(
        text=st.text(st.sampled_from("ab🙂\n"), max_size=40),
        stop=st.lists(st.text(st.sampled_from("ab🙂\n"), min_size=1, max_size=4), max_size=3),
        sizes=SIZES,
    )
    def test_same_as_cutting_the_whole_text(
        self, text: str, stop: list[str], sizes: list[int]
    ) -> None:
        ids = BYTE_LEVEL(text, add_special_tokens=False).input_ids
        detokenizer = Detokenizer(BYTE_LEVEL, stop)
        given = "".join(detokenizer.append(chunk) for chunk in chunked(ids, sizes))
        given += detokenizer.finish()
        whole = text
        for length in range(len(text) + 1):  # the string that is complete first
            starts = [text[:length].find(s) for s in stop if s in text[:length]]
            if starts:
                whole = text[: min(starts)]
                break
        assert given == detokenizer.text == whole
        assert detokenizer.stopped == any(s in text for s in stop)
