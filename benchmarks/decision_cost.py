"""What a decision costs: features and choice of an exported policy for 32 sequences.

A policy of the size that training exports (random weights) is written to disk, loaded back, and chooses
depths while the engine decodes 32 sequences with prompt lookup. The states that it saw are then
decided again, alone.

Keys: `microseconds`, median of `choose` (features included) over those states in a loop;
`microseconds_in_round`, median of what the rounds paid (`schedule_s`, the check of the depths included):
a model pass has just swept the caches of the processor, which makes the same code several times as slow;
`share`, the latter as a share of the round.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from _measure import Printer, parse, result_line
from _workload import MAX_NUM_SPECULATIVE_TOKENS, load_decoder, mixed_prompts, start

if TYPE_CHECKING:
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

NUM_SEQS = 32


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_rounds = 16 if arguments.quick else 80
    num_loops = 10 if arguments.quick else 50
    decoder = load_decoder(arguments.target, max_num_seqs=NUM_SEQS)
    prompts = mixed_prompts(decoder, NUM_SEQS, arguments.seed)
    scheduler = Observed(random_policy(tuple(arguments.hidden), arguments.seed, decoder.model_pair))
    engine = decoder.engine
    start(engine, prompts, (num_rounds + 4) * (1 + MAX_NUM_SPECULATIVE_TOKENS))
    engine.set_scheduler(scheduler)
    outcomes = []
    for _ in range(num_rounds + 4):
        outcome = engine.step()
        assert outcome is not None
        outcomes.append(outcome)
    engine.abort_all()
    in_rounds = np.array([outcome.schedule_s for outcome in outcomes[4:]])
    rounds = np.array([outcome.elapsed_s for outcome in outcomes[4:]])
    warm = _warm(scheduler.policy, scheduler.states[4:], num_loops)
    share = float(np.median(in_rounds / rounds))
    values = {
        "microseconds": round(1e6 * float(np.median(warm)), 1),
        "microseconds_p95": round(1e6 * float(np.quantile(warm, 0.95)), 1),
        "microseconds_in_round": round(1e6 * float(np.median(in_rounds)), 1),
        "share": round(share, 6),
        "round_ms": round(1e3 * float(np.median(rounds)), 3),
        "num_seqs": NUM_SEQS,
        "layer_sizes": list(scheduler.policy.weights.layer_sizes),
    }
    printer.table(
        ("decision for 32 sequences", "us"),
        [
            ("in a loop, median", values["microseconds"]),
            ("in a loop, 95 %", values["microseconds_p95"]),
            ("in rounds, median", values["microseconds_in_round"]),
        ],
    )
    printer.line(f"In rounds {100 * share:.3f} % of a round of {values['round_ms']} ms.")
    printer.result(result_line("decision_cost", arguments, num_rounds, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden", type=int, nargs="*", default=[64, 64], help="widths of the hidden layers"
    )


class Observed:
    """Passes decisions on and keeps the states."""

    lawful_under = frozenset({"greedy", "coupled", "prompt-lookup", "rejection"})

    def __init__(self, policy: LearnedScheduler) -> None:
        self.policy = policy
        self.states: list[RoundState] = []

    def choose(self, state: RoundState) -> Ints:
        """The policy's depths."""
        self.states.append(state)
        return self.policy.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass it on."""
        self.policy.observe(outcome)


def random_policy(hidden: tuple[int, ...], seed: int, model_pair: str) -> LearnedScheduler:
    """A policy with random weights, through a file as an exported one."""
    from specdepth.scheduler.features import NUM_FEATURES
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights, save_policy

    rng = np.random.default_rng(seed)
    sizes = (NUM_FEATURES, *hidden, MAX_NUM_SPECULATIVE_TOKENS + 1)
    weights = PolicyWeights(
        weights=tuple(
            (rng.standard_normal((after, before)) / before**0.5).astype(np.float32)
            for before, after in itertools.pairwise(sizes)
        ),
        biases=tuple(np.zeros(after, np.float32) for after in sizes[1:]),
        mean=rng.random(NUM_FEATURES).astype(np.float32),
        inv_std=np.ones(NUM_FEATURES, np.float32),
        depths=tuple(range(MAX_NUM_SPECULATIVE_TOKENS + 1)),
    )
    card = PolicyCard(
        model_pair=model_pair,
        drafter="prompt-lookup",
        max_num_speculative_tokens=MAX_NUM_SPECULATIVE_TOKENS,
        mask_depths=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        return LearnedScheduler.load(save_policy(Path(folder), weights, card))


def _warm(policy: LearnedScheduler, states: list[RoundState], num_loops: int) -> np.ndarray:
    seconds = []
    for _ in range(num_loops):
        for state in states:
            before = time.thread_time()
            policy.choose(state)
            seconds.append(time.thread_time() - before)
    return np.array(seconds)


if __name__ == "__main__":
    main()
