"""Bandits that find the depth by trying: UCB1 and TLT's epsilon-greedy, one depth for the batch.

An arm is a depth in 0..K; the reward of a round is measured in tokens per second, prefill in the pass
included. Depths that the engine clips still count for the arm that was asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE

TLT_GROUPS = (*range(1, 32), *range(32, 128, 8), *range(128, 257, 32))
"""Smallest batch size of each of TLT's groups."""
_MAX_PASS_TOKENS = 2048
"""TLT drops arms whose verification pass would be larger."""
_REFRESH_RATE = 0.1
"""How often TLT takes the median of accept lengths anew."""


class UCBDepth:
    """UCB1 over depths, one bandit for each doubling of the batch size (1, 2, 3-4, 5-8, ...).

    Pulls each arm `min_pulls` times, then the one with the largest
    mean + sqrt(exploration x ln t / n), n pulls of the arm out of t. Rewards are tokens per second over
    the largest ones seen in that bandit, hence in 0..1.

    Source: Hou et al. 2025, "BanditSpec" (arXiv 2505.15141), and `ucb_length_spec_generate` in
    generate_utils.py of sail-sg/BanditSpec. That code divides by the pulls of all arms together, which
    gives each the same bonus, and leaves depth 0 out; both are put right here. It uses an exploration of
    6 on rewards in the hundreds, next to nothing; on rewards in 0..1 that would explore for ever.

    Args:
        exploration: c; 2 is UCB1's own for any rewards in 0..1. Those of a depth differ by a few percent
            from round to round, and a wrong depth costs up to half the throughput, so far less is best.
        min_pulls: of each arm before the rule starts.

    Raises:
        ValueError: a negative exploration or fewer than one pull.
    """

    # Past throughput is a statistic of verified tokens and of time.
    lawful_under = EVERY_RULE

    def __init__(self, exploration: float = 0.01, *, min_pulls: int = 2) -> None:
        if not (exploration >= 0 and math.isfinite(exploration)) or min_pulls < 1:
            raise ValueError(
                "UCB needs an exploration of 0 or more and at least one pull of each arm, got "
                f"{exploration} and {min_pulls}."
            )
        self.exploration = exploration
        self.min_pulls = min_pulls
        self.reset()

    def reset(self) -> None:
        """Forget all rewards."""
        self._bandits: dict[tuple[int, int], _Arms] = {}
        self._pulled: tuple[_Arms, int] | None = None

    def choose(self, state: RoundState) -> Ints:
        """Return the arm's depth for each sequence, int64 [R]."""
        top = state.max_num_speculative_tokens
        key = (max(state.num_running - 1, 0).bit_length(), top)
        arms = self._bandits.get(key)
        if arms is None:
            arms = self._bandits[key] = _Arms(top + 1)
        depth = arms.best(self.exploration, self.min_pulls)
        self._pulled = arms, depth
        return np.full(state.num_running, depth, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Reward the arm that was pulled."""
        num_tokens = int(outcome.num_committed.sum())
        if self._pulled is None or not num_tokens or outcome.elapsed_s <= 0:
            return
        arms, depth = self._pulled
        arms.add(depth, num_tokens / outcome.elapsed_s)

    def __repr__(self) -> str:
        return f"UCBDepth({self.exploration:g}, min_pulls={self.min_pulls})"


class _Arms:
    """Pulls and rewards of one bandit's arms."""

    def __init__(self, size: int) -> None:
        self.pulls: Floats = np.zeros(size)
        self.sums: Floats = np.zeros(size)
        self.largest = 0.0

    def add(self, arm: int, reward: float) -> None:
        self.pulls[arm] += 1
        self.sums[arm] += reward
        self.largest = max(self.largest, reward)

    def best(self, exploration: float, min_pulls: int) -> int:
        fewest = int(np.argmin(self.pulls))
        if self.pulls[fewest] < min_pulls:
            return fewest
        means = self.sums / (self.pulls * self.largest)
        bonus = np.sqrt(exploration * math.log(self.pulls.sum()) / self.pulls)
        return int(np.argmax(means + bonus))


class EpsilonGreedyDepth:
    """TLT's bandits: the depth with the best median reward of late, a random one now and then.

    One bandit for each of TLT's batch-size groups. The reward of a round is
    (median accept length of the depth, over all groups) x sequences / seconds: how much gets accepted
    depends on the depth and not on the batch size, so pooling takes out noise. A depth without rewards
    comes first.

    With `bands`, TLT's "BEG", a batch size may only use the arms of its band. There the arms of a band
    verify the same number of tokens in trees of different shapes. A chain has one shape for each
    number, so here 0..K is cut into as many runs of neighbouring depths as there are bands, the deepest
    for the smallest batches. Without, "EG", all arms are open, but for passes over 2,048 tokens.

    Source: Hu et al. 2025, "Taming the Long Tail" (arXiv 2511.16665), `eagle_mab.py` of
    mit-han-lab/fastrl (`MABGroupManager`, `BucketedEpsilonGreedyMAB`). That code scores an arm's
    first rewards with an accept length of 0, since it takes the median before it adds the sample; here
    the sample comes first. Its arms have no depth 0.

    Args:
        epsilon: share of rounds with a random arm.
        window: latest rewards and accept lengths of each arm and group that count.
        bands: smallest batch size of each band, ascending from 1; None: no bands.
        seed: of the random arms.

    Raises:
        ValueError: epsilon outside 0..1, an empty window, or bands that do not ascend from 1.
    """

    # Past throughput is a statistic of verified tokens and of time.
    lawful_under = EVERY_RULE

    def __init__(
        self,
        epsilon: float = 0.1,
        *,
        window: int = 1000,
        bands: Sequence[int] | None = (1, 2, 5, 21),
        seed: int = 0,
    ) -> None:
        if not 0 <= epsilon <= 1 or window < 1:
            raise ValueError(
                f"epsilon is in 0..1 and the window 1 or more rounds, got {epsilon} and {window}."
            )
        if bands is not None and (list(bands) != sorted(set(bands)) or list(bands[:1]) != [1]):
            raise ValueError(f"bands are batch sizes that ascend from 1, got {list(bands)}.")
        self.epsilon = epsilon
        self.window = window
        self.bands = None if bands is None else tuple(bands)
        self.seed = seed
        self.reset()

    def reset(self) -> None:
        """Forget all rewards and start the random draws again."""
        self._rng = np.random.default_rng(self.seed)
        self._top = -1
        self._band_arms: list[Ints] = []
        self._groups: dict[int, _Group] = {}
        self._lengths: dict[int, float] = {}
        """Pooled median accept length by depth, as of its last refresh."""
        self._pulled: tuple[_Group, int] | None = None

    def choose(self, state: RoundState) -> Ints:
        """Return the arm's depth for each sequence, int64 [R]."""
        size, top = state.num_running, state.max_num_speculative_tokens
        if top != self._top:  # the first round, or another engine
            self.reset()
            self._top = top
            deepest_first = np.arange(top, -1, -1)
            count = min(len(self.bands), top + 1) if self.bands else 1
            self._band_arms = [arms[::-1] for arms in np.array_split(deepest_first, count)]
        arms = self._open_arms(size)
        number = max(bisect_right(TLT_GROUPS, size) - 1, 0)
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group(top + 1, self.window)
        if len(arms) == 1:
            depth = int(arms[0])
        elif self._rng.random() < self.epsilon:
            depth = int(self._rng.choice(arms))
        else:
            depth = int(arms[np.argmax(group.medians[arms])])
        self._pulled = group, depth
        return np.full(size, depth, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        """Reward the arm that was pulled."""
        ran = ~outcome.preempted
        size = int(np.count_nonzero(ran))
        if self._pulled is None or not size or outcome.elapsed_s <= 0:
            return
        group, depth = self._pulled
        group.lengths[depth].add(1 + float(outcome.num_accepted[ran].mean()))
        if depth not in self._lengths or self._rng.random() < _REFRESH_RATE:
            every = [each.lengths[depth].values for each in self._groups.values()]
            self._lengths[depth] = float(np.median(np.concatenate(every)))
        group.rewards[depth].add(self._lengths[depth] * size / outcome.elapsed_s)
        group.medians[depth] = np.median(group.rewards[depth].values)

    def _open_arms(self, size: int) -> Ints:
        if self.bands:
            band = max(bisect_right(self.bands, size) - 1, 0)
            return self._band_arms[min(band, len(self._band_arms) - 1)]
        arms = self._band_arms[0]
        return arms[: max(_MAX_PASS_TOKENS // max(size, 1), 1)]  # arm k verifies k + 1 tokens each

    def __repr__(self) -> str:
        return f"EpsilonGreedyDepth({self.epsilon:g}, bands={self.bands}, seed={self.seed})"


class _Group:
    """Latest rewards and accept lengths of the arms at one range of batch sizes."""

    def __init__(self, num_arms: int, window: int) -> None:
        self.rewards = [_Window(window) for _ in range(num_arms)]
        self.lengths = [_Window(window) for _ in range(num_arms)]
        self.medians: Floats = np.full(num_arms, np.inf)
        """Of the rewards; inf before the first, so that each arm is tried."""


class _Window:
    """The latest numbers of a series, up to `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ring: Floats = np.empty(min(size, 16))
        self._count = 0

    @property
    def values(self) -> Floats:
        """In no particular order."""
        return self._ring[: self._count]

    def add(self, value: float) -> None:
        if self._count < self._size and self._count == len(self._ring):
            self._ring = np.resize(self._ring, min(self._size, 2 * self._count))
        self._ring[self._count % self._size] = value
        self._count += 1
