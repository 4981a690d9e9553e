"""Is depth 0 free? The engine with prompt lookup at depth 0 against the same engine with no drafter.

One engine, one batch: the drafter is exchanged between rounds, so weights, contexts and memory are the
same on both sides. Whole rounds are timed, the search for proposals included.

Keys: `ratio`, prompt lookup at depth 0 over no drafter, over the pairs of all batch sizes; `ratio_1`,
`ratio_8`, `ratio_32` by batch size; `search_us_N`, what the search for proposals takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import Pairs, Printer, bounds, parse, result_line, time_pairs, timed
from _workload import MAX_NUM_SPECULATIVE_TOKENS, load_decoder, mixed_prompts, round_at, start

if TYPE_CHECKING:
    from specdepth.decoder.drafters import PromptLookup
    from specdepth.scheduler.state import Ints

BATCH_SIZES = (1, 8, 32)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv)
    printer = Printer(arguments.json_only)
    num_pairs = 8 if arguments.quick else 60
    from specdepth.decoder.drafters import Drafter, NoDrafter, PromptLookup

    decoder = load_decoder(arguments.target, max_num_seqs=max(BATCH_SIZES))
    runner, engine = decoder.runner, decoder.engine
    lookup, nothing = runner.draft_source, NoDrafter()
    assert isinstance(lookup, PromptLookup)
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
        search_us = _search_us(lookup, size)
        figure, wall = pairs.ratio(arguments.seed), pairs.wall_ratio(arguments.seed)
        every.append(pairs)
        values |= {
            f"ratio_{size}": round(figure.value, 4),
            f"ratio_{size}_interval": bounds(figure),
            f"ratio_{size}_wall": round(wall.value, 4),
            f"search_us_{size}": round(search_us, 1),
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


def _search_us(lookup: PromptLookup, size: int) -> float:
    """Median microseconds of one search over the sequences that run now."""
    slots = np.arange(size)
    runs = [timed(lambda: lookup.offer(slots, MAX_NUM_SPECULATIVE_TOKENS)).cpu_s for _ in range(50)]
    return 1e6 * float(np.median(runs))


def _milliseconds(pairs: Pairs) -> tuple[float, float]:
    return 1e3 * float(np.median(pairs.a_cpu_s)), 1e3 * float(np.median(pairs.b_cpu_s))


if __name__ == "__main__":
    main()
