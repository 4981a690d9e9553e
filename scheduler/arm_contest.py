"""Which arm decides at one range of loads: `ArmContest`, incumbent against challengers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from .paired_rates import LogRatio, PairedRates, RoundMeans


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """How a guard measures and when it changes its mind."""

    probe_rounds: int = 4
    """Counted rounds of a challenger in a row."""
    first_interval: int = 8
    """Rounds of the incumbent before the first probe, and between probes of a challenger that seems
    no slower."""
    growth: float = 4.0
    """An interval is at most so many times the one before."""
    max_interval: int = 4096
    """Longest interval in rounds: within so many, a changed machine is noticed."""
    budget: float = 0.002
    """Share of the time that probes of one challenger may cost: the worse it is, the rarer they are."""
    margin: float = 0.01
    """Smallest advantage that is worth a change."""
    confidence: float = 3.0
    """Standard errors by which an advantage must exceed 0."""
    min_visits: int = 4
    """Probes of a challenger, `first_interval` apart, before anything is concluded."""
    window: int = 128
    """Latest probes that count."""

    def __post_init__(self) -> None:
        least = {
            "probe_rounds": 1,
            "first_interval": 1,
            "max_interval": self.first_interval,
            "growth": 1,
            "min_visits": 2,
            "window": self.min_visits,
        }
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}.")
        for name in ("budget", "margin", "confidence"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}.")


class ArmMeter:
    """Running means of an arm's rounds, and what keeps a stall of the machine from weighing too much."""

    _MEMORY = 256
    """Rounds that the means go back to."""
    _MAX_STALL = 4.0
    """No round counts for longer than so many times the mean."""
    _LEAST = 8
    """Rounds before that bound holds."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.means = RoundMeans(0.0, 0.0)

    def add(self, tokens: int, seconds: float) -> float:
        """Take in a round and return the seconds that it counts for."""
        mean = self.means
        if self.num_rounds >= self._LEAST:
            seconds = min(seconds, self._MAX_STALL * mean.seconds)
        self.num_rounds += 1
        weight = 1 / min(self.num_rounds, self._MEMORY)
        self.means = RoundMeans(
            mean.tokens + weight * (tokens - mean.tokens),
            mean.seconds + weight * (seconds - mean.seconds),
        )
        return seconds


@dataclass(slots=True)
class _Duel:
    """Two arms, a before b in order, and when they meet again."""

    rates: PairedRates
    interval: float
    waited: int = 0
    """Rounds of the incumbent since the last meeting."""
    changes: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """What the latest changes to the challenger cost on top, in rounds of the incumbent."""


class PromptPrice:
    """Seconds that a prompt token adds to a round: the slope of the latest rounds' times over their prompt
    tokens.
    """

    _MEMORY = 256
    """Rounds that the slope goes back to."""
    _RARE = 0.5
    """Share of rounds without prompt tokens below which they are too rare to go by alone."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._without = 1.0
        self._tokens = self._seconds = self._variance = self._covariance = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether rounds without prompt tokens are rare here."""
        return self._without < self._RARE

    @property
    def token_s(self) -> float:
        """The slope, at least 0."""
        return max(self._covariance / self._variance, 0.0) if self._variance else 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take in a round with so many prompt tokens."""
        self._num_rounds += 1
        weight = 1 / min(self._num_rounds, self._MEMORY)
        off_tokens, off_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._without += weight * ((num_tokens == 0) - self._without)
        self._tokens += weight * off_tokens
        self._seconds += weight * off_seconds
        self._variance += weight * ((1 - weight) * off_tokens**2 - self._variance)
        self._covariance += weight * ((1 - weight) * off_tokens * off_seconds - self._covariance)


class ArmContest:
    """Runs an incumbent, probes its challengers in short blocks, and changes the incumbent for one that
    is faster with confidence.

    Args:
        num_arms: arms are 0 .. `num_arms` - 1; 0 is the first incumbent.
        config: intervals and thresholds.
    """

    _REFERENCE_BLOCKS = 8
    """Rounds of the incumbent beside a probe, in blocks: they are free, and the noise is theirs."""
    _MAX_BLOCKS = 4
    """A probe ends after so many times its rounds, counted or not."""

    def __init__(self, num_arms: int, config: GuardConfig) -> None:
        self.config = config
        self.incumbent = 0
        self.num_switches = 0
        self.meters = [ArmMeter() for _ in range(num_arms)]
        self._prompts = PromptPrice()
        """Of the incumbents' rounds."""
        self._probed: int | None = None
        self._duels: dict[tuple[int, int], _Duel] = {}
        size = self._REFERENCE_BLOCKS * config.probe_rounds
        self._reference: deque[tuple[int, float]] = deque(maxlen=size)
        """Tokens and seconds of the incumbent's latest counted rounds since the last probe."""
        self._block: list[tuple[int, float]] = []
        """Counted rounds of the probe."""
        self._decoded: list[tuple[int, float]] = []
        """The same and those that had not settled."""
        self._num_block_rounds = 0

    @property
    def arm(self) -> int:
        """Who decides the next round."""
        return self.incumbent if self._probed is None else self._probed

    @property
    def is_probing(self) -> bool:
        """Whether the next round belongs to a challenger."""
        return self._probed is not None

    def ratio(self, arm: int) -> LogRatio:
        """Log of the rate of `arm` over the incumbent's, from their meetings."""
        if arm == self.incumbent:
            return LogRatio(0.0, 0.0, 0)
        found = self._duel(arm).rates.log_ratio()
        return found if arm > self.incumbent else found.flipped

    def interrupt(self) -> None:
        """Other loads came in between: what was measured just before is no longer beside what comes."""
        self._reference.clear()
        self._end_block()

    def add(
        self, tokens: int, seconds: float, *, num_prompt_tokens: int, usable: bool, settled: bool
    ) -> None:
        """Take in a round that `arm` decided.

        Args:
            tokens: committed.
            seconds: elapsed.
            num_prompt_tokens: tokens of prompts in its pass.
            usable: whether its time is the arm's, but for those.
            settled: whether the round before was the same arm's. A draft model that sat out computes
                what it missed in the first round.
        """
        if usable and settled and self._probed is None:
            self._prompts.add(num_prompt_tokens, seconds)
        if num_prompt_tokens:
            seconds -= self._prompts.token_s * num_prompt_tokens
            usable = usable and self._prompts.is_needed and seconds > 0
        if usable and settled:
            seconds = self.meters[self.arm].add(tokens, seconds)
        if self._probed is None:
            if usable and settled:
                self._reference.append((tokens, seconds))
            self._wait()
            return
        self._num_block_rounds += 1
        if usable:
            self._decoded.append((tokens, seconds))
            if settled:
                self._block.append((tokens, seconds))
        config = self.config
        if len(self._block) >= config.probe_rounds:
            self._meet(self._probed)
        elif self._num_block_rounds >= self._MAX_BLOCKS * config.probe_rounds:
            self._space(self._duel(self._probed), math.inf)
            self._end_block()

    def _wait(self) -> None:
        challengers = [arm for arm in range(len(self.meters)) if arm != self.incumbent]
        for arm in challengers:
            self._duel(arm).waited += 1
        if len(self._reference) < min(self.config.first_interval, self.config.probe_rounds):
            return
        due = [arm for arm in challengers if self._duel(arm).waited >= self._duel(arm).interval]
        if due:
            self._probed = due[0]
            self._duel(due[0]).waited = 0

    def _meet(self, challenger: int) -> None:
        """Compare the block with the rounds beside it, and draw the consequences."""
        config, duel = self.config, self._duel(challenger)
        mine, theirs = _means(self._reference), _means(self._block)
        num_rounds, num_decoded = self._num_block_rounds, len(self._decoded)
        late_s = num_decoded * (_means(self._decoded).seconds - theirs.seconds)
        duel.changes.append(late_s / mine.seconds)
        a, b = (mine, theirs) if self.incumbent < challenger else (theirs, mine)
        duel.rates.add(a, b)
        duel.rates.forget_before_change(config.margin)
        self._end_block()
        self._reference.clear()
        found = self.ratio(challenger)
        if found.num_visits < config.min_visits:
            return
        if found.value > max(config.margin, found.margin):
            self._switch(challenger)
            return
        lost = num_rounds * theirs.seconds / mine.seconds * (1 - math.exp(found.value))
        lost += median(duel.changes)  # one of them may hold a stall of the machine
        self._space(duel, lost / config.budget)

    def _space(self, duel: _Duel, affordable: float) -> None:
        """Set the interval to `affordable` rounds, or what is nearest to it."""
        config = self.config
        wanted = min(duel.interval * config.growth, affordable)
        duel.interval = min(max(wanted, config.first_interval), config.max_interval)

    def _switch(self, challenger: int) -> None:
        duel, config = self._duel(challenger), self.config
        self.incumbent = challenger
        self.num_switches += 1
        for arm in range(len(self.meters)):
            if arm != challenger:
                other = self._duel(arm)
                other.waited, other.interval = 0, config.first_interval
                other.changes.clear()  # they were counted in another incumbent's rounds
        duel.interval = min(config.first_interval * config.growth, config.max_interval)

    def _end_block(self) -> None:
        self._probed = None
        self._block.clear()
        self._decoded.clear()
        self._num_block_rounds = 0

    def _duel(self, arm: int) -> _Duel:
        """The one between `arm` and the incumbent."""
        pair = (min(arm, self.incumbent), max(arm, self.incumbent))
        if pair not in self._duels:
            config = self.config
            rates = PairedRates(config.window, config.confidence)
            self._duels[pair] = _Duel(rates, config.first_interval)
        return self._duels[pair]


def _means(rounds: Iterable[tuple[int, float]]) -> RoundMeans:
    tokens, seconds = zip(*rounds, strict=True)
    return RoundMeans(sum(tokens) / len(tokens), sum(seconds) / len(seconds))
