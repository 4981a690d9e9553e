"""Logs of prompts and outputs, and their way into a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.output_log import LogColumns, read_output_log, to_texts
from specdepth.decoder.prompts import load_prompt_file, split_of
from tests.decoder.tiny import char_tokenizer

SAMPLING = SamplingParams(max_new_tokens=8)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer(**options: Any) -> Any:
    made = char_tokenizer()
    for name, value in ({"eos_token": "<end>"} | options).items():
        setattr(made, name, value)
    return made


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(char) - 32 for char in text)


END = 95
"""Of `char_tokenizer`."""


# ------------------------------------------------------------------ reading


def test_texts_token_ids_and_chats_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    log = write(
        tmp_path / "log.jsonl",
        {"prompt": "ab", "output": "c"},
        {"prompt": [1, 2], "output": [3]},
        {"prompt": chat, "output": ""},
    )
    found = list(read_output_log(log))
    assert [one.prompt for one in found] == ["ab", (1, 2), tuple(chat)]
    assert [one.output for one in found] == ["c", (3,), ""]
    assert [one.id for one in found] == ["log.jsonl:1", "log.jsonl:2", "log.jsonl:3"]
    assert [one.needs_tokenizer for one in found] == [True, False, True]
    assert {one.kind for one in found} == {"log"}


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"q": "ab", "a": "c", "task": "maths", "prompt": 3})
    (one,) = read_output_log(log, LogColumns(prompt="q", output="a", kind="task"))
    assert (one.prompt, one.output, one.kind) == ("ab", "c", "maths")


def test_packed_logs_blank_lines_and_odd_line_ends_are_read(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "a\u2028b", "output": "c"}, ensure_ascii=False)
    data = f"\ufeff{row}\r\n\n  \n{row}".encode()
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(data))
    found = list(read_output_log(tmp_path / "log.jsonl.gz"))
    assert [one.prompt for one in found] == ["a\u2028b"] * 2
    assert found[1].id == "log.jsonl.gz:4"


@given(text=st.text(min_size=1))
def test_the_split_is_that_of_a_prompt_file(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("split") / "log.jsonl"
    write(path, {"prompt": text, "output": "c"})
    (logged,) = read_output_log(path)
    (prompt,) = load_prompt_file(path)
    assert logged.split == prompt.split


def test_about_half_is_held_out() -> None:
    splits = [split_of(f"prompt {i}") for i in range(1000)]
    assert 450 < splits.count("held-out") < 550


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"line 2: not JSON"),
        ("[1, 2]", r"line 2: expected an object, got '\[1, 2\]'"),
        ('{"prompt": "a"}', r"line 2: there is no 'output'; its keys are 'prompt'"),
        ("{}", "line 2: there is no 'prompt'; its keys are none"),
        ('{"prompt": "", "output": "c"}', "line 2: expected a text, .* under 'prompt', got \"\""),
        ('{"prompt": [], "output": "c"}', r"line 2: expected a text, .*got \[\]"),
        ('{"prompt": 7, "output": "c"}', "line 2: expected a text, .*got 7"),
        ('{"prompt": [1, -2], "output": "c"}', r"line 2: expected a text, .*got \[1, -2\]"),
        ('{"prompt": [true], "output": "c"}', r"line 2: expected a text, .*got \[true\]"),
        ('{"prompt": [{"role": "user"}], "output": "c"}', "line 2: expected a text, .* chat"),
        ('{"prompt": "a", "output": null}', "line 2: expected .* under 'output', got null"),
        ('{"prompt": "a", "output": [1.5]}', r"line 2: expected .* under 'output', got \[1.5\]"),
        ('{"prompt": "a", "output": "\\ud800"}', "cannot be read as UTF-8 text"),
        ("[" * 100_000, "line 2: nested too deep"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": "a", "output": "b"}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=message) as caught:
        list(read_output_log(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_kind_must_be_a_text(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt": "a", "output": "b", "task": 3})
    with pytest.raises(ValueError, match="expected a text under 'task', got 3"):
        list(read_output_log(log, LogColumns(kind="task")))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no output log .*absent\.jsonl"):
        list(read_output_log(tmp_path / "absent.jsonl"))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_output_log(tmp_path))
    packed = gzip.compress(b'{"prompt": "a", "output": "b"}\n' * 100)
    for data in (b"no gzip", packed[:-12], packed[:20] + b"xx" + packed[22:]):
        (tmp_path / "bad.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read as UTF-8"):
            list(read_output_log(tmp_path / "bad.jsonl.gz"))
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff", "output": "b"}')
    with pytest.raises(ValueError, match="cannot be read as UTF-8"):
        list(read_output_log(tmp_path / "bad.jsonl"))


# ------------------------------------------------------------------ tokens


def texts_of(tmp_path: Path, *rows: Any, tokenizer: Any = None, **options: Any) -> Any:
    log = write(tmp_path / "log.jsonl", *rows)
    return to_texts(read_output_log(log), tokenizer, SAMPLING, **options)


def test_token_ids_need_no_tokenizer_and_are_taken_as_they_are(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, {"prompt": [7, 8], "output": [9, 9]})
    assert (text.prompt_token_ids, text.token_ids) == ((7, 8), (9, 9))
    assert text.stopped
    assert text.sampling == SAMPLING


def test_a_text_that_ended_by_itself_gets_the_end_token(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, {"prompt": "ab", "output": "cd"}, tokenizer=tokenizer())
    assert text.prompt_token_ids == ids("ab")
    assert text.token_ids == (*ids("cd"), END)
    assert text.stopped


def test_an_end_token_is_not_given_twice(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, {"prompt": "ab", "output": "cd<end>"}, tokenizer=tokenizer())
    assert text.token_ids == (*ids("cd"), END)


def test_without_an_end_token_none_is_given(tmp_path: Path) -> None:
    (text,) = texts_of(tmp_path, {"prompt": "ab", "output": "cd"}, tokenizer=char_tokenizer())
    assert text.token_ids == ids("cd")


def test_a_longer_output_is_cut_and_did_not_end(tmp_path: Path) -> None:
    rows = [{"prompt": [1], "output": list(range(length))} for length in (8, 9)]
    exact, longer = texts_of(tmp_path, *rows)
    assert exact.stopped
    assert not longer.stopped
    assert longer.token_ids == tuple(range(8))


def test_text_prompts_are_users_messages_unless_raw(tmp_path: Path) -> None:
    chatty = tokenizer(chat_template=TEMPLATE)
    row = {"prompt": "ab", "output": "c"}
    (text,) = texts_of(tmp_path, row, tokenizer=chatty)
    assert text.prompt_token_ids == ids("<user>ab<a>")
    (raw,) = texts_of(tmp_path, row, tokenizer=chatty, chat=False)
    assert raw.prompt_token_ids == ids("ab")


def test_a_chat_goes_through_the_template(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "u"), ("assistant", "v"), ("user", "w")]
    chat = [{"role": role, "content": content} for role, content in turns]
    row = {"prompt": chat, "output": "c"}
    (text,) = texts_of(tmp_path, row, tokenizer=tokenizer(chat_template=TEMPLATE))
    assert text.prompt_token_ids == ids("<system>s<user>u<assistant>v<user>w<a>")
    with pytest.raises(ValueError, match=r"log\.jsonl:1 holds a chat, .* no chat template"):
        texts_of(tmp_path, row, tokenizer=tokenizer())


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log\.jsonl:1 holds text, which needs a tokenizer"):
        texts_of(tmp_path, {"prompt": "a", "output": [1]})
