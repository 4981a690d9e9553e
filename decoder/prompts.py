"""Prompts: the shipped selection, users' own files, and mixes of both for workloads."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held-out"]
"""Policies learn and are chosen on "train" and are compared on "held-out"."""

KINDS = ("code-completion", "code-editing", "maths", "chat", "summary", "extraction")
"""Of the shipped prompts; they differ in how much of the answer repeats the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One text to be answered or continued."""

    id: str
    """Unique; begins with the source (see data/NOTICE)."""
    kind: str
    """What sort of work it is; results can be reported by kind."""
    text: str
    split: Split
    chat: bool = True
    """Whether it is a user's message, to be put into the chat template, or a text to go on with."""


def load_prompts(
    split: Split | None = None, kinds: Collection[str] | None = None
) -> tuple[Prompt, ...]:
    """Return the shipped prompts: 432, 72 of each of `KINDS`, half of them held out.

    No source item (function, passage, question) is in both halves. Lengths are 8 to 400 tokens of
    the default model before the chat template.

    Args:
        split: only this half.
        kinds: only these.

    Raises:
        ValueError: unknown split or kind.
    """
    _check_split(split)
    for kind in kinds or ():
        if kind not in KINDS:
            raise ValueError(
                f"unknown kind of prompt {kind!r}, expected some of {', '.join(KINDS)}."
            )
    data = (files("specdepth.decoder") / "data" / "prompts.jsonl.gz").read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(data).decode().splitlines()]
    prompts = (Prompt(**row) for row in rows)
    return tuple(
        prompt
        for prompt in prompts
        if (split is None or prompt.split == split) and (kinds is None or prompt.kind in kinds)
    )


def load_prompt_file(
    path: Path | str,
    column: str = "prompt",
    *,
    kind: str = "file",
    chat: bool = True,
    held_out_fraction: float = 0.5,
) -> tuple[Prompt, ...]:
    """Read a user's prompts: JSONL with one object a line, or plain text with one prompt a line.

    Blank lines are passed over. Which prompts are held out depends on their text alone, so equal
    texts are on the same side and a growing file keeps its split.

    Args:
        path: a name that ends with .jsonl or .json is JSONL, optionally followed by .gz.
        column: key of the prompt's text in JSONL.
        kind: goes into `Prompt.kind`.
        chat: whether these are users' messages; see `Prompt.chat`.
        held_out_fraction: expected share held out, 0..1.

    Raises:
        ValueError: no such file, not UTF-8, a line that is not such an object, or no prompt at all.
    """
    path = Path(path)
    if not 0 <= held_out_fraction <= 1:
        raise ValueError(f"held_out_fraction must be in 0..1, got {held_out_fraction}.")
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"no prompt file {path}.") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path} cannot be read as UTF-8 text: {error}.") from error
    is_jsonl = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    prompts = []
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        text = _text_of(line, column, f"{path}, line {number}") if is_jsonl else line.rstrip("\r")
        split = split_of(text, held_out_fraction)
        prompt_id = f"{path.name}:{number}"
        prompts.append(Prompt(id=prompt_id, kind=kind, text=text, split=split, chat=chat))
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt.")
    return tuple(prompts)


def split_of(text: str, held_out_fraction: float = 0.5) -> Split:
    """Split of a prompt, by its text alone."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "held-out" if share < held_out_fraction else "train"


def _text_of(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); expected one object a line.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with the key {column!r}, got {line[:40]!r}.")
    text = row.get(column)
    if not isinstance(text, str) or not text:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"{where}: expected a text under {column!r}; its keys are {keys}.")
    return text


def _check_split(split: str | None) -> None:
    if split is not None and split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}, expected 'train' or 'held-out'.")


def mix(prompts: Sequence[Prompt], n: int, seed: int = 0) -> tuple[Prompt, ...]:
    """Return `n` of `prompts`, round robin over their kinds in order of first appearance.

    Each kind is shuffled by `seed` and starts again from its first prompt when it runs out, so every
    beginning of the mix is mixed too, and a longer mix begins with the shorter one.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to mix.")
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    shuffled = [[kind[i] for i in rng.permutation(len(kind))] for kind in by_kind.values()]
    picked = (divmod(i, len(shuffled)) for i in range(n))
    return tuple(shuffled[kind][turn % len(shuffled[kind])] for turn, kind in picked)


def default_mix(n: int, seed: int = 0, split: Split | None = "held-out") -> tuple[Prompt, ...]:
    """Return `n` shipped prompts, mixed as `mix` does."""
    return mix(load_prompts(split), n, seed)


def benchmark_prompts() -> tuple[Prompt, ...]:
    """Return the 16 held-out prompts that the speed benchmarks decode, always the same."""
    return default_mix(16, seed=0, split="held-out")


def render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return the token ids that a model is given for `prompt`.

    A chat prompt goes through the tokenizer's chat template, if it has one, as a user's message with
    the answer's beginning opened. It returns tokens rather than text, since a template already holds
    the tokens that tokenising its text would add once more.
    """
    if prompt.chat and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    return [int(i) for i in ids]
