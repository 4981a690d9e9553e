"""Prompts for distilling a draft model, endless and seeded; none of them is a shipped prompt.

    chat        user turns that the target writes itself [Xu et al. 2024, Magpie, arXiv 2406.08464]: given
                its chat template up to the user's turn, an aligned model goes on with a question
    editing     functions of standard-library modules that examples/make_prompts.py leaves out
    completion  heads of such functions, to be gone on with as they stand
    maths       word problems with made-up numbers
    summary     docstrings of such modules, to be summarised
    extraction  made-up records with other names, goods and layouts than the shipped ones

Only chat needs the model; see `texts.py`.
"""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from make_prompts import MODULES, edits_for

KINDS = ("chat", "editing", "completion", "maths", "summary", "extraction")
SHARES = (0.5, 0.13, 0.1, 0.12, 0.09, 0.06)
"""Of the prompts. Chat is most diverse, and hardest to draft for."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt: a user's message, or a text to go on with as it stands."""

    kind: str
    text: str
    chat: bool = True


def tasks(seed: int) -> Iterator[Task]:
    """Endless mix by `SHARES`; the text of a chat task is left for the target to write."""
    draw = random.Random(seed)
    functions, docstrings = library_functions(), library_docstrings()
    while True:
        kind = draw.choices(KINDS, SHARES)[0]
        if kind == "chat":
            yield Task(kind, "")
        elif kind == "editing":
            yield Task(kind, editing(draw, draw.choice(functions)))
        elif kind == "completion":
            yield Task(kind, completion(draw, functions), chat=False)
        elif kind == "maths":
            yield Task(kind, word_problem(draw))
        elif kind == "summary":
            yield Task(kind, summary(draw, docstrings))
        else:
            yield Task(kind, records(draw))


@cache
def library_functions() -> list[tuple[ast.FunctionDef, str]]:
    """Functions of 6 to 32 lines with their dedented source."""
    found = []
    for tree, lines in library_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            body = lines[node.lineno - 1 : node.end_lineno]
            if 6 <= len(body) <= 32:
                source = "\n".join(body)
                if len(source) <= 1400:
                    found.append((node, textwrap.dedent(source).strip()))
    return found


@cache
def library_docstrings() -> list[str]:
    """Docstrings of 400 to 1400 characters."""
    docs = (
        ast.get_docstring(node)
        for tree, _ in library_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return [doc for doc in docs if doc and 400 <= len(doc) <= 1400]


@cache
def library_trees() -> list[tuple[ast.Module, list[str]]]:
    """Syntax tree and lines of each module of the standard library that no shipped prompt is from."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    found = []
    for path in sorted(root.rglob("*.py")):
        if skipped.intersection(path.relative_to(root).parts) or path.stem in MODULES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            found.append((ast.parse(text), text.splitlines()))
        except SyntaxError:  # lib2to3 and others keep such files
            continue
    return found


def editing(draw: random.Random, function: tuple[ast.FunctionDef, str]) -> str:
    """An edit that applies to this function."""
    node, source = function
    edits = edits_for(node)
    name = node.name.strip("_") or "work"
    edits.append(f"Rename this function to `{name}_{draw.choice(('new', 'safe', 'fast', 'v2'))}`.")
    edits.append(draw.choice(("Explain what this function does.", "Write a unit test for this.")))
    ask = draw.choice(edits)
    tail = draw.choice(
        (" Reply with the whole function.", " Show the full code.", " Reply with the code only.")
    )
    return f"{ask}{tail}\n\n```python\n{source}\n```"


def completion(draw: random.Random, functions: list[tuple[ast.FunctionDef, str]]) -> str:
    """The first lines of a function, past its docstring if it has one."""
    node, source = draw.choice(functions)
    lines = source.splitlines()
    start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else None
    cut = (start - node.lineno) if start else draw.randint(1, 4)
    head = "\n".join(lines[: max(cut, 1)])
    imports = draw.choice(
        ("", "from typing import List\n\n\n", "import math\n\n\n", "import re\n\n")
    )
    return imports + head + "\n"


def summary(draw: random.Random, docstrings: list[str]) -> str:
    """A docstring and what to make of it."""
    ask = draw.choice(
        (
            "Summarise the following text in two sentences.",
            "Summarise the text below for a beginner.",
            "What are the three main points of this text?",
            "Write a short summary of this passage.",
            "Rewrite this text in simpler words.",
            "Turn this text into a list of bullet points.",
        )
    )
    return f"{ask}\n\n{draw.choice(docstrings)}"


# fmt: off
NAMES = [
    "Tom", "Maria", "Olga", "Peter", "Sven", "Ayesha", "Ling", "Carlos", "Ruth", "Ben", "Nora", "Yusuf",
]
THINGS = [
    "apples", "pencils", "marbles", "books", "stickers", "cookies", "flowers", "cards", "eggs", "shirts",
]
PLACES = ["Prague", "Dublin", "Porto", "Riga", "Kyoto", "Cairo", "Lima", "Oslo", "Perth", "Malmo"]
# fmt: on


def word_problem(draw: random.Random) -> str:
    """Grade-school arithmetic."""
    a, b, c = draw.randint(2, 60), draw.randint(2, 30), draw.randint(2, 12)
    one, two = draw.sample(NAMES, 2)
    thing, other = draw.sample(THINGS, 2)
    return draw.choice(
        (
            f"{one} has {a} {thing} and buys {b} more every week. After {c} weeks {one} gives half of "
            f"the {thing} to {two}. How many {thing} does {one} have left?",
            f"A shop sells {thing} for ${c} each and {other} for ${b} each. {one} buys {a} {thing} and "
            f"{c} {other}. How much does {one} pay in total?",
            f"{one} reads {b} pages a day. A book has {a * b} pages. {two} reads twice as fast. How many "
            f"days does {two} need for the book?",
            f"{one} earns ${b} an hour and works {c} hours a day for {draw.randint(3, 6)} days. {one} "
            f"spends ${a} on food. How much money is left?",
            f"There are {a} {thing} in a box. {one} takes {min(b, a)} of them, and {two} puts {c} boxes "
            f"of {b} {thing} beside it. How many {thing} are there now?",
            f"A train travels {a + 40} kilometres in {c} hours. How far does it travel in {b} hours at "
            "the same speed?",
            f"{one} is {a} years old. {two} is {c} years younger than {one}. In {b} years, how old will "
            "they be together?",
            f"{two} baked {a * c} {other} and packed them in boxes of {c}. {one} bought {b} boxes at "
            f"${c} each. How many boxes were made, and how much did {one} pay?",
        )
    )


def records(draw: random.Random) -> str:
    """A few made-up facts and what to extract from them."""
    rows = []
    layout = draw.randrange(3)
    for _ in range(draw.randint(3, 6)):
        who, where, thing = draw.choice(NAMES), draw.choice(PLACES), draw.choice(THINGS)
        count, number = draw.randint(1, 90), draw.randint(100, 9999)
        rows.append(
            (
                f"{who} from {where} bought {count} {thing} for ${number / 100:.2f} (receipt {number}).",
                f"{number}: {who} ({where}) reported broken {thing}, {count} pieces.",
                f"name={who}; city={where}; item={thing}; count={count}; id={number}",
            )[layout]
        )
    ask = draw.choice(
        (
            "Extract all rows as a JSON list with name, city, item and count.",
            "Make a CSV table of the following facts.",
            "List all people and cities in the text.",
            "Make a Markdown table with one row for each entry.",
            "Which entry has the largest count? List all counts.",
        )
    )
    return f"{ask}\n\n" + "\n".join(rows)
