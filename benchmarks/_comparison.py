"""Two ways to decode the same batches in turn: what the speed comparisons share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from _measure import Pairs, Printer, Timing, abba, bounds, timed
from _workload import train_prompts

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

Text = list[list[int]]
Run = Callable[[list[list[int]]], Text]


def ours(decoder: SpeculativeDecoder, size: int, depth: int) -> Run:
    """Decode a batch with this package at a fixed depth."""
    from specdepth.decoder.config import SamplingParams

    sampling = SamplingParams(max_new_tokens=size, ignore_eos=True)

    def run(batch: list[list[int]]) -> Text:
        results = decoder.generate(batch, sampling=sampling, depth_scheduler=depth)
        return [result.token_ids for result in results]

    return run


class Comparison:
    """Two ways to decode the same batches, run in alternation.

    Args:
        ours: decodes a batch.
        theirs: decodes a batch.
        batches: each is decoded once by either side.
        seed: of the interval.
        their_cpu_s: tells what their last batch took where it ran in another process.
    """

    def __init__(
        self,
        ours: Run,
        theirs: Run,
        batches: list[list[list[int]]],
        seed: int,
        their_cpu_s: Callable[[], float] | None = None,
    ) -> None:
        timings, equal = [], []
        for side in (ours, theirs):
            side(batches[0][:1])
        self.num_tokens = 0
        for batch, we_first in zip(batches, abba(len(batches)), strict=True):
            sides = (ours, theirs) if we_first else (theirs, ours)
            done = [_timed_text(side, batch) for side in sides]
            (our_time, our_text), (their_time, their_text) = done if we_first else done[::-1]
            if list(map(len, our_text)) != list(map(len, their_text)):
                raise RuntimeError("The two sides generated different numbers of tokens.")
            if their_cpu_s is not None:
                their_time = replace(their_time, cpu_s=their_cpu_s())
            timings.append((our_time, their_time))
            equal += [_equal_share(*texts) for texts in zip(our_text, their_text, strict=True)]
            self.num_tokens += sum(map(len, our_text))
        self.pairs = Pairs.of(timings)
        self.equal_text = float(np.mean(equal))
        self._seed = seed

    @property
    def our_tok_s(self) -> float:
        """Generated tokens over CPU seconds."""
        return self.num_tokens / float(self.pairs.a_cpu_s.sum())

    @property
    def their_tok_s(self) -> float:
        """The same for the other side."""
        return self.num_tokens / float(self.pairs.b_cpu_s.sum())

    @property
    def speedup(self) -> float:
        """Our tokens a second over theirs."""
        return self.our_tok_s / self.their_tok_s

    @property
    def wall_speedup(self) -> float:
        """The same in wall time."""
        return float(self.pairs.b_wall_s.sum() / self.pairs.a_wall_s.sum())

    @property
    def bounds(self) -> list[float] | None:
        """Bootstrap interval of `speedup` over batches."""
        from specdepth.agents.intervals import paired_ratio

        return bounds(paired_ratio(self.pairs.b_cpu_s, self.pairs.a_cpu_s, self._seed))


def _timed_text(run: Run, batch: list[list[int]]) -> tuple[Timing, Text]:
    texts: list[Text] = []
    timing = timed(lambda: texts.append(run(batch)))
    return timing, texts[0]


def _equal_share(one: list[int], other: list[int]) -> float:
    same = [a == b for a, b in zip(one, other, strict=True)]
    return (same.index(False) if False in same else len(same)) / len(same)


def best_depth(
    printer: Printer,
    decoder: SpeculativeDecoder,
    depths: Sequence[int],
    arguments: argparse.Namespace,
) -> int:
    """The one of `depths` that is fastest at batch 1 on training prompts."""
    prompts = train_prompts(decoder, 6 if arguments.quick else 12, arguments.seed)
    size = min(arguments.new_tokens, 48)
    seconds = dict.fromkeys(depths, 0.0)
    for turn, prompt in enumerate(prompts):
        order = depths if turn % 2 == 0 else depths[::-1]
        for depth in order:
            run = ours(decoder, size, depth)
            seconds[depth] += timed(lambda run=run, prompt=prompt: run([prompt])).cpu_s  # type: ignore[misc]
    speeds = {depth: len(prompts) * size / seconds[depth] for depth in depths}
    printer.table(("fixed depth, batch 1", *map(str, depths)), [("tok/s", *speeds.values())])
    return max(speeds, key=lambda depth: speeds[depth])
