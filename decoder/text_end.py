"""Where texts end: budget, end token, stop string, or the end of a recording."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specdepth.scheduler.state import Ints

from .batch import Batch
from .request import FinishReason
from .runner import RoundResult


class TextEnd:
    """Cuts what a round emitted at the first end of each text.

    Args:
        end_token_ids: tokens that end a text; part of it.
    """

    def __init__(self, end_token_ids: Iterable[int]) -> None:
        self.token_ids: Ints = np.array(sorted(set(end_token_ids)), np.int64)

    def cut(
        self, batch: Batch, slots: Ints, result: RoundResult
    ) -> tuple[Ints, dict[int, FinishReason]]:
        """Return tokens that each sequence commits [R], and why a row ends, for those that do.

        Feeds the stop-string watchers, so it must run once a round.
        """
        seqs = batch.seqs
        lengths = seqs.num_tokens.take(slots)
        budget = seqs.max_tokens.take(slots) - lengths
        recorded = seqs.end_at.take(slots) - lengths
        count = np.minimum(result.num_accepted + 1, np.minimum(budget, recorded))
        at_end = count == recorded
        if result.tokens is not None and len(self.token_ids) and len(slots):
            ends = (result.tokens[:, :, None] == self.token_ids).any(-1)
            ends &= ~seqs.ignore_eos[slots][:, None]
            ends &= np.arange(result.tokens.shape[1]) < count[:, None]
            found = ends.any(1)
            count = np.where(found, ends.argmax(1) + 1, count)
            at_end |= found
        for slot, watcher in batch.watched.items():
            assert result.tokens is not None
            for row in np.flatnonzero(slots == slot).tolist():
                before = watcher.num_tokens
                watcher.append(result.tokens[row, : count[row]].tolist())
                if watcher.stopped:
                    count[row] = watcher.num_tokens - before
                    at_end[row] = True
        over = at_end | (count == budget)
        if not np.count_nonzero(over):
            return count, {}
        return count, {
            row: "stop" if at_end[row] else "length" for row in np.flatnonzero(over).tolist()
        }
