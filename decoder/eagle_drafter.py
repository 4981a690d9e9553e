"""Drafts with an EAGLE-3 model: a draft model that reads what the target thought."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from specdepth.scheduler.state import Ints

from .attention import PassLayout
from .drafters import DraftModel, DraftOptions
from .eagle_model import EagleModel
from .kv_cache import BlockPool
from .sequences import SequenceTable


class EagleDrafter(DraftModel):
    """A `DraftModel` whose first pass reads the target's states, and further ones its own.

    States of the target are kept in pages beside its keys and values, one for each token that it
    computed; those of rejected drafts are overwritten when their places come again. A sequence whose
    prompt is not computed yet cannot draft, since there is nothing to read.

    Args:
        model: allocated with the pool's blocks, beside its target.
        sequences: shared arrays over slots.
        pool: shared block tables.
        **options: see `DraftOptions`.
    """

    reads_target = True
    model: EagleModel

    def __init__(
        self,
        model: EagleModel,
        sequences: SequenceTable,
        pool: BlockPool,
        **options: Unpack[DraftOptions],
    ) -> None:
        super().__init__(model, sequences, pool, **options)
        self._names = model.names
        width, dtype, device = model.config.hidden_size, model.dtype, model.device
        places = (pool.num_blocks + 1) * pool.block_size
        self._target_states = torch.zeros(places, width, dtype=dtype, device=device)
        self._own = torch.zeros(sequences.num_slots, width, dtype=dtype, device=device)
        """State of the last entry of each row of the plan."""

    def read_target(self, write_index: Tensor, target_states: Tensor) -> None:
        """Keep states [T, A * H] of a target pass for the places [T] that it wrote to."""
        self._target_states.index_copy_(0, write_index, self.model.read(target_states))

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: PassLayout,
        logit_rows: Ints,
        rows: Ints,
        step: int,
    ) -> Tensor:
        at = torch.from_numpy(rows).to(self._own.device)
        states = self._own[at] if step else self._target_states[layout.write_index]
        logits = self.model.forward(ids, positions, layout, logit_rows, states)
        assert self.model.states is not None
        if len(self.model.states) == len(at):  # not a pass that only catches up
            self._own[at] = self.model.states
        return logits
