"""The shipped prompts, users' files, mixes and rendering."""

from __future__ import annotations

import ast
import gzip
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompts import (
    KINDS,
    Prompt,
    benchmark_prompts,
    default_mix,
    load_prompt_file,
    load_prompts,
    mix,
    render,
)
from specdepth.decoder.workload import make_requests


def word_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a word, and a beginning token that tokenising adds by itself."""
    words = ["<s>", "user:", "answer:", "add", "two", "numbers", "[UNK]"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    wrapped.chat_template = template
    return wrapped


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} answer:{% endif %}"
)


class TestShippedPrompts:
    def test_each_kind_has_36_prompts_in_each_half(self) -> None:
        counts = Counter((prompt.kind, prompt.split) for prompt in load_prompts())
        assert counts == {(kind, half): 36 for kind in KINDS for half in ("train", "held-out")}

    def test_ids_and_texts_are_unique(self) -> None:
        prompts = load_prompts()
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        assert len({prompt.text for prompt in prompts}) == len(prompts)

    def test_halves_share_no_module_and_no_passage(self) -> None:
        def sources(half: str) -> set[str]:
            prompts = load_prompts(half)  # type: ignore[arg-type]
            modules = {p.id.split(".")[0] for p in prompts if p.kind == "code-editing"}
            topics = {p.id.rsplit("-", 1)[0] for p in prompts if p.kind == "summary"}
            return modules | topics

        assert sources("train")
        assert not sources("train") & sources("held-out")

    def test_filters_narrow_down(self) -> None:
        prompts = load_prompts("train", kinds=["maths", "chat"])
        assert {(p.kind, p.split) for p in prompts} == {("maths", "train"), ("chat", "train")}
        assert len(prompts) == 72

    def test_code_completion_is_raw_text_and_all_else_is_chat(self) -> None:
        raw = {prompt.kind for prompt in load_prompts() if not prompt.chat}
        assert raw == {"code-completion"}
        assert all("def " in p.text for p in load_prompts(kinds=["code-completion"]))

    def test_code_to_edit_is_one_whole_function(self) -> None:
        for prompt in load_prompts(kinds=["code-editing"]):
            code = prompt.text.split("```python\n")[1].removesuffix("\n```")
            assert [type(node) for node in ast.parse(code).body] == [ast.FunctionDef], prompt.id

    def test_lengths_are_moderate(self) -> None:
        lengths = [len(prompt.text) for prompt in load_prompts()]
        assert min(lengths) > 20
        assert max(lengths) < 2_000

    def test_the_file_is_small_and_its_notice_names_each_source(self) -> None:
        data = files("specdepth.decoder") / "data"
        assert len((data / "prompts.jsonl.gz").read_bytes()) < 400_000
        notice = (data / "NOTICE").read_text(encoding="utf-8")
        for prompt in load_prompts():
            if prompt.kind != "code-editing":
                assert any(
                    prompt.id.startswith(name) and f"{name}*" in notice
                    for name in ("human-eval-", "gsm8k-", "truthfulqa-", "mt-bench-", "records-")
                ) or prompt.id.startswith("python-reference-"), prompt.id
        for licence in ("MIT", "Apache License 2.0", "PYTHON SOFTWARE FOUNDATION LICENSE"):
            assert licence in notice

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'poetry', expected some of code-completion"):
            load_prompts(kinds=["poetry"])
        with pytest.raises(ValueError, match="unknown split 'test'"):
            load_prompts("test")  # type: ignore[arg-type]


class TestMix:
    def test_every_stretch_of_six_holds_each_kind(self) -> None:
        prompts = default_mix(30, seed=3)
        for start in range(0, 30, 6):
            assert [p.kind for p in prompts[start : start + 6]] == list(KINDS)
        assert {p.split for p in prompts} == {"held-out"}

    def test_a_seed_fixes_it_and_a_longer_mix_begins_with_the_shorter(self) -> None:
        assert default_mix(20, seed=1) == default_mix(20, seed=1)
        assert default_mix(50, seed=1)[:20] == default_mix(20, seed=1)
        assert default_mix(20, seed=1) != default_mix(20, seed=2)

    def test_no_prompt_comes_twice_before_all_have_come(self) -> None:
        once = default_mix(216, split="train")
        assert len({p.id for p in once}) == 216
        assert default_mix(222, split="train")[216:] == once[:6]

    def test_uneven_kinds_repeat_the_smaller(self) -> None:
        few = [
            Prompt(id=f"{k}{i}", kind=k, text="x", split="train")
            for k, i in [("a", 0), ("b", 0), ("b", 1)]
        ]
        assert [p.id[0] for p in mix(few, 6)] == list("ababab")
        assert [p.id for p in mix(few, 6) if p.kind == "a"] == ["a0"] * 3

    def test_nothing_cannot_be_mixed(self) -> None:
        with pytest.raises(ValueError, match="no prompts to mix"):
            mix([], 3)

    def test_the_benchmark_has_16_held_out_prompts_of_all_kinds(self) -> None:
        prompts = benchmark_prompts()
        assert len({p.id for p in prompts}) == 16
        assert {p.kind for p in prompts} == set(KINDS)
        assert prompts[0].id == "human-eval-32"


class TestPromptFile:
    def test_jsonl(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        rows = [{"question": "Why?\nReally?"}, {"question": "How?", "other": 1}]
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
        prompts = load_prompt_file(path, "question", kind="support", chat=False)
        assert [p.text for p in prompts] == ["Why?\nReally?", "How?"]
        assert [p.id for p in prompts] == ["log.jsonl:1", "log.jsonl:3"]
        assert {(p.kind, p.chat) for p in prompts} == {("support", False)}

    def test_plain_text_and_gzip(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.txt"
        path.write_bytes("\ufeffOne  two\r\n\r\n  { three\n".encode())
        assert [p.text for p in load_prompt_file(path)] == ["One  two", "  { three"]
        packed = tmp_path / "prompts.jsonl.gz"
        packed.write_bytes(gzip.compress(b'{"prompt": "packed"}'))
        assert [p.text for p in load_prompt_file(packed)] == ["packed"]

    def test_the_split_depends_on_the_text_alone(self, tmp_path: Path) -> None:
        path, reordered = tmp_path / "a.txt", tmp_path / "b.txt"
        lines = [f"prompt {i}" for i in range(400)]
        path.write_text("\n".join(lines))
        reordered.write_text("\n".join(lines[::-1] + lines))
        split = {p.text: p.split for p in load_prompt_file(path)}
        assert all(split[p.text] == p.split for p in load_prompt_file(reordered))
        assert 160 < list(split.values()).count("held-out") < 240
        assert {p.split for p in load_prompt_file(path, held_out_fraction=0)} == {"train"}
        assert {p.split for p in load_prompt_file(path, held_out_fraction=1)} == {"held-out"}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("not json", "line 1: not JSON .* expected one object a line"),
            ('{"prompt": "x"}\n[1]', "line 2: expected an object with the key 'prompt'"),
            ('{"text": "x"}', "expected a text under 'prompt'; its keys are 'text'"),
            ('{"prompt": 3}', "expected a text under 'prompt'"),
            ("\n\n", "holds no prompt"),
        ],
    )
    def test_bad_lines_are_named(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_prompt_file(path)

    def test_unreadable_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no prompt file .*absent\.txt"):
            load_prompt_file(tmp_path / "absent.txt")
        (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}')[:-12])
        for name in ("binary.txt", "torn.jsonl.gz"):
            with pytest.raises(ValueError, match="cannot be read as UTF-8 text"):
                load_prompt_file(tmp_path / name)
        with pytest.raises(ValueError, match=r"held_out_fraction must be in 0\.\.1"):
            load_prompt_file(tmp_path / "binary.txt", held_out_fraction=2)


class TestRender:
    chat = Prompt(id="1", kind="chat", text="add two numbers", split="train")
    raw = Prompt(id="2", kind="code", text="add two", split="train", chat=False)

    def test_chat_goes_through_the_template_with_one_beginning_token(self) -> None:
        assert render(word_tokenizer(TEMPLATE), self.chat) == [0, 1, 3, 4, 5, 2]

    def test_raw_text_and_models_without_a_template_get_the_plain_text(self) -> None:
        assert render(word_tokenizer(TEMPLATE), self.raw) == [0, 3, 4]
        assert render(word_tokenizer(None), self.chat) == [0, 3, 4, 5]

    def test_requests_have_tokens_and_a_seed_each(self) -> None:
        sampling = SamplingParams(temperature=0.5, seed=10)
        made = make_requests([self.chat, self.raw], word_tokenizer(TEMPLATE), sampling)
        assert [r.prompt_token_ids for r in made] == [(0, 1, 3, 4, 5, 2), (0, 3, 4)]
        assert [r.sampling.seed for r in made] == [10, 11]
        assert [r.kind for r in made] == ["chat", "code"]
        assert {r.sampling.temperature for r in made} == {0.5}
