"""What a decision costs: features and choice of an exported policy for 32 sequences.

A policy (`--policy`; by default one of the size that training exports, with random weights) chooses depths
while the engine decodes 32 sequences with prompt lookup. The states that it saw are then decided again,
alone. A policy of offsets, which starts at the shipped rule for prompt lookup and stays there, does the
same on the shipped trace, where no model runs.

Keys: `microseconds`, median of `choose` (features included) over those states in a loop;
`microseconds_in_round`, median of what the rounds paid (`schedule_s`, the check of the depths included):
a model pass has just swept the caches of the processor, which makes the same code several times as slow;
`share`, the latter as a share of the round; `offset_microseconds`, as `microseconds`, of the policy of
offsets; the 95 % quantiles of both; `layer_sizes` of both networks, empty for a rule without one.
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
from _workload import load_decoder, mixed_prompts, start

if TYPE_CHECKING:
    from specdepth.scheduler.depth import DepthScheduler
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.policy_file import PolicyWeights
    from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

NUM_SEQS = 32
TOP = 32
"""K of the shipped trace, rule and policy."""
TOKENS_A_ROUND = 9
"""Room for so many, and the pool holds them all: texts do not end before the rounds do."""
RULE = "rule:smollm2-prompt-lookup-cpu-bf16"
TRACE = "smollm2-prompt-lookup-greedy"
COST = "cpu-smollm2-bf16"
"""What the policy of offsets starts at, and the shipped trace and prices that it decides on."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_rounds = 16 if arguments.quick else 80
    num_loops = 10 if arguments.quick else 50
    decoder = load_decoder(
        arguments.target,
        max_num_seqs=NUM_SEQS,
        max_num_speculative_tokens=TOP,
        dtype=arguments.dtype,
    )
    prompts = mixed_prompts(decoder, NUM_SEQS, arguments.seed)
    scheduler = Observed(_policy(arguments, decoder.model_pair))
    engine = decoder.engine
    start(engine, prompts, (num_rounds + 4) * TOKENS_A_ROUND)
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
    offset = Observed(offset_policy())
    _replay(offset, num_requests=2 * NUM_SEQS if arguments.quick else 4 * NUM_SEQS)
    full = [state for state in offset.states if state.num_running == NUM_SEQS]
    offset_warm = _warm(offset.policy, full[: num_rounds + 4], num_loops)
    values = {
        "microseconds": round(1e6 * float(np.median(warm)), 1),
        "microseconds_p95": round(1e6 * float(np.quantile(warm, 0.95)), 1),
        "microseconds_in_round": round(1e6 * float(np.median(in_rounds)), 1),
        "share": round(share, 6),
        "round_ms": round(1e3 * float(np.median(rounds)), 3),
        "offset_microseconds": round(1e6 * float(np.median(offset_warm)), 1),
        "offset_microseconds_p95": round(1e6 * float(np.quantile(offset_warm, 0.95)), 1),
        "num_seqs": NUM_SEQS,
        "policy": arguments.policy,
        "layer_sizes": _layer_sizes(scheduler.policy),
        "offset_layer_sizes": _layer_sizes(offset.policy),
    }
    printer.table(
        ("decision for 32 sequences", "us"),
        [
            ("in a loop, median", values["microseconds"]),
            ("in a loop, 95 %", values["microseconds_p95"]),
            ("in rounds, median", values["microseconds_in_round"]),
            ("offsets in a loop, median", values["offset_microseconds"]),
            ("offsets in a loop, 95 %", values["offset_microseconds_p95"]),
        ],
    )
    printer.line(f"In rounds {100 * share:.3f} % of a round of {values['round_ms']} ms.")
    printer.result(result_line("decision_cost", arguments, num_rounds, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden", type=int, nargs="*", default=[64, 64], help="widths of the random hidden layers"
    )
    parser.add_argument(
        "--policy", metavar="NAME_OR_FOLDER", help="any scheduler instead of a random policy"
    )


class Observed:
    """Passes decisions on and keeps the states."""

    lawful_under = frozenset({"greedy", "coupled", "prompt-lookup", "rejection"})

    def __init__(self, policy: DepthScheduler) -> None:
        self.policy = policy
        self.states: list[RoundState] = []

    def choose(self, state: RoundState) -> Ints:
        """The policy's depths."""
        self.states.append(state)
        return self.policy.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass it on."""
        self.policy.observe(outcome)


def _policy(arguments: argparse.Namespace, model_pair: str) -> DepthScheduler:
    from specdepth.scheduler.baselines import make_scheduler

    if arguments.policy is None:
        return random_policy(tuple(arguments.hidden), arguments.seed, model_pair)
    return make_scheduler(arguments.policy, drafter="prompt-lookup", max_num_speculative_tokens=TOP)


def random_policy(hidden: tuple[int, ...], seed: int, model_pair: str) -> LearnedScheduler:
    """A policy with random weights, through a file as an exported one."""
    from specdepth.scheduler.features import NUM_FEATURES
    from specdepth.scheduler.policy_file import PolicyWeights

    rng = np.random.default_rng(seed)
    sizes = (NUM_FEATURES, *hidden, TOP + 1)
    weights = PolicyWeights(
        weights=tuple(
            (rng.standard_normal((after, before)) / before**0.5).astype(np.float32)
            for before, after in itertools.pairwise(sizes)
        ),
        biases=tuple(np.zeros(after, np.float32) for after in sizes[1:]),
        mean=rng.random(NUM_FEATURES).astype(np.float32),
        inv_std=np.ones(NUM_FEATURES, np.float32),
        depths=tuple(range(TOP + 1)),
    )
    return _through_a_file(weights, model_pair)


def offset_policy() -> LearnedScheduler:
    """The shipped rule as a policy of offsets, with the units of all loads and every offset 0."""
    from specdepth.agents.offset_weights import FLAGS, SCALES, offset_weights
    from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
    from specdepth.scheduler.baselines.registry import make_scheduler

    rule = make_scheduler(RULE)
    assert isinstance(rule, CappedGreedyDepth)
    return _through_a_file(offset_weights(rule, {load: 0.0 * SCALES for load in FLAGS}), TRACE)


def _through_a_file(weights: PolicyWeights, model_pair: str) -> LearnedScheduler:
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.policy_file import PolicyCard, save_policy

    card = PolicyCard(
        model_pair=model_pair,
        drafter="prompt-lookup",
        max_num_speculative_tokens=TOP,
        mask_depths=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        return LearnedScheduler.load(save_policy(Path(folder), weights, card))


def _replay(scheduler: DepthScheduler, num_requests: int) -> None:
    """Serve requests of the shipped trace, 32 at a time."""
    from specdepth.decoder.config import EngineConfig
    from specdepth.decoder.replay import ReplayDecoder
    from specdepth.decoder.serving import serve
    from specdepth.decoder.trace_files import load_trace
    from specdepth.decoder.workload import ClosedLoop, Workload
    from specdepth.scheduler.cost_files import load_cost

    config = EngineConfig(max_num_seqs=NUM_SEQS, max_num_speculative_tokens=TOP)
    decoder = ReplayDecoder(load_trace(TRACE), load_cost(COST), config)
    requests = decoder.requests()[:num_requests]
    workload = Workload(requests=requests, process=ClosedLoop.constant(NUM_SEQS))
    serve(decoder.engine, workload, scheduler)


def _layer_sizes(policy: DepthScheduler) -> list[int]:
    from specdepth.scheduler.learned import LearnedScheduler

    return list(policy.weights.layer_sizes) if isinstance(policy, LearnedScheduler) else []


def _warm(policy: DepthScheduler, states: list[RoundState], num_loops: int) -> np.ndarray:
    seconds = []
    for _ in range(num_loops):
        for state in states:
            before = time.thread_time()
            policy.choose(state)
            seconds.append(time.thread_time() - before)
    return np.array(seconds)


if __name__ == "__main__":
    main()
