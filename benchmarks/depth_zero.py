"""Is depth 0 free? The engine with prompt lookup at depth 0 against the same engine with no drafter.

One engine, one batch: the drafter is exchanged between rounds, so weights, contexts and memory are the
same on both sides. Whole rounds are timed, the search for proposals included.

Keys: `ratio`, prompt lookup at depth 0 over no drafter, over the pairs of all batch sizes; `ratio_1`,
`ratio_8`, `ratio_32` by batch size; `search_us_N`, what the search for proposals took in those rounds, and
`search_share_N`, of the round: the same question with far less noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import Pairs, Printer, bounds, parse, result_line, time_pairs
from _workload import load_decoder, mixed_prompts, round_at, start

if TYPE_CHECKING:
    from specdepth.decoder.drafters import PromptLookup, Proposal
    from specdepth.decoder.runner import Offer, RoundPlan
    from specdepth.scheduler.state import Ints

BATCH_SIZES = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv)
    printer = Printer(arguments.json_only)
    num_pairs = 8 if arguments.quick else 60
    from specdepth.decoder.drafters import Drafter, NoDrafter, PromptLookup

    decoder = load_decoder(arguments.target, max_num_seqs=max(BATCH_SIZES), dtype=arguments.dtype)
    runner, engine = decoder.runner, decoder.engine
    assert isinstance(runner.draft_source, PromptLookup)
    lookup, nothing = Stopwatch(runner.draft_source), NoDrafter()
    prompts = mixed_prompts(decoder, max(BATCH_SIZES), arguments.seed)
    values: dict[str, Any] = {}
    rows, every = [], []
    for size in BATCH_SIZES:
        depths = np.zeros(size, np.int64)

        def side(drafter: Drafter, depths: Ints = depths) -> Callable[[], None]:
            def run() -> None:
                runner.draft_source = drafter
                round_at(engine, depths)

            return run

        start(engine, prompts[:size], 2 * num_pairs + 4)
        pairs = time_pairs(side(lookup), side(nothing), num_pairs, warm_up=2)
        search_us = 1e6 * float(np.median(lookup.seconds))
        lookup.seconds.clear()
        figure, wall = pairs.ratio(arguments.seed), pairs.wall_ratio(arguments.seed)
        every.append(pairs)
        values |= {
            f"ratio_{size}": round(figure.value, 4),
            f"ratio_{size}_interval": bounds(figure),
            f"ratio_{size}_wall": round(wall.value, 4),
            f"search_us_{size}": round(search_us, 1),
            f"search_share_{size}": round(search_us / 1e6 / float(np.median(pairs.b_cpu_s)), 5),
        }
        times = (*_milliseconds(pairs), search_us)
        rows.append((str(size), *times, figure.value, bounds(figure), wall.value))
    engine.abort_all()
    printer.table(
        ("sequences", "lookup ms", "no drafter ms", "search us", "ratio (CPU)", "95 %", "(wall)"),
        rows,
    )
    pooled = Pairs.joined(every)
    figure = pooled.ratio(arguments.seed)
    values = {
        "ratio": round(figure.value, 4),
        "ratio_interval": bounds(figure),
        "ratio_wall": round(pooled.wall_ratio(arguments.seed).value, 4),
        **values,
    }
    printer.line(f"Over all pairs: {figure.value:.4f}, 95 % {bounds(figure)}.")
    printer.result(result_line("depth_zero", arguments, len(pooled), values))


class Stopwatch:
    """A drafter that notes the CPU time of its searches and of its empty proposals."""

    def __init__(self, drafter: PromptLookup) -> None:
        self.kind = drafter.kind
        self.start, self.settle = drafter.start, drafter.settle
        self._drafter = drafter
        self.seconds: list[float] = []

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Search."""
        before = time.thread_time()
        found = self._drafter.offer(slots, max_length)
        self.seconds.append(time.thread_time() - before)
        return found

    def draft(self, plan: RoundPlan) -> Proposal:
        """Propose nothing."""
        before = time.thread_time()
        proposal = self._drafter.draft(plan)
        self.seconds[-1] += time.thread_time() - before
        return proposal


def _milliseconds(pairs: Pairs) -> tuple[float, float]:
    return 1e3 * float(np.median(pairs.a_cpu_s)), 1e3 * float(np.median(pairs.b_cpu_s))


if __name__ == "__main__":
    main()
