"""`GuardedScheduler`: lets a policy decide only where it is measured not to be slower."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .arm_contest import ArmContest, GuardConfig
from .baselines.off import Off
from .depth import DepthScheduler, DraftSignals, ProposalSignals, lawful_rules
from .state import Bools, Ints, RoundOutcome, RoundState

__all__ = ["BucketStatus", "GuardConfig", "GuardedScheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStatus:
    """What a guard knows about one range of loads."""

    loads: tuple[int, int]
    """Fewest and most running sequences."""
    in_charge: str
    """"policy", "fallback" or "off": who decides, but for probes."""
    rates_tok_s: dict[str, float]
    """Committed tokens a second of each arm that ran, over its latest rounds without prompts. Rounds of
    different arms lie apart, so compare `log_ratios` and not these."""
    log_ratios: dict[str, tuple[float, float]]
    """Of each other arm: log of its rate over that of the arm in charge, and half the width of the
    interval."""
    num_switches: int


class GuardedScheduler:
    """A policy, a rule to fall back on, and no speculation: whichever is fastest at the present load.

    Loads are put into buckets, 1, 2, 3-4, 5-8, ... running sequences. In each the policy decides at
    first. Short blocks of the other arms are run in between and compared with the rounds just before
    (`ArmContest`, `PairedRates`); an arm that is faster with confidence takes over, and the policy, once
    aside, is probed in the same way and comes back when it is faster again. `docs/guard.md` has the
    bound on what that costs.

    Only rounds that really ran count: committed tokens and elapsed seconds, `observe` and `choose`
    included. No cost model is asked, so a wrong one cannot mislead the guard. Rounds with prompt
    tokens or preemptions do not count, nor does the first round after a change of arm.

    An arm that keeps state, which is one with `reset`, follows the rounds of the others: it chooses, and
    observes what came of their choice. So rules that credit a round to their own choice (the bandits
    of `baselines/bandits.py`) would learn wrong; they try depth 0 themselves and need no guard. An arm
    without `reset` is asked only for its own rounds.

    Deterministic, given the outcomes.

    Args:
        inner: the policy.
        fallback: a rule; None leaves policy and off.
        config: intervals and thresholds.
    """

    _MAX_GAP = 32
    """Rounds at other loads after which a bucket's latest rounds are old."""

    def __init__(
        self,
        inner: DepthScheduler,
        fallback: DepthScheduler | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        self.inner, self.fallback = inner, fallback
        self.config = config or GuardConfig()
        self._names: tuple[str, ...]
        self._arms: tuple[DepthScheduler, ...]
        if fallback is None:
            self._names, self._arms = ("policy", "off"), (inner, Off())
        else:
            self._names, self._arms = ("policy", "fallback", "off"), (inner, fallback, Off())
        self._follows = tuple(hasattr(arm, "reset") for arm in self._arms)
        # Who is in charge depends on verified tokens and times of earlier rounds only.
        self.lawful_under: frozenset[str] = reduce(
            frozenset.intersection, (lawful_rules(arm) for arm in self._arms)
        )
        # Optional methods are looked up by name, some callers do it once, so they exist if any arm's do.
        if any(hasattr(arm, "keep_drafting") for arm in self._arms):
            self.keep_drafting = self._keep_drafting
        if any(hasattr(arm, "trim") for arm in self._arms):
            self.trim = self._trim
        self._forget()

    def _forget(self) -> None:
        self._contests: dict[int, ArmContest] = {}
        self._last_rounds: dict[int, int] = {}
        """Number of the latest round in each bucket."""
        self._num_rounds = self._num_probe_rounds = self._num_aside_rounds = 0
        self._bucket: int | None = None
        """Of the round under way."""
        self._arm = self._last_arm = 0
        """In charge of the round under way or just over, and of the one before."""

    def reset(self) -> None:
        """Put the policy in charge everywhere, and let all arms forget."""
        self._forget()
        for arm in self._arms:
            reset = getattr(arm, "reset", None)
            if reset is not None:
                reset()

    def choose(self, state: RoundState) -> Ints:
        """Return the depths of the arm in charge, int64 [R]."""
        bucket = max(state.num_running - 1, 0).bit_length()
        contest = self._contests.get(bucket)
        if contest is None:
            contest = self._contests[bucket] = ArmContest(len(self._arms), self.config)
        elif self._num_rounds - self._last_rounds[bucket] > self._MAX_GAP:
            contest.interrupt()
        self._bucket, self._arm = bucket, contest.arm
        depths = self._arms[self._arm].choose(state)
        for number, arm in enumerate(self._arms):
            if self._follows[number] and number != self._arm:
                arm.choose(state)
        return depths

    def observe(self, outcome: RoundOutcome) -> None:
        """Credit the round to the arm in charge, and let it and those that follow learn."""
        for number, arm in enumerate(self._arms):
            if self._follows[number] or number == self._arm:
                arm.observe(outcome)
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            return
        contest = self._contests[bucket]
        self._num_rounds += 1
        self._last_rounds[bucket] = self._num_rounds
        self._num_probe_rounds += contest.is_probing
        self._num_aside_rounds += contest.incumbent != 0
        tokens, seconds = int(np.add.reduce(outcome.num_committed)), outcome.elapsed_s
        usable = bool(
            tokens
            and seconds > 0
            and not outcome.num_preempted_prefills
            and not outcome.preempted.any()
        )
        settled = self._num_rounds == 1 or self._arm == self._last_arm
        self._last_arm = self._arm
        contest.add(
            tokens,
            seconds,
            num_prompt_tokens=outcome.num_prefill_tokens,
            usable=usable,
            settled=settled,
        )

    def _keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools | Ints:
        """Ask the arm in charge; one that does not stop early drafts on."""
        method = getattr(self._arms[self._arm], "keep_drafting", None)
        if method is None:
            return np.ones(len(signals.rows), np.bool_)
        keeps: Bools | Ints = method(state, signals)
        return keeps

    def _trim(self, state: RoundState, signals: ProposalSignals) -> Ints:
        """Ask the arm in charge; one that does not trim verifies all."""
        method = getattr(self._arms[self._arm], "trim", None)
        if method is None:
            return signals.num_proposed
        depths: Ints = method(state, signals)
        return depths

    def status(self) -> tuple[BucketStatus, ...]:
        """What is known about each range of loads met so far, smallest first."""
        found = []
        for bucket, contest in sorted(self._contests.items()):
            meters = dict(zip(self._names, contest.meters, strict=True))
            ratios = {
                name: contest.ratio(arm)
                for arm, name in enumerate(self._names)
                if arm != contest.incumbent
            }
            found.append(
                BucketStatus(
                    loads=((1 << bucket >> 1) + 1, 1 << bucket),
                    in_charge=self._names[contest.incumbent],
                    rates_tok_s={
                        name: meter.means.rate for name, meter in meters.items() if meter.num_rounds
                    },
                    log_ratios={
                        name: (ratio.value, ratio.margin)
                        for name, ratio in ratios.items()
                        if ratio.num_visits
                    },
                    num_switches=contest.num_switches,
                )
            )
        return tuple(found)

    def as_dict(self) -> dict[str, float]:
        """Counts and rates under flat names, as `EngineMetrics.as_dict` has them; see docs/guard.md."""
        rounds = max(self._num_rounds, 1)
        found: dict[str, float] = {
            "guard_rounds": self._num_rounds,
            "guard_probe_share": self._num_probe_rounds / rounds,
            "guard_aside_share": self._num_aside_rounds / rounds,
            "guard_switches": sum(one.num_switches for one in self._contests.values()),
        }
        for status in self.status():
            top = status.loads[1]
            found[f"guard_aside_at_{top}"] = float(status.in_charge != "policy")
            for name, rate in status.rates_tok_s.items():
                found[f"guard_{name}_tok_s_at_{top}"] = rate
        return found

    def __repr__(self) -> str:
        arms: list[Any] = [self.inner] if self.fallback is None else [self.inner, self.fallback]
        return f"GuardedScheduler({', '.join(map(repr, arms))})"
