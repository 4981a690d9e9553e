"""The target's hidden states along the texts of `texts.py`: what an EAGLE-3 draft model reads and imitates.

    python examples/draft_model/states.py --texts texts

For each token: the inputs of the layers that the draft model reads, and the final state, from which the
target's law follows. About 4.6 kB a token for SmolLM2. Writes one file a shard; run again, it goes on.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdepth import SpeculativeDecoder
from specdepth.decoder.kv_cache import consecutive_tables


@dataclass(frozen=True, slots=True)
class Config:
    """What to compute."""

    texts: Path
    """Folder of the shards."""
    layers: tuple[int, ...] = (2, 15, 29)
    """Layers of the target whose inputs the draft model is to read: early, middle, last."""
    model: str = "default"


def main(config: Config) -> None:
    """Write the missing shards."""
    torch.set_num_threads(1)
    decoder = SpeculativeDecoder.from_pretrained(
        config.model,
        draft="none",
        dtype="bfloat16",  # as the shards keep them
        max_num_seqs=64,
        max_model_len=1024,
        num_kv_blocks=2048,
    )
    reader = StateReader(decoder, config.layers)
    for path in sorted(config.texts.glob("texts-????.npz")):
        out = path.with_name(path.name.replace("texts", "states"))
        if out.exists():
            continue
        texts, started = np.load(path), time.perf_counter()
        states = reader.read(texts["tokens"].astype(np.int64), texts["lengths"])
        part = out.with_suffix(".part.npz")
        np.savez(part, states=states.view(torch.int16).numpy(), layers=np.array(config.layers))
        os.replace(part, out)
        rate = len(states) / (time.perf_counter() - started)
        print(f"{out.name}: {len(states)} tokens, {rate:.0f} tokens/s", flush=True)


class StateReader:
    """Runs the target over whole texts, many in a pass."""

    def __init__(self, decoder: SpeculativeDecoder, layers: tuple[int, ...]) -> None:
        self.target, self.max_tokens = decoder.target, 1024
        self.target.watch(layers)
        self._final: list[Tensor] = []
        body: Any = self.target.model.get_decoder()  # type: ignore[no-untyped-call]
        body.norm.register_forward_hook(lambda _, __, out: self._final.append(out[0]))

    @torch.inference_mode()
    def read(self, tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        """States [T, (layers + 1) * H] of texts laid end to end, the final state last."""
        ends = np.cumsum(lengths)
        parts, first = [], 0
        while first < len(lengths):
            room = ends[first] - lengths[first] + self.max_tokens
            last = max(int(np.searchsorted(ends, room, side="right")), first + 1)
            start, stop = ends[first] - lengths[first], ends[last - 1]
            parts.append(self._pass(tokens[start:stop], lengths[first:last]))
            first = last
        return torch.cat(parts)

    def _pass(self, tokens: np.ndarray, lengths: np.ndarray) -> Tensor:
        blocks = -(-lengths // self.target.block_size)
        tables = consecutive_tables(blocks)
        layout = self.target.layout(tables, np.zeros(len(lengths), np.int64), lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        self._final.clear()
        self.target.forward(
            torch.from_numpy(tokens), torch.from_numpy(positions), layout, np.zeros(1, np.int64)
        )
        assert self.target.states is not None
        return torch.cat([self.target.states, self._final[0]], 1)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, description=__doc__))
