"""A trace of prompt lookup over the texts of `texts.py`: more answers for a survival model to learn from.

    python examples/draft_model/trace.py --texts texts --out distilled.npz
    specdepth fit-survival smollm2-prompt-lookup-greedy distilled.npz --cost cpu-smollm2-bf16 --out survival

No shipped prompt is among the texts, so nothing of the held-out requests is learned. What the target says of
its next token comes from the states of `states.py`, whose last ones are those that its head reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdepth import SpeculativeDecoder
from specdepth.agents.results import collect_versions
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompt_lookup import LookupConfig
from specdepth.decoder.signals import law_signals
from specdepth.decoder.trace_files import load_trace
from specdepth.decoder.trace_text import TextToRecord, record_lookup
from specdepth.scheduler.state import Floats

MIN_TOKENS = 4
"""Shorter answers leave nothing to draft."""
MAX_NEW_TOKENS = 128
"""Limit of the shipped traces."""


@dataclass(frozen=True, slots=True)
class Config:
    """What to record."""

    texts: Path
    """Folder of the shards of texts and states."""
    out: Path
    """File of the trace."""
    like: str = "smollm2-prompt-lookup-greedy"
    """Trace whose depth limit and n-grams are taken over."""
    model: str = "default"
    """The target."""
    threads: int = 1
    """Of torch."""


def main(config: Config) -> None:
    """Record all shards that have states."""
    torch.set_num_threads(config.threads)
    decoder = SpeculativeDecoder.from_pretrained(
        config.model, draft="none", dtype="bfloat16", max_num_seqs=1, max_model_len=64
    )
    info = replace(
        load_trace(config.like).info,
        versions=collect_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    texts: list[TextToRecord] = []
    shards = sorted(config.texts.glob("states-????.npz"))
    if not shards:
        raise SystemExit(f"{config.texts} has no shards of states; run states.py first.")
    for path in shards:
        texts += _texts_of(path, decoder, len(texts))
        print(f"{path.name}: {len(texts)} answers", flush=True)
    trace = record_lookup(texts, info, LookupConfig(**info.lookup))
    trace.save(config.out)
    print(f"{config.out}: {trace.num_positions} positions")


def _texts_of(path: Path, decoder: SpeculativeDecoder, first: int) -> Iterator[TextToRecord]:
    """Answers of a shard; `first` is the number of the first one."""
    shard = np.load(path.with_name(path.name.replace("states", "texts")))
    lengths, prompts = shard["lengths"].astype(int), shard["prompt_lengths"].astype(int)
    tokens, starts = shard["tokens"].astype(int), np.cumsum(lengths) - lengths
    model: Any = decoder.target.model
    width = model.config.hidden_size
    both = torch.from_numpy(np.load(path)["states"]).view(torch.bfloat16)
    top1, entropy = _laws(both[:, -width:].contiguous(), model.get_output_embeddings())
    for start, prompt, length in zip(starts, prompts, lengths, strict=True):
        num_tokens = length - prompt
        answer = tokens[start + prompt : start + length].tolist()
        before = slice(start + prompt - 1, start + length - 1)  # states of the tokens before
        if num_tokens < MIN_TOKENS:
            continue
        yield TextToRecord(
            id=f"distilled-{first}",
            kind="distilled",
            split="train",
            prompt_token_ids=tokens[start : start + prompt].tolist(),
            sampling=SamplingParams(max_new_tokens=max(MAX_NEW_TOKENS, num_tokens)),
            token_ids=answer,
            stopped=answer[-1] in decoder.end_token_ids,
            target_top1=top1[before],
            target_entropy=entropy[before],
        )
        first += 1


@torch.inference_mode()
def _laws(states: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Floats, Floats]:
    """Largest probability and entropy in nats after each token, [T] each."""
    parts = [law_signals(head(part)) for part in torch.split(states, 2048)]
    top1, entropy = torch.cat(parts, 1).numpy()
    return top1, entropy


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
