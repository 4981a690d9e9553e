"""`specdepth demo`: the whole job on a real model, from pass times to a report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .console import Console, Interrupted
from .options import LOADS, IntList, PromptOptions

if TYPE_CHECKING:
    from .callbacks import TrainProgress
    from .demo_state import DemoState

PROFILE_SHARE, RECORD_SHARE, TRAIN_SHARE, REPLAY_SHARE = 0.06, 0.14, 0.3, 0.14
"""Of the time; the live comparison gets the rest."""
LIVE_SHARE = 0.38
"""Kept for the live comparison when others take longer, at the cost of training."""
LEAST_PROFILE_S = 3.0
"""Pass times from less are too rough to train with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(PromptOptions):
    """Profile, train, export and compare on a real model.

    Measures what passes cost here; trains a policy on replay of the models' trace at these prices (where
    none is shipped, one is recorded first); exports it and loads it back; compares it in replay of held-out
    requests with the strongest rule, tuned tables, fixed depths and what hindsight allows; and then
    decodes held-out prompts at several loads, policies taking turns, beside what replay says of the same
    requests. Prints the result, whatever it is, and writes report.html and results.json.

    specdepth demo --minutes 10 --out runs/demo
    """

    minutes: float = 10.0
    """Time for everything after the model is fetched; all parts scale with it."""
    loads: IntList = LOADS
    """Concurrent requests to compare at, with commas."""
    fixed_depths: IntList = ()
    """Fixed depths to find the best one among, with commas; by default all."""
    max_num_seqs: int = 16
    """Sequences that run at once."""


def run(options: Options, console: Console) -> None:
    """Do it all.

    Raises:
        ValueError: bad options.
        OSError, ModelFetchError, MemoryError: no model.
        Interrupted: after Ctrl-C; what there is has been written.
    """
    from .demo_report import conclude
    from .demo_state import DemoState
    from .session import load_decoder, make_folder, new_folder

    _check(options)
    folder = new_folder(options, "demo")
    from specdepth.decoder.default_model import default_model_path

    if options.target == "default":
        default_model_path(progress=console.say)
    start_s = time.monotonic()
    console.say(f"Loading {options.target} ...")
    decoder = load_decoder(options, console)
    demo = DemoState(options, console, make_folder(folder), decoder, start_s)
    try:
        for step in (_profile, _find_ground, _train, _replay, _compare):
            step(demo)
    except KeyboardInterrupt:
        demo.notes.insert(0, "Interrupted: this is what there was.")
        conclude(demo)
        raise Interrupted(f"interrupted; what there was is in {folder}.") from None
    conclude(demo)


def _check(options: Options) -> None:
    if not 0 < options.minutes < float("inf"):
        raise ValueError(f"minutes must be above 0, got {options.minutes}.")
    if not options.loads or not 1 <= min(options.loads) <= max(options.loads):
        raise ValueError(f"loads must be whole numbers of at least 1, got {options.loads}.")
    if max(options.loads) > options.max_num_seqs:
        raise ValueError(
            f"load {max(options.loads)} is above --max-num-seqs {options.max_num_seqs}; raise that."
        )
    if options.draft == "none":
        raise ValueError("the demo needs a drafter; --draft none proposes nothing.")


def _profile(demo: DemoState) -> None:
    """What passes cost, which tells policies the price of depth."""
    from .profile_command import COST_FILE, measure_cost, show_cost

    if demo.options.cost is not None:
        demo.cost = demo.decoder.engine.cost
    else:
        with demo.console.progress("1/5 Measuring passes") as update:
            seconds = max(60 * demo.minutes(PROFILE_SHARE), LEAST_PROFILE_S)
            demo.cost = measure_cost(demo.decoder, seconds, demo.options.seed, update)
    demo.cost.save(demo.folder / COST_FILE)
    show_cost(demo.console, demo.cost)


def _find_ground(demo: DemoState) -> None:
    """A trace to train on and a rule to start from: shipped, or else recorded and fitted."""
    from .demo_ground import record_ground, shipped_ground

    assert demo.cost is not None
    if demo.options.prompts == "default":
        demo.ground = shipped_ground(demo.decoder)
    if demo.ground is not None:
        demo.console.say(f"2/5 The trace {demo.ground.trace_name} is shipped for these models.")
        return
    with demo.console.progress("2/5 Recording a trace") as update:
        seconds = 60 * demo.minutes(RECORD_SHARE)
        demo.ground = record_ground(
            demo.decoder, demo.options, demo.cost, demo.folder, seconds, update
        )


def _train(demo: DemoState) -> None:
    """A search of few parameters and PPO from there, both on replay and from the rule on."""
    from .demo_training import train_on_replay
    from .train_command import describe

    assert demo.ground is not None
    with demo.console.progress("3/5 Training on replay") as update:

        def report(at: TrainProgress) -> None:
            update(at.fraction, describe(at))
            reward = at.metrics.get("reward")
            if reward is not None and (not demo.curve or demo.curve[-1][0] < at.num_updates):
                demo.curve.append((at.num_updates, reward))

        demo.trained = train_on_replay(
            demo.options,
            demo.ground,
            demo.folder,
            60 * demo.minutes(TRAIN_SHARE, kept=REPLAY_SHARE + LIVE_SHARE),
            report,
        )
    demo.console.show(
        f"Trained for {demo.trained.elapsed_s:.0f} s: {demo.trained.num_updates} updates on "
        f"{demo.trained.num_decisions} decisions in {demo.trained.num_rounds} rounds."
    )
    if demo.trained.interrupted:
        raise KeyboardInterrupt


def _replay(demo: DemoState) -> None:
    """Everything on held-out requests in replay, with the policy as it was exported."""
    from .demo_replay import compare_in_replay

    assert demo.ground is not None
    assert demo.cost is not None
    assert demo.trained is not None
    with demo.console.progress("4/5 Comparing in replay") as update:
        seconds = 60 * demo.minutes(REPLAY_SHARE, kept=LIVE_SHARE)
        demo.replayed = compare_in_replay(
            demo.options, demo.ground, demo.cost, demo.trained.policy_folder, seconds, update
        )


def _compare(demo: DemoState) -> None:
    """The policies that matter on the running decoder, and in replay of the same requests."""
    from .demo_live import compare_live

    assert demo.ground is not None
    assert demo.replayed is not None
    assert demo.trained is not None
    names = demo.replayed.live_names(demo.trained.policy_folder)
    with demo.console.progress("5/5 Comparing live") as update:
        demo.live = compare_live(
            demo.decoder, demo.options, demo.ground, names, 60 * demo.minutes(1.0), update
        )
    if demo.live.found.interrupted:
        raise KeyboardInterrupt
