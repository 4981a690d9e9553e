"""What was decoded between two policy updates, as numbers to log."""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Floats, RoundOutcome


class DecodeStats:
    """Sums over rounds.

    Args:
        max_num_speculative_tokens: K.
    """

    def __init__(self, max_num_speculative_tokens: int) -> None:
        self._num_depths = max_num_speculative_tokens + 1
        self._depths: dict[int, Floats] = {}
        self._by_running: dict[int, list[float]] = {}
        self.num_rounds = 0
        self.num_decisions = 0
        self.num_committed = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.elapsed_s = 0.0
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.reward = 0.0

    def add(self, outcome: RoundOutcome, *, elapsed_s: float, rewards: Floats) -> None:
        """Take in a round: its outcome, the seconds charged for it, its slots' rewards."""
        running, committed = len(outcome.depths), int(outcome.num_committed.sum())
        drafted = int(outcome.num_drafted.sum())
        depths = self._depths.setdefault(running, np.zeros(self._num_depths))
        depths += np.bincount(outcome.num_drafted, minlength=self._num_depths)
        self.num_rounds += 1
        self.num_decisions += running
        self.num_committed += committed
        self.num_drafted += drafted
        self.num_accepted += int(outcome.num_accepted.sum())
        self.elapsed_s += elapsed_s
        self.draft_s += outcome.draft_s
        self.verify_s += outcome.verify_s
        self.reward += float(rewards.sum())
        sums = self._by_running.setdefault(running, [0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate((elapsed_s, committed, drafted, running)):
            sums[i] += value

    def by_load(self) -> dict[int, dict[str, float]]:
        """For each number of running sequences: `throughput_tok_s` and `mean_depth`."""
        return {
            running: {"throughput_tok_s": tokens / max(s, 1e-12), "mean_depth": drafted / rows}
            for running, (s, tokens, drafted, rows) in sorted(self._by_running.items())
        }

    def depth_counts(self) -> dict[int | str, Floats]:
        """For each number of running sequences: how often each depth was drafted, float64 [K + 1]."""
        return dict(sorted(self._depths.items()))

    def as_dict(self) -> dict[str, float]:
        """Everything flat, with unit suffixes; empty without rounds."""
        if not self.num_rounds:
            return {}
        return {
            "rounds": self.num_rounds,
            "decisions": self.num_decisions,
            "num_running": self.num_decisions / self.num_rounds,
            "throughput_tok_s": self.num_committed / max(self.elapsed_s, 1e-12),
            "acceptance_length": 1.0 + self.num_accepted / self.num_decisions,
            "acceptance_rate": self.num_accepted / max(self.num_drafted, 1),
            "num_speculative_tokens": self.num_drafted / self.num_decisions,
            "depth_0_share": sum(float(one[0]) for one in self._depths.values())
            / self.num_decisions,
            "round_ms": 1e3 * self.elapsed_s / self.num_rounds,
            "draft_ms": 1e3 * self.draft_s / self.num_rounds,
            "verify_ms": 1e3 * self.verify_s / self.num_rounds,
            "reward": self.reward / self.num_decisions,
        }
