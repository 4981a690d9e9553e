"""Texts with the target's hidden states, batched by length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Texts:
    """All shards of a folder in memory."""

    def __init__(self, folder: Path, held_out_shards: int) -> None:
        shards = sorted(folder.glob("states-????.npz"))
        if len(shards) <= held_out_shards:
            raise SystemExit(f"{folder} has {len(shards)} shards of states; run states.py first.")
        self.tokens: list[Tensor] = []
        self.starts: list[int] = []
        self.states: list[Tensor] = []
        self.finals: list[Tensor] = []
        self.train: list[int] = []
        self.kept: list[int] = []
        for place, path in enumerate(shards):
            texts = np.load(path.with_name(path.name.replace("states", "texts")))
            states = np.load(path)
            self.layers = tuple(states["layers"].tolist())
            both = torch.from_numpy(states["states"]).view(torch.bfloat16)
            width = both.shape[1] // (len(self.layers) + 1)
            arrays = (
                torch.from_numpy(texts["tokens"].astype(np.int64)),
                *torch.split(both, [len(self.layers) * width, width], 1),
            )
            lengths = texts["lengths"].tolist()
            first = len(self.tokens)
            for mine, array in zip((self.tokens, self.states, self.finals), arrays, strict=True):
                mine += torch.split(array, lengths)
            self.starts += texts["prompt_lengths"].tolist()
            group = self.kept if place < held_out_shards else self.train
            group += range(first, len(self.tokens))
        self.num_tokens = sum(len(self.tokens[i]) for i in self.train)
        self._plans: dict[int, list[list[int]]] = {}

    def answers(self) -> Tensor:
        """Tokens of all training answers."""
        return torch.cat([self.tokens[i][self.starts[i] :] for i in self.train])

    def coverage(self, names: Tensor) -> float:
        """Share of held-out answer tokens that are among `names`."""
        kept = torch.cat([self.tokens[i][self.starts[i] :] for i in self.kept])
        return float(torch.isin(kept, names).float().mean())

    def batch(self, step: int, num_tokens: int, seed: int) -> dict[str, Tensor]:
        """Batch number `step` of an endless order that depends on `seed` alone."""
        if -1 not in self._plans:
            self._plans[-1] = self._plan(self.train, num_tokens, np.random.default_rng(seed))
        per_epoch = len(self._plans[-1])
        epoch, place = divmod(step, per_epoch)
        if epoch not in self._plans:
            rng = np.random.default_rng((seed, epoch))
            plan = self._plan(self.train, num_tokens, rng)
            # Batches of an epoch vary in number; repeat or cut to keep the count of the first plan.
            self._plans = {-1: self._plans[-1], epoch: (plan * 2)[:per_epoch]}
        return self._collate(self._plans[epoch][place])

    def held_out(self, num_tokens: int) -> Iterator[dict[str, Tensor]]:
        """All held-out texts."""
        for rows in self._plan(self.kept, num_tokens, None):
            yield self._collate(rows)

    def _plan(
        self, rows: list[int], num_tokens: int, rng: np.random.Generator | None
    ) -> list[list[int]]:
        """Batches of texts of like length."""
        noise = rng.random(len(rows)) * 40 if rng is not None else np.zeros(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(self.tokens[rows[i]]) + noise[i])
        batches: list[list[int]] = []
        current: list[int] = []
        longest = 0
        for i in order:
            length = max(longest, len(self.tokens[rows[i]]))
            if current and length * (len(current) + 1) > num_tokens:
                batches.append(current)
                current, length = [], len(self.tokens[rows[i]])
            current.append(rows[i])
            longest = length
        batches.append(current)
        if rng is not None:
            rng.shuffle(batches)
        return batches

    def _collate(self, rows: list[int]) -> dict[str, Tensor]:
        def padded(parts: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([parts[i] for i in rows], batch_first=True)

        lengths = torch.tensor([len(self.tokens[i]) for i in rows])
        starts = torch.tensor([self.starts[i] for i in rows])
        at = torch.arange(int(lengths.max()) - 1)
        # Entry t predicts token t + 2: answer tokens, and what follows the last one is left out.
        wanted = (at + 2 >= starts[:, None]) & (at + 2 < lengths[:, None])
        return {
            "tokens": padded(self.tokens),
            "states": padded(self.states),
            "finals": padded(self.finals),
            "lengths": lengths,
            "wanted": wanted,
        }


def frequent_tokens(texts: Texts, count: int, vocab_size: int) -> Tensor:
    """The `count` most frequent tokens of the answers, in increasing order of id."""
    counts = torch.bincount(texts.answers(), minlength=vocab_size)
    # Ties, and tokens never seen, go by id: low ids are frequent merges.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:count].sort().values
