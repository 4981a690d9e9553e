"""Logs of a server's prompts and outputs, JSONL with one request a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import SamplingParams
from .prompts import Prompt, Split, render, split_of
from .tokenizers import end_token_ids
from .trace_text import TextToRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = str | tuple[int, ...]
"""A text or its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumns:
    """Keys of a line's object."""

    prompt: str = "prompt"
    """A text, a list of token ids, or a chat (a list of objects with "role" and "content")."""
    output: str = "output"
    """A text or a list of token ids."""
    kind: str | None = None
    """What sort of work it is; None calls all of them "log"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedOutput:
    """One request of a log."""

    id: str
    """File name and line."""
    kind: str
    split: Split
    prompt: Piece | tuple[dict[str, str], ...]
    output: Piece
    """Empty where the server gave none."""

    @property
    def needs_tokenizer(self) -> bool:
        """Whether any of it is text."""
        is_ids = all(isinstance(token, int) for token in self.prompt)
        return isinstance(self.prompt, str) or isinstance(self.output, str) or not is_ids


def read_output_log(path: Path | str, columns: LogColumns | None = None) -> Iterator[LoggedOutput]:
    """Read a log line by line; blank lines are passed over.

    Args:
        path: JSONL; .gz is unpacked on the way.
        columns: where prompt and output are.

    Raises:
        ValueError: no such file, not UTF-8, or a line that is no such object; the sentence names it.
    """
    path, columns = Path(path), columns or LogColumns()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(line.decode("utf-8-sig"), columns, path, number)
    except FileNotFoundError:
        raise ValueError(f"no output log {path}.") from None
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise ValueError(f"output log {path} cannot be read as UTF-8 text: {error}.") from error


def to_texts(
    outputs: Iterable[LoggedOutput],
    tokenizer: PreTrainedTokenizerBase | None,
    sampling: SamplingParams,
    *,
    chat: bool = True,
) -> list[TextToRecord]:
    """Tokens of logged requests, as far as a log has them.

    A text that is shorter than `sampling.max_new_tokens` is taken to have ended by itself, and gets
    the tokenizer's end token; a longer one is cut there. Token ids are taken as they are. A text's
    tokens are those that the tokenizer gives it, which a model may have spelled otherwise.

    Args:
        outputs: none of them empty.
        tokenizer: of the model that answered; None where all are token ids.
        sampling: how they were sampled, for the trace.
        chat: whether text prompts are users' messages, to be put into the chat template.

    Raises:
        ValueError: text without a tokenizer, or a chat without a template.
    """
    ends = () if tokenizer is None else end_token_ids(None, None, tokenizer)
    return [_to_text(one, tokenizer, sampling, chat, ends) for one in outputs]


def _to_text(
    one: LoggedOutput,
    tokenizer: PreTrainedTokenizerBase | None,
    sampling: SamplingParams,
    chat: bool,
    ends: Sequence[int],
) -> TextToRecord:
    limit = sampling.max_new_tokens
    if one.needs_tokenizer and tokenizer is None:
        raise ValueError(f"{one.id} holds text, which needs a tokenizer; name one.")
    output = one.output
    if isinstance(output, str):
        assert tokenizer is not None
        output = tuple(tokenizer(output, add_special_tokens=False)["input_ids"])
        if ends and output[-1:] != ends[:1]:
            output = (*output, ends[0])
    prompt = one.prompt
    if not all(isinstance(token, int) for token in prompt):
        assert tokenizer is not None
        prompt = _render(one, tokenizer, chat)
    return TextToRecord(
        id=one.id,
        kind=one.kind,
        split=one.split,
        prompt_token_ids=prompt,  # type: ignore[arg-type]  # token ids by now
        sampling=sampling,
        token_ids=output[:limit],
        stopped=len(output) <= limit,
    )


def _render(one: LoggedOutput, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[int, ...]:
    if isinstance(one.prompt, str):
        prompt = Prompt(id=one.id, kind=one.kind, text=one.prompt, split=one.split, chat=chat)
        return tuple(render(tokenizer, prompt))
    if not tokenizer.chat_template:
        raise ValueError(f"{one.id} holds a chat, and the tokenizer has no chat template.")
    turns = [turn for turn in one.prompt if isinstance(turn, dict)]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _parse(line: str, columns: LogColumns, path: Path, number: int) -> LoggedOutput:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); expected one object a line.") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deep; expected one object a line.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {line.strip()[:40]!r}.")
    for column in filter(None, (columns.prompt, columns.output, columns.kind)):
        if column not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise ValueError(f"{where}: there is no {column!r}; its keys are {keys}.")
    given, output = row[columns.prompt], _piece(row[columns.output])
    prompt = _piece(given) or _chat(given)
    if not prompt:
        raise ValueError(
            f"{where}: expected a text, a list of token ids or a chat under {columns.prompt!r}, got "
            f"{_short(given)}."
        )
    if output is None:
        raise ValueError(
            f"{where}: expected a text or a list of token ids under {columns.output!r}, got "
            f"{_short(row[columns.output])}."
        )
    kind = "log" if columns.kind is None else row[columns.kind]
    if not isinstance(kind, str):
        raise ValueError(f"{where}: expected a text under {columns.kind!r}, got {_short(kind)}.")
    key = given if isinstance(given, str) else json.dumps(given)
    return LoggedOutput(
        id=f"{path.name}:{number}", kind=kind, split=split_of(key), prompt=prompt, output=output
    )


def _piece(value: Any) -> Piece | None:
    """A text or token ids; None for anything else."""
    if isinstance(value, str):
        value.encode()  # JSON can spell halves of characters, which no tokenizer takes
        return value
    if isinstance(value, list) and all(_is_token(token) for token in value):
        return tuple(value)
    return None


def _chat(value: Any) -> tuple[dict[str, str], ...] | None:
    is_chat = isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in value
    )
    return tuple(value) if is_chat else None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
