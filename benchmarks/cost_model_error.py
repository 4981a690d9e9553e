"""How far off are predicted round times? A fresh profile against live rounds of mixed shapes.

The profile times made-up passes; then the engine serves held-out prompts, some of them joined to long
ones, at loads of 1 to 32 sequences with depths at random, prompts joining while others decode. Each round
is predicted from its counts alone. All times are CPU time of the one thread, the round's own bookkeeping
included.

Each round runs `--repeats` times, the same text in the same batch at the same depths, and counts with its
median time: a round alone is off by what the machine does meanwhile, and on a shared one that is more than
a cost model gets wrong.

Keys: `median` and `p95` of |predicted / measured - 1| over all rounds; `bias`, the median of
predicted / measured - 1; the same for rounds without prompts in them as `decode_median`, `decode_p95`
and `decode_bias`. Measured times are taken to the speed that the machine had during the profile, by a
fixed probe every few passes and rounds; `raw_median` and `raw_p95` are without that. `noise_median` and
`noise_p95` are what passes of one shape, timed once each right after, are off their own median: no cost
model can be closer to rounds that run once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from _measure import Printer, parse, result_line
from _workload import load_decoder, mixed_prompts

NUM_SEQS = 32
NUM_PROMPTS = 64


def main(argv: Sequence[str] | None = None) -> None:
    """Profile, check, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    from specdepth.agents.cost_check import (
        check_cost,
        check_noise,
        describe_error,
        error_grid,
        error_values,
    )
    from specdepth.agents.profile_command import measure_cost
    from specdepth.decoder.speed_probe import SpeedProbe

    printer = Printer(arguments.json_only)
    profile_s, check_s = (8.0, 4.0) if arguments.quick else (60.0, 240.0)
    decoder = load_decoder(arguments.target, max_num_seqs=NUM_SEQS, dtype=arguments.dtype)
    prompts = mixed_prompts(decoder, NUM_PROMPTS, arguments.seed)
    probe = SpeedProbe(decoder)
    cost = measure_cost(decoder, profile_s, arguments.seed, probe=probe)
    probe_s = probe.median_s
    raw = check_cost(
        decoder, cost, prompts, check_s, arguments.seed, repeats=arguments.repeats, probe=probe
    )
    error = raw.at_speed(probe_s)
    noise = check_noise(decoder, min(check_s, 30.0), arguments.seed, probe)
    decode = error.where(error.num_prefill_tokens == 0)
    grid = error_grid(error)
    printer.table(grid.header, grid.rows)
    printer.line(describe_error(error, noise))
    values = error_values(error, noise)
    num_rounds = int(values.pop("n"))
    values |= {
        "raw_median": round(raw.median, 5),
        "raw_p95": round(raw.p95, 5),
        "decode_median": round(decode.median, 5),
        "decode_p95": round(decode.p95, 5),
        "decode_bias": round(decode.bias, 5),
        "repeats": arguments.repeats,
        "context_us": round(1e6 * cost.context_s, 4),
        "prefill_pair_us": round(1e6 * cost.prefill_pair_s, 5),
        "one_token_ms": round(1e3 * cost.pass_s(1), 3),
        "overhead_ms": round(1e3 * cost.overhead_s, 3),
    }
    printer.result(result_line("cost_model_error", arguments, num_rounds, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=7, help="times that each round is measured")


if __name__ == "__main__":
    main()
