"""SGLang's adaptive speculation: a moving average of accepted drafts climbs a short ladder of depths.

Source: `python/sglang/srt/speculative/adaptive_spec_params.py` and `adaptive_step_router.py` of SGLang
(pull requests #21599, #23336, #24055), strategy "ema" with its default configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderBand:
    """Depths that a range of batch sizes may use.

    Raises:
        ValueError: a size below 1, no depths, or depths that do not ascend from 0 or more.
    """

    min_batch_size: int
    """Running sequences from which on the band holds, up to the next band."""
    depths: tuple[int, ...]
    up_hysteresis: float = 0.0
    """Tokens added to the threshold for going deeper."""
    down_hysteresis: float = 0.0
    """Tokens added to the threshold for going shallower; negative holds on longer."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.depths, self.depths[1:], strict=False))
        if self.min_batch_size < 1 or not self.depths or self.depths[0] < 0 or not ascending:
            raise ValueError(
                "a ladder band has a min_batch_size of 1 or more and ascending depths of 0 or more, "
                f"got {self.min_batch_size} and {self.depths}."
            )


DEFAULT_BANDS = (
    LadderBand(min_batch_size=1, depths=(1, 3, 5, 7), down_hysteresis=-0.25),
    LadderBand(min_batch_size=8, depths=(0, 1, 3)),
    LadderBand(min_batch_size=32, depths=(0, 1)),
    LadderBand(min_batch_size=64, depths=(0,)),
)
"""SGLang's own."""


class SGLangLadder:
    """One depth for the batch, from a ladder for its size; each ladder keeps its own average.

    After a round the average takes in the mean number of accepted drafts a sequence. Every
    `update_interval` rounds the depth goes down while the average is at most half a token below the
    next shallower depth, or else up while it is more than half a token below the present depth. At
    depth 0 nothing is learned; the next update tries the shallowest positive depth.

    SGLang's drafter always has tokens to offer. With prompt lookup some sequences draft nothing, so the
    mean is over those that drafted, and a round in which nobody did is not counted. Depths above K are
    left out of the ladders.

    Args:
        bands: ladders by batch size; the one with the smallest size also holds below it.
        initial_depth: where a ladder starts if it has that depth, else in its middle; SGLang starts at
            its `speculative_num_steps`, 3 for a chain.
        ema_weight: weight of a new round in the average.
        update_interval: rounds between updates.
        warmup_rounds: rounds before the first interval.

    Raises:
        ValueError: no bands, two of the same size, or a number out of its range.
    """

    # Past accept counts are statistics of verified tokens.
    lawful_under = EVERY_RULE

    def __init__(
        self,
        bands: Sequence[LadderBand] = DEFAULT_BANDS,
        *,
        initial_depth: int = 3,
        ema_weight: float = 0.2,
        update_interval: int = 5,
        warmup_rounds: int = 10,
    ) -> None:
        sizes = [band.min_batch_size for band in bands]
        if not sizes or len(set(sizes)) < len(sizes):
            raise ValueError(f"the ladder needs bands of different batch sizes, got {sizes}.")
        if not 0 < ema_weight <= 1 or update_interval < 1 or warmup_rounds < 0:
            raise ValueError(
                "the ladder needs an ema_weight in (0, 1], an update_interval of 1 or more and "
                f"warmup_rounds of 0 or more, got {ema_weight}, {update_interval}, {warmup_rounds}."
            )
        self.bands = tuple(sorted(bands, key=lambda band: band.min_batch_size))
        self.initial_depth = initial_depth
        self.ema_weight = ema_weight
        self.update_interval = update_interval
        self.warmup_rounds = warmup_rounds
        self.reset()

    def reset(self) -> None:
        """Put every ladder back to its start."""
        self._top = -1
        self._ladders: list[_Ladder] = []
        self._used: _Ladder | None = None

    def choose(self, state: RoundState) -> Ints:
        """Return the depth of the band's ladder for each sequence, int64 [R]."""
        top = state.max_num_speculative_tokens
        if top != self._top:  # the first round, or another engine
            self._top = top
            self._ladders = [_Ladder(band, self.initial_depth, top) for band in self.bands]
        used = self._ladders[0]
        for ladder in self._ladders[1:]:
            if ladder.band.min_batch_size > state.num_running:
                break
            used = ladder
        self._used = used
        return np.full(state.num_running, used.depth, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take in how much was accepted, and move the ladder that chose."""
        ladder = self._used
        if ladder is None:
            return
        if ladder.depth > 0:
            drafted = outcome.num_drafted > 0
            if not drafted.any():
                return
            mean = float(outcome.num_accepted[drafted].mean())
            ladder.average += self.ema_weight * (mean - ladder.average)
        ladder.num_rounds += 1
        past = ladder.num_rounds - self.warmup_rounds
        if past > 0 and past % self.update_interval == 0:
            ladder.move()

    def __repr__(self) -> str:
        return f"SGLangLadder(initial_depth={self.initial_depth})"


class _Ladder:
    """A band's place on its ladder, and the average that moves it."""

    def __init__(self, band: LadderBand, initial_depth: int, top: int) -> None:
        self.band = band
        self.depths = tuple(depth for depth in band.depths if depth <= top) or (top,)
        if initial_depth in self.depths:
            self.index = self.depths.index(initial_depth)
        else:
            self.index = len(self.depths) // 2
        self.average = self.depth - 1.0
        """Of accepted drafts; one below the depth is where the ladder stays put."""
        self.num_rounds = 0

    @property
    def depth(self) -> int:
        return self.depths[self.index]

    def move(self) -> None:
        """Go up or down as far as the average says."""
        depths, last = self.depths, len(self.depths) - 1
        if self.depth == 0:
            self.index = min(1, last)
            if self.average < 0:  # a ladder that began at 0 and knows nothing yet
                self.average = self.depth - 1.0
            return
        before = self.index
        while self.index > 0:
            shallower = depths[self.index - 1]
            # Zero can't be undershot: half an accepted draft is low enough to stop drafting.
            threshold = shallower - 0.5 if shallower else 0.5
            if self.average > threshold + self.band.down_hysteresis:
                break
            self.index -= 1
        if self.index < before:
            return
        while self.index < last and self.average > self.depth - 0.5 + self.band.up_hysteresis:
            self.index += 1
