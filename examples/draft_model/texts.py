"""The target's own answers to training prompts: what a draft model is distilled on.

    python examples/draft_model/texts.py --out texts --num-texts 12000

Two shards of three are greedy, the third is sampled at temperature 0.7. Writes one file a shard and goes on
where an interrupted run stopped; `--shards 0 2` takes every second shard, so that several processes can
share the work. Decodes with prompt lookup under the shipped depth rule: the text is the target's own all the
same, and takes a quarter less time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from prompts import Task, tasks

from specdepth import SamplingParams, SpeculativeDecoder
from specdepth.decoder.prompts import Prompt, load_prompts, render
from specdepth.scheduler.baselines.registry import make_scheduler
from specdepth.scheduler.cost_files import load_cost

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHIPPED = 9000
"""Number of the first shard of answers to shipped prompts."""


@dataclass(frozen=True, slots=True)
class Config:
    """What to decode."""

    out: Path
    """Folder of the shards."""
    num_texts: int = 12_000
    shard_size: int = 192
    shards: tuple[int, int] = (0, 1)
    """This process takes shards i with i % second == first."""
    shipped_answers: int = 4
    """Answers to each shipped prompt of the training split, the first greedy; no held-out one is used."""
    max_new_tokens: int = 144
    max_prompt_tokens: int = 400
    seed: int = 0
    model: str = "default"
    cost: str = "cpu-smollm2-bf16"
    rule: str = "rule:smollm2-prompt-lookup-cpu-bf16"
    """Depth scheduler of the decoding."""


def main(config: Config) -> None:
    """Write the missing shards."""
    import torch

    torch.set_num_threads(1)
    config.out.mkdir(parents=True, exist_ok=True)
    decoder = SpeculativeDecoder.from_pretrained(
        config.model, max_num_seqs=64, max_model_len=1024, cost=load_cost(config.cost)
    )
    num_shards = -(-config.num_texts // config.shard_size)
    shards = [*range(num_shards), *range(SHIPPED, SHIPPED + config.shipped_answers)]
    for index in shards[config.shards[0] :: config.shards[1]]:
        path = config.out / f"texts-{index:04}.npz"
        if path.exists():
            continue
        started, count = time.perf_counter(), 0
        rows = write_shard(decoder, config, index)
        count = sum(len(row) - int(start) for row, start in rows)
        save(path, rows)
        rate = count / (time.perf_counter() - started)
        print(f"{path.name}: {len(rows)} texts, {count} tokens, {rate:.0f} tokens/s", flush=True)


def write_shard(
    decoder: SpeculativeDecoder, config: Config, index: int
) -> list[tuple[list[int], int]]:
    """Token ids and prompt length of each text of a shard."""
    seed = config.seed * 1_000_003 + index
    if index >= SHIPPED:
        wanted = [Task(p.kind, p.text, p.chat) for p in load_prompts("train")]
        temperature = 0.7 if index > SHIPPED else 0.0
    else:
        wanted = list(islice(tasks(seed), config.shard_size))
        temperature = 0.7 if index % 3 == 2 else 0.0
    prompts = [as_tokens(decoder, task) for task in wanted]
    questions = write_questions(decoder, sum(prompt is None for prompt in prompts), seed)
    filled = [next(questions) if prompt is None else prompt for prompt in prompts]
    fitting = [prompt for prompt in filled if 4 <= len(prompt) <= config.max_prompt_tokens]
    sampling = [
        SamplingParams(
            temperature=temperature, seed=seed * 1000 + place, max_new_tokens=config.max_new_tokens
        )
        for place in range(len(fitting))
    ]
    rule = make_scheduler(config.rule)
    answers = decoder.generate(fitting, sampling=sampling, depth_scheduler=rule)
    return [
        (prompt + list(answer.token_ids), len(prompt))
        for prompt, answer in zip(fitting, answers, strict=True)
    ]


def as_tokens(decoder: SpeculativeDecoder, task: Task) -> list[int] | None:
    """Rendered prompt; None where the target has to write it first."""
    if not task.text:
        return None
    prompt = Prompt(id="", kind=task.kind, text=task.text, split="train", chat=task.chat)
    return render(tokenizer_of(decoder), prompt)


def write_questions(decoder: SpeculativeDecoder, count: int, seed: int) -> Iterator[list[int]]:
    """User turns by the target, put into its chat template."""
    tokenizer: Any = tokenizer_of(decoder)
    template: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": "QUESTION"}], add_generation_prompt=True, tokenize=False
    )
    head, tail = template.split("QUESTION")
    opened = tokenizer(head, add_special_tokens=False)["input_ids"]
    closed = tokenizer(tail, add_special_tokens=False)["input_ids"]
    sampling = [
        SamplingParams(temperature=0.8, top_k=200, seed=seed * 1000 + place, max_new_tokens=80)
        for place in range(count)
    ]
    ends = set(decoder.end_token_ids)
    for result in decoder.generate([opened] * count, sampling=sampling, depth_scheduler=0):
        written = [token for token in result.token_ids if token not in ends]
        yield opened + written + closed


def tokenizer_of(decoder: SpeculativeDecoder) -> PreTrainedTokenizerBase:
    """The target's, which prompts need."""
    if decoder.tokenizer is None:
        raise SystemExit("The model folder has no tokenizer.")
    return decoder.tokenizer


def save(path: Path, rows: list[tuple[list[int], int]]) -> None:
    """Write a shard at once."""
    part = path.with_suffix(".part.npz")
    np.savez(
        part,
        tokens=np.concatenate([np.array(row, np.uint16) for row, _ in rows]),
        lengths=np.array([len(row) for row, _ in rows]),
        prompt_lengths=np.array([start for _, start in rows]),
    )
    os.replace(part, path)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
