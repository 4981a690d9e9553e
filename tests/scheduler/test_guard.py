from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines import FixedDepth, HeuristicDepth, Off
from specdepth.scheduler.baselines.adaptive_verification import AdaptiveVerificationDepth
from specdepth.scheduler.baselines.confidence_trim import TRIM_RULES
from specdepth.scheduler.baselines.svip import SVIP
from specdepth.scheduler.depth import (
    DraftSignals,
    ProposalSignals,
    check_lawful,
    lawful_rules,
)
from specdepth.scheduler.guard import GuardConfig, GuardedScheduler
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState
from tests.scheduler.conftest import build_outcome, build_state

Rates = dict[int, float]
"""Tokens a second at each depth, without noise, on a machine of speed 1."""


class World:
    """Rounds with noise: few or many tokens, stalls, and a machine whose speed wanders by 2x."""

    def __init__(self, noise: float = 0.0, drift: float = 1.0, stalls: float = 0.0) -> None:
        self.rng = np.random.default_rng(0)
        self.noise, self.drift, self.stalls = noise, drift, stalls
        self.round = 0
        self.depths: list[int] = []
        self.lost_s = self.total_s = 0.0

    def play(
        self, scheduler: Any, rates: Rates, rounds: int, num_running: int = 8, **changes: Any
    ) -> list[int]:
        """Run rounds and return their depths; `lost_s` adds up what the best depth would have saved."""
        seen = []
        state = build_state(num_running, 4)
        for _ in range(rounds):
            depth = int(scheduler.choose(state)[0])
            tokens = np.full(num_running, 1.0 + depth)
            if depth and self.noise:
                tokens = 1 + depth * self.rng.binomial(1, 0.3, num_running) / 0.3
            speed = self.drift ** np.sin(self.round / 700)
            seconds = num_running * (1 + depth) / rates[depth] * speed
            seconds *= self.rng.lognormal(0, self.noise / 4) if self.noise else 1.0
            self.lost_s += seconds / speed * (1 - rates[depth] / max(rates.values()))
            self.total_s += seconds / speed
            if self.rng.random() < self.stalls:
                seconds *= 50
            ran = np.full(num_running, depth)
            fields = {"num_committed": np.rint(tokens).astype(np.int64), "verify_s": seconds}
            scheduler.observe(build_outcome(state, ran, ran, **(fields | changes)))
            self.round += 1
            seen.append(depth)
        self.depths += seen
        return seen


def share(depths: list[int], depth: int) -> float:
    return depths.count(depth) / len(depths)


def test_a_slower_policy_steps_aside_within_a_few_probes():
    guard = GuardedScheduler(FixedDepth(4))
    depths = World().play(guard, {0: 100, 4: 70}, 200)
    assert depths[:8] == [4] * 8
    assert share(depths[100:], 0) > 0.85
    (status,) = guard.status()
    assert status.in_charge == "off"
    assert status.loads == (5, 8)
    assert status.log_ratios["policy"][0] == pytest.approx(np.log(0.7))


def test_a_policy_that_becomes_faster_comes_back():
    guard = GuardedScheduler(FixedDepth(4), config=GuardConfig(max_interval=256))
    world = World()
    world.play(guard, {0: 100, 4: 50}, 3000)
    assert guard.status()[0].in_charge == "off"
    world.play(guard, {0: 100, 4: 120}, 2000)
    (status,) = guard.status()
    assert status.in_charge == "policy"
    assert status.num_switches == 2
    assert share(world.depths[-500:], 4) > 0.9


def test_the_best_of_three_is_found_wherever_it_stands():
    cases: list[tuple[Rates, str]] = [
        ({0: 100, 2: 120, 4: 140}, "policy"),
        ({0: 100, 2: 140, 4: 120}, "fallback"),
        ({0: 140, 2: 120, 4: 100}, "off"),
    ]
    for rates, best in cases:
        guard = GuardedScheduler(FixedDepth(4), FixedDepth(2))
        World(noise=0.4, drift=2.0).play(guard, rates, 2000)
        assert guard.status()[0].in_charge == best


def test_drift_noise_and_stalls_do_not_push_a_faster_policy_aside():
    guard = GuardedScheduler(FixedDepth(4), FixedDepth(1))
    world = World(noise=0.4, drift=2.0, stalls=0.01)
    world.play(guard, {0: 90, 1: 95, 4: 100}, 5000)
    assert guard.as_dict()["guard_switches"] == 0
    assert world.lost_s < 0.01 * world.total_s


def test_drift_noise_and_stalls_do_not_save_a_slower_one():
    guard = GuardedScheduler(FixedDepth(4), FixedDepth(1))
    world = World(noise=0.4, drift=2.0, stalls=0.01)
    world.play(guard, {0: 100, 1: 80, 4: 85}, 1000)
    assert guard.status()[0].in_charge == "off"
    before_s, total_s = world.lost_s, world.total_s
    world.play(guard, {0: 100, 1: 80, 4: 85}, 3000)
    assert world.lost_s - before_s < 0.01 * (world.total_s - total_s)


def test_probes_of_a_much_slower_arm_become_rare_and_stay_within_their_budget():
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    world.play(guard, {0: 50, 4: 100}, 1500)
    before_s, total_s = world.lost_s, world.total_s
    probes = share(world.play(guard, {0: 50, 4: 100}, 6000), 0)
    assert 0 < probes < 0.02
    spent = (world.lost_s - before_s) / (world.total_s - total_s)
    assert spent < 1.2 * guard.config.budget


def test_each_range_of_loads_has_its_own_answer():
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    for _ in range(20):
        world.play(guard, {0: 60, 4: 100}, 30, num_running=1)
        world.play(guard, {0: 100, 4: 60}, 30, num_running=32)
    assert [(one.loads, one.in_charge) for one in guard.status()] == [
        ((1, 1), "policy"),
        ((17, 32), "off"),
    ]
    flat = guard.as_dict()
    assert flat["guard_aside_at_1"] == 0
    assert flat["guard_aside_at_32"] == 1
    assert flat["guard_policy_tok_s_at_1"] == pytest.approx(100)
    assert flat["guard_rounds"] == 1200


@pytest.mark.parametrize(
    "changes",
    [
        {"num_preempted_prefills": 1},
        {"preempted": np.arange(8) == 3},
        {"num_committed": np.zeros(8, np.int64)},
        {"verify_s": 0.0},
    ],
)
def test_rounds_whose_time_is_not_the_arms_do_not_count(changes):
    guard = GuardedScheduler(FixedDepth(4))
    World().play(guard, {0: 100, 4: 50}, 300, **changes)
    (status,) = guard.status()
    assert status.in_charge == "policy"
    assert not status.rates_tok_s


def test_rounds_with_prompts_do_not_count_while_there_are_enough_others():
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    for _ in range(200):
        world.play(guard, {0: 100, 4: 120}, 3)
        world.play(guard, {0: 100, 4: 20}, 1, num_prefill_tokens=64)
    assert guard.as_dict()["guard_switches"] == 0
    assert guard.as_dict()["guard_policy_tok_s_at_8"] == pytest.approx(120)


@pytest.mark.parametrize(("rate", "in_charge"), [(80, "off"), (125, "policy")])
def test_where_every_round_has_prompts_they_count_without_their_price(rate: int, in_charge: str):
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    for _ in range(1000):
        num_tokens = int(world.rng.integers(1, 200))
        late_s = 0.003 * num_tokens
        world.play(guard, {0: 100, 4: rate}, 1, num_prefill_tokens=num_tokens, other_s=late_s)
    (status,) = guard.status()
    assert status.in_charge == in_charge
    assert status.rates_tok_s["policy"] == pytest.approx(rate, rel=0.05)
    assert status.rates_tok_s["off"] == pytest.approx(100, rel=0.05)


def test_a_probe_that_cannot_measure_ends_and_is_put_off():
    guard = GuardedScheduler(FixedDepth(4))
    world = World()
    assert world.play(guard, {0: 50, 4: 100}, 9)[-1] == 0
    depths = world.play(guard, {0: 50, 4: 100}, 45, num_preempted_prefills=1)
    assert depths.count(0) == 4 * guard.config.probe_rounds - 1
    assert depths[-1] == 4


def test_the_first_round_after_a_change_does_not_count():
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    last = 4
    for _ in range(600):
        state = build_state(8, 4)
        depth = int(guard.choose(state)[0])
        # A draft model that sat out makes up for it at once.
        late_s = 5.0 if depth == 4 and last == 0 else 0.0
        seconds = 8 * (1 + depth) / {0: 100, 4: 120}[depth]
        ran = np.full(8, depth)
        guard.observe(build_outcome(state, ran, ran, verify_s=seconds, draft_s=late_s))
        last = depth
    assert guard.as_dict()["guard_policy_tok_s_at_8"] == pytest.approx(120)
    assert guard.as_dict()["guard_switches"] == 0
    assert not world.depths


def test_rounds_that_lie_far_apart_are_not_compared():
    guard, world = GuardedScheduler(FixedDepth(4)), World()
    world.play(guard, {0: 100, 4: 100}, 8)
    world.play(guard, {0: 10, 4: 10}, 40, num_running=1)  # meanwhile the machine slows down
    assert world.play(guard, {0: 10, 4: 10}, 7) == [4] * 7
    assert guard.status()[1].log_ratios == {}


class Stateful:
    """Counts what it is asked and told."""

    lawful_under = frozenset({"greedy", "coupled"})

    def __init__(self, depth: int) -> None:
        self.depth, self.num_resets = depth, 0
        self.seen: list[str] = []

    def reset(self) -> None:
        self.num_resets += 1

    def choose(self, state: RoundState) -> Ints:
        self.seen.append("choose")
        return np.full(state.num_running, self.depth)

    def observe(self, outcome: RoundOutcome) -> None:
        self.seen.append("observe")


class Stateless(Stateful):
    reset = property()


def test_arms_with_state_follow_every_round_and_others_only_their_own():
    policy, fallback = Stateful(4), Stateless(2)
    assert not hasattr(fallback, "reset")
    guard = GuardedScheduler(policy, fallback)
    depths = World().play(guard, {0: 100, 2: 90, 4: 80}, 400)
    assert policy.seen == ["choose", "observe"] * 400
    assert fallback.seen == ["choose", "observe"] * depths.count(2)
    assert 0 < depths.count(2) < 200


def test_reset_forgets_everything():
    policy = Stateful(4)
    guard = GuardedScheduler(policy, HeuristicDepth())
    first = World().play(guard, {0: 100, 4: 60}, 300)
    guard.reset()
    assert policy.num_resets == 1
    assert guard.status() == ()
    assert guard.as_dict()["guard_rounds"] == 0
    assert World().play(guard, {0: 100, 4: 60}, 300) == first  # deterministic, too


def test_it_is_lawful_where_all_arms_are():
    assert lawful_rules(GuardedScheduler(FixedDepth(2))) == {
        *("greedy", "coupled", "prompt-lookup", "rejection")
    }
    assert lawful_rules(GuardedScheduler(FixedDepth(2), Stateful(1))) == {"greedy", "coupled"}
    trims = GuardedScheduler(FixedDepth(2), AdaptiveVerificationDepth(stale_budget=False))
    assert lawful_rules(trims) == TRIM_RULES
    with pytest.raises(ValueError, match="GuardedScheduler"):
        check_lawful(trims, "rejection", has_draft_model=True)
    check_lawful(GuardedScheduler(SVIP(0.6)), "rejection", has_draft_model=True)


class Undeclared:
    """A user's class with the two methods alone."""

    def choose(self, state: RoundState) -> Ints:
        return np.zeros(state.num_running, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        pass


def test_an_undeclared_arm_makes_the_guard_as_unlawful_as_itself():
    assert "rejection" not in lawful_rules(GuardedScheduler(FixedDepth(2), Undeclared()))


class Stops(Stateful):
    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Any:
        return np.zeros(len(signals.rows), np.bool_)

    def trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        return np.zeros(len(signals.rows), np.int64)


@pytest.mark.parametrize("own", [True, False])
def test_only_the_arm_in_charge_stops_and_trims(own: bool):
    arms = (Stops(4), FixedDepth(2)) if own else (FixedDepth(2), Stops(4))
    guard = GuardedScheduler(*arms)
    state, none = build_state(3, 4), np.full((3, 4), np.nan)
    guard.choose(state)
    keeps = guard.keep_drafting(state, DraftSignals(np.arange(3), 1, none, none, none))
    depths = guard.trim(state, ProposalSignals(np.arange(3), np.full(3, 4), none, none, none))
    assert keeps.tolist() == [not own] * 3
    assert depths.tolist() == [0 if own else 4] * 3


def test_depths_of_the_arm_in_charge_come_through():
    class StopsAtDepths(Stops):
        def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Any:
            return np.array([1, 2, 4])

    guard, state = GuardedScheduler(StopsAtDepths(4), FixedDepth(2)), build_state(3, 4)
    guard.choose(state)
    none = np.full((3, 4), np.nan)
    signals = DraftSignals(np.arange(3), 1, none, none, none)
    assert guard.keep_drafting(state, signals).tolist() == [1, 2, 4]


def test_methods_that_no_arm_has_are_not_there():
    guard = GuardedScheduler(FixedDepth(2), HeuristicDepth())
    assert not hasattr(guard, "trim")
    assert not hasattr(guard, "keep_drafting")
    assert not hasattr(GuardedScheduler(SVIP(0.6)), "trim")


def test_an_outcome_without_a_choice_changes_nothing():
    guard = GuardedScheduler(Off())
    state = build_state(2, 4)
    guard.observe(build_outcome(state, [0, 0], [0, 0]))
    assert guard.as_dict()["guard_rounds"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"probe_rounds": 0}, "probe_rounds must be at least 1, got 0"),
        ({"first_interval": 0}, "first_interval"),
        ({"first_interval": 9, "max_interval": 8}, "max_interval must be at least 9"),
        ({"growth": 0.5}, "growth"),
        ({"growth": float("nan")}, "growth"),
        ({"budget": 0.0}, "budget must be above 0"),
        ({"margin": -1.0}, "margin"),
        ({"confidence": float("inf")}, "confidence"),
        ({"min_visits": 1}, "min_visits"),
        ({"min_visits": 9, "window": 8}, "window must be at least 9"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        GuardConfig(**settings)


MAKERS: list[Callable[[], Any]] = [HeuristicDepth, Off, lambda: FixedDepth(1)]


@pytest.mark.parametrize("make", MAKERS)
def test_real_rules_survive_as_either_arm(make: Callable[[], Any]):
    for guard in (GuardedScheduler(make(), HeuristicDepth()), GuardedScheduler(Off(), make())):
        World(noise=0.4).play(guard, dict.fromkeys(range(5), 100.0), 300)
        assert guard.as_dict()["guard_rounds"] == 300
    assert "GuardedScheduler(Off()" in repr(guard)
