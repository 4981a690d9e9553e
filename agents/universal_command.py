"""`specdepth train-universal`: one policy for many machines and drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .console import Console
from .options import CommonOptions

DEFAULT_FOLDER = Path("universal")
"""Where the policy goes without --out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(CommonOptions):
    """Train one policy for many machines and drafters: no training where it is deployed.

    Learns on the training split of several traces, at prices of machines drawn at random, and writes a
    policy folder. Where it runs it needs that machine's cost model, which "specdepth profile" measures
    in a minute. It takes any target, drafter and depth limit.

    specdepth train-universal smollm2-prompt-lookup-greedy smollm2-eagle3-greedy --out runs/universal
    """

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
    """Files that "specdepth record" wrote, or names of shipped traces."""
    loads: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Concurrent requests to search at, out of these."""
    iterations: int = 16
    """Steps of the search, a load; 5, with one machine and 32 requests, took 14 minutes on a busy core."""
    machines_per_step: int = 2
    """Random machines that each sample is scored on."""
    num_requests: int = 64
    """Requests that each of them serves."""


def run(options: Options, console: Console) -> None:
    """Train and write.

    Raises:
        ValueError: bad options, traces that cannot be read or do not go together, a place that cannot
            be written to.
    """
    from specdepth.decoder.trace_files import load_traces
    from specdepth.scheduler.policy_file import save_policy

    from .offset_search import SearchConfig
    from .policy_card import CARD_FILE, render_card
    from .results import check_output_folder, command_line, write_atomically
    from .session import set_up_torch
    from .universal import UniversalConfig, train_universal

    out = options.out or DEFAULT_FOLDER
    check_output_folder(out)
    config = UniversalConfig(
        loads=options.loads,
        machines_per_step=options.machines_per_step,
        search=SearchConfig(iterations=options.iterations, num_requests=options.num_requests),
        seed=options.seed,
    )
    traces = load_traces(options.traces)
    set_up_torch(options.threads, options.seed)
    with console.progress("Training for many machines") as update:
        policy = train_universal(traces, config, command=command_line(), progress=update)
    save_policy(out, policy.weights, policy.card)
    write_atomically(out / CARD_FILE, render_card(policy.weights, policy.card, out))
    console.show(f"Policy: {out}")
    console.finish({"folder": str(out), "traces": list(traces), "seed": options.seed})
