"""Options that commands share, as frozen dataclasses; the docstrings are the help texts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from .depth_limit import deepest_depth

Rule = Literal["rejection", "coupled", "greedy"]
DType = Literal["auto", "bfloat16", "float16", "float32", "float64"]


def _int_list(args: list[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in args[0].split(",") if part.strip())


def _name_list(args: list[str]) -> tuple[str, ...]:
    # A table's own entries are separated by commas too: "off,table:1-4=4,5-=0" is two names.
    parts = re.split(r",(?!\s*\d+(?:-\d*)?=)", args[0])
    return tuple(part.strip() for part in parts if part.strip())


def _shown(values: tuple[object, ...]) -> list[str]:
    return [",".join(map(str, values))]


IntList = Annotated[
    tuple[int, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT,INT,...",
        instance_from_str=_int_list,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=_shown,
    ),
]
"""Whole numbers in one word: "1,4,16"."""
NameList = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME,...",
        instance_from_str=_name_list,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=_shown,
    ),
]
"""Names of schedulers in one word."""


CostName = Annotated[str | None, arg(aliases=["--cost-from"])]
"""What `load_cost` takes. The alias must be on the whole type: tyro drops it from a part of a union."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOptions:
    """Options of every command."""

    seed: int = 0
    """Seed of everything random."""
    device: str | None = None
    """"cpu", "cuda" or "cuda:1"; by default a GPU if there is one."""
    threads: int = 1
    """Threads of torch on the CPU; one is steadier than two where cores are shared."""
    out: Path | None = None
    """Folder for files."""
    json: bool = False
    """Print the result as one JSON document on stdout, and everything else on stderr."""
    quiet: bool = False
    """No progress, results only."""
    debug: bool = False
    """Show where an error came from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(CommonOptions):
    """Options of commands that load models."""

    target: str = "default"
    """Model to decode: a hub name, a local folder, or "default" (SmolLM2-135M-Instruct, fetched
    once)."""
    draft: str = "prompt-lookup"
    """"prompt-lookup", "none", "smollm2-eagle3" (shipped, for the default target), the folder of an EAGLE-3
    checkpoint, or a smaller model with the same tokenizer."""
    dtype: DType = "auto"
    """Number format of the weights; "auto" takes bfloat16, on a CPU without instructions for it
    float32."""
    max_num_speculative_tokens: int | None = None
    """Deepest depth, K; by default that of the trace where one is replayed, else 32 with prompt lookup, whose
    tokens cost nothing to draft, and 8 with a draft model."""
    max_num_seqs: int = 32
    """Sequences that run at once."""
    verification: Rule = "rejection"
    """Rule for sampled text: "rejection" accepts most, "coupled" gives the same text under every
    policy."""
    cost: CostName = None
    """Pass times: a cost.json of "specdepth profile", a shipped one by name ("cpu-smollm2-bf16"), or step
    times of another engine (CSV)."""

    @property
    def top(self) -> int:
        """K where models run."""
        return deepest_depth(self.draft, self.max_num_speculative_tokens)


FIXED_DEPTHS = (1, 2, 4, 8)
LOADS = (1, 4, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions(ModelOptions):
    """Options of commands that decode many prompts."""

    prompts: str = "default"
    """"default" (shipped: code, maths, chat, summaries), or a file: one prompt a line, or JSONL
    with the key "prompt"."""
    max_new_tokens: int = 48
    """Longest answer, in tokens."""
