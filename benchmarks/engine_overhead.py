"""What a round costs outside the model: does it grow with the number of sequences?

The engine decodes 1, 8 and 32 sequences with prompt lookup at depth 4. Its own time in a round,
`other_s` + `schedule_s`, is admission, look-up, bookkeeping and commit; Python per sequence would show
as growth. `outside` is the CPU time of a whole round less that of the model's forward pass: besides
the engine's own time it holds packing and layout, and tensor work on the logits that does grow with
their number (verdict, entropies).

Keys: `ratio`, the engine's own time at 32 sequences over that at 1; `us_per_sequence`, the slope
between them; `engine_us_N`, `outside_us_N`, `share_N`, the engine's own time as a share of the round.
`--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import Printer, parse, result_line
from _workload import load_decoder, mixed_prompts, start

if TYPE_CHECKING:
    from specdepth.decoder.models import PackedModel
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

BATCH_SIZES = (1, 8, 32)
DEPTH = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_rounds = 12 if arguments.quick else 60
    decoder = load_decoder(arguments.target, max_num_seqs=max(BATCH_SIZES), dtype=arguments.dtype)
    stopwatch = ForwardStopwatch(decoder.target)
    prompts = mixed_prompts(decoder, max(BATCH_SIZES), arguments.seed)
    values: dict[str, Any] = {}
    rows = []
    for size in BATCH_SIZES:
        measured = _rounds(decoder, stopwatch, prompts[:size], num_rounds)
        round_s, outside_s, engine_s = np.median(measured, axis=0)
        values |= {
            f"engine_us_{size}": round(1e6 * engine_s, 1),
            f"outside_us_{size}": round(1e6 * outside_s, 1),
            f"share_{size}": round(engine_s / round_s, 5),
        }
        rows.append((str(size), 1e3 * round_s, 1e6 * engine_s, engine_s / round_s, 1e6 * outside_s))
    printer.table(("sequences", "round ms", "engine's own us", "share", "outside forward us"), rows)
    least, most = BATCH_SIZES[0], BATCH_SIZES[-1]
    growth = values[f"engine_us_{most}"] - values[f"engine_us_{least}"]
    values = {
        "ratio": round(values[f"engine_us_{most}"] / values[f"engine_us_{least}"], 3),
        "us_per_sequence": round(growth / (most - least), 2),
        **values,
    }
    if arguments.profile:
        _profile(printer, decoder, prompts, num_rounds)
    decoder.engine.abort_all()
    printer.result(result_line("engine_overhead", arguments, num_rounds, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", action="store_true", help="print the functions that take most")


class ForwardStopwatch:
    """Adds up the thread's CPU time inside the forward pass of a model."""

    def __init__(self, model: PackedModel) -> None:
        self.seconds = 0.0
        forward = model.forward

        def measured(*inputs: Any, **options: Any) -> Any:
            before = time.thread_time()
            logits = forward(*inputs, **options)
            self.seconds += time.thread_time() - before
            return logits

        model.forward = measured  # type: ignore[method-assign]


def _rounds(
    decoder: SpeculativeDecoder, stopwatch: ForwardStopwatch, prompts: list[list[int]], count: int
) -> np.ndarray:
    """Float64 [count, 3]: seconds of the round, outside forward, and in the engine alone."""
    from specdepth.scheduler.baselines.fixed import FixedDepth

    engine = decoder.engine
    start(engine, prompts, (count + 4) * (DEPTH + 1))
    engine.set_scheduler(FixedDepth(DEPTH))
    rows = []
    for _ in range(count + 4):
        stopwatch.seconds = 0.0
        before = time.thread_time()
        outcome = engine.step()
        round_s = time.thread_time() - before
        assert outcome is not None
        engine_s = outcome.other_s + outcome.schedule_s
        rows.append((round_s, round_s - stopwatch.seconds, engine_s))
    return np.array(rows[4:])


def _profile(
    printer: Printer, decoder: SpeculativeDecoder, prompts: list[list[int]], count: int
) -> None:
    """Print the functions of the package that take most time of their own at the largest batch."""
    from specdepth.scheduler.baselines.fixed import FixedDepth

    engine = decoder.engine
    start(engine, prompts, (count + 4) * (DEPTH + 1))
    engine.set_scheduler(FixedDepth(DEPTH))
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(count):
        engine.step()
    profiler.disable()
    entries = []
    for (file, line, name), (_, calls, own_s, total_s, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if "/decoder/" in file or "/scheduler/" in file:
            where = f"{file.rsplit('/', 1)[-1]}:{line} {name}"
            entries.append((where, calls / count, 1e6 * own_s / count, 1e6 * total_s / count))
    entries.sort(key=lambda entry: -entry[2])
    printer.line(f"Per round at {len(prompts)} sequences, under the profiler:")
    printer.table(("function", "calls", "own us", "total us"), entries[:20])


if __name__ == "__main__":
    main()
