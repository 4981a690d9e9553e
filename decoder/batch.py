"""Who runs and who waits: slots, queue, and the KV blocks that both compete for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from specdepth.scheduler.state import Ints, SequenceHistory

from .config import EngineConfig
from .kv_cache import BlockPool
from .request import Request
from .runner import ModelRunner
from .sequences import SequenceTable
from .tokenizers import Detokenizer


class Batch:
    """Running sequences in their slots, and the requests behind them.

    Attributes:
        waiting: requests without a slot, next one first.
        order: int64 [running] active slots, longest admitted first.
        history: acceptance of the running sequences.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, seqs: SequenceTable, pool: BlockPool
    ) -> None:
        self.seqs, self.pool = seqs, pool
        self.history = SequenceHistory(config.max_num_seqs, config.max_num_speculative_tokens)
        self.waiting: deque[Request] = deque()
        self.order: Ints = np.zeros(0, np.int64)
        self._config, self._runner = config, runner
        self._running: dict[int, Request] = {}
        self.watched: dict[int, Detokenizer] = {}
        """Detokenizers of the running sequences that have stop strings."""

    def __getitem__(self, slot: int) -> Request:
        """Request in `slot`."""
        return self._running[slot]

    def requests(self) -> Iterator[Request]:
        """All requests, waiting and running."""
        yield from self.waiting
        yield from self._running.values()

    def request_ids(self, slots: Ints) -> set[str]:
        """Ids of the requests in `slots`, as far as they still are there."""
        return {self._running[s].request_id for s in slots.tolist() if s in self._running}

    def slot_of(self, request_id: str) -> int | None:
        """Slot of a running request."""
        for slot, request in self._running.items():
            if request.request_id == request_id:
                return slot
        return None

    def admit(self) -> None:
        """Move waiting requests into free slots while the pool holds their tokens and leaves every
        running sequence a block to grow into: or a victim would come back only to be evicted again.
        """
        while self.waiting and len(self.order) < self._config.max_num_seqs:
            request = self.waiting[0]
            length = len(request.prompt_token_ids) + len(request.generated)
            needed = -(-length // self.pool.block_size)
            if len(self.order) and needed + len(self.order) > self.pool.num_free:
                return
            slot = int(self.seqs.active.argmin())
            at = np.array([slot])
            self.seqs.start(slot, request)
            self.pool.grow(at, np.array([length]))
            self.history.reset(at)
            if request.history is not None:
                self.history.restore(slot, request.history)
                request.history = None
            if request.detokenizer is not None:
                self.watched[slot] = request.detokenizer
            self._runner.start(slot, request)
            self._running[slot] = self.waiting.popleft()
            self.order = np.append(self.order, slot)

    def leave(self, slot: int) -> Request:
        """Take the sequence out of its slot; its request knows its tokens and history again."""
        at = np.array([slot])
        request = self._running.pop(slot)
        self.watched.pop(slot, None)
        self.seqs.stop(slot, request)
        request.history = self.history.save(slot)
        self.pool.release(at)
        self._runner.stop(at)
        self.order = self.order[self.order != slot]
        return request

    def take_all(self) -> list[Request]:
        """Empty slots, queue and pool, whatever state an interrupt left them in."""
        for slot, request in self._running.items():
            self.seqs.stop(slot, request)
            request.history = self.history.save(slot)
        taken = list(self.requests())
        self._runner.stop(np.flatnonzero(self.seqs.active))
        self.waiting.clear()
        self._running.clear()
        self.watched.clear()
        self.seqs.active[:] = False
        self.order = self.order[:0]
        self.pool.reset()
        return taken

    def preempt_youngest(self) -> int:
        """Send the last admitted sequence back to the head of the queue, to be recomputed later with
        the same text; returns the slot that it had.
        """
        victim = int(self.order[-1])
        request = self.leave(victim)
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        return victim

    def reserve(self, slots: Ints, wanted: Ints) -> tuple[Ints, Ints, list[int]]:
        """Give each sequence blocks for the tokens that it may commit, preempting if need be.

        Args:
            slots: [R] decoding sequences, oldest first.
            wanted: [R] their depths.

        Returns:
            Rows of `slots` that still run, their depths, and the slots that were preempted.
        """
        rows = np.arange(len(slots))
        victims: list[int] = []
        while True:
            stay, depths = slots.take(rows), wanted.take(rows)
            lengths = self.seqs.num_tokens.take(stay)
            if self._config.lookahead == "clip":
                depths = self._clip(stay, lengths, depths)
            # The bonus token's own KV is written in the next round: length + depth is enough.
            if self.pool.try_grow(stay, lengths + depths):
                return rows, depths, victims
            victims.append(self.preempt_youngest())
            rows = rows[stay != victims[-1]]

    def _clip(self, slots: Ints, lengths: Ints, depths: Ints) -> Ints:
        """Cut depths to free blocks, the youngest's first; a block held already is its holder's."""
        pool = self.pool
        must = pool.missing(slots, lengths)
        spare = max(pool.num_free - int(must.sum()), 0)
        wanted = pool.missing(slots, lengths + depths) - must
        granted = np.clip(spare - (np.cumsum(wanted) - wanted), 0, wanted)
        room = (pool.num_allocated[slots] + must + granted) * pool.block_size
        clipped: Ints = np.minimum(depths, room - lengths)
        return clipped
