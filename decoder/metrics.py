"""What an engine did: counts, times and request latencies, from the outcome of each round.

Everything about acceptance derives from one histogram, `accept_counts[k, a]`: how often a sequence
that had k tokens verified in a round had a of them accepted. Legend: R running sequences, K
`max_num_speculative_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .request import RequestMetrics

PERCENTILES = (50, 95, 99)


class RoundRow(NamedTuple):
    """One round in a line; sums and means over its running sequences. Times in seconds."""

    num_running: int
    num_waiting: int
    start_s: float
    mean_depth: float
    """Mean depth that the scheduler asked for; NaN without running sequences."""
    num_drafted: int
    num_accepted: int
    num_committed: int
    num_preempted: int
    num_pass_tokens: int
    num_prefill_tokens: int
    num_context_tokens: int
    num_draft_passes: int
    num_catch_up_tokens: int
    kv_used_fraction: float
    predicted_verify_s: float
    """What the cost model said of the verification pass; NaN without a state."""
    draft_s: float
    verify_s: float
    schedule_s: float
    other_s: float


class EngineMetrics:
    """Counts rounds and finished requests; feeding it costs a few microseconds a round.

    Attributes:
        max_num_speculative_tokens: K.
        num_rounds: rounds of the whole batch, those that only prefilled included.
        num_committed_tokens: tokens added to texts.
        num_proposed_tokens: tokens that the drafter made, trimmed ones included.
        num_pass_tokens: tokens that the target computed.
        num_prefill_tokens: prompt tokens among them, recomputation after preemption included.
        num_draft_passes: forward passes of the draft model.
        num_catch_up_tokens: tokens that the draft model computed beyond one a sequence and pass:
            prompts, and what it had sat out.
        num_preemptions: sequences that gave up their blocks, prefilling ones included.
        start_s, end_s: engine clock at the first round's start and the last one's end; NaN before.
        draft_s, verify_s, schedule_s, other_s: seconds by part, on the engine's clock.
        requests: metrics of the finished requests, in the order in which they finished.
        rounds: a row a round when `keep_rounds`, else empty.
    """

    def __init__(self, max_num_speculative_tokens: int, *, keep_rounds: bool = False) -> None:
        self.max_num_speculative_tokens = max_num_speculative_tokens
        self.keep_rounds = keep_rounds
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counts_by_running: dict[int, Ints] = {}
        self._ended_after: Ints = np.zeros(self.max_num_speculative_tokens + 1, np.int64)
        self.num_rounds = 0
        self.num_committed_tokens = 0
        self.num_proposed_tokens = 0
        self.num_pass_tokens = 0
        self.num_prefill_tokens = 0
        self.num_draft_passes = 0
        self.num_catch_up_tokens = 0
        self.num_preemptions = 0
        self.start_s = self.end_s = math.nan
        self.draft_s = self.verify_s = self.schedule_s = self.other_s = 0.0
        self.requests: list[RequestMetrics] = []
        self.rounds: list[RoundRow] = []

    def on_round(self, outcome: RoundOutcome, state: RoundState | None = None) -> None:
        """Take in a round.

        Args:
            outcome: what the round did. Preempted sequences verified nothing, so they count in
                `num_preemptions` and nowhere else.
            state: what the scheduler saw; its cost model fills `RoundRow.predicted_verify_s`.

        Raises:
            ValueError: more than K tokens drafted.
        """
        drafted, accepted = outcome.num_drafted, outcome.num_accepted
        committed = outcome.num_committed
        width = self.max_num_speculative_tokens + 1
        counts = np.bincount(drafted * width + accepted, minlength=width * width)
        if len(counts) > width * width:
            raise ValueError(
                f"A round drafted {drafted.max()} tokens, but these metrics were made for at most "
                f"{width - 1} (max_num_speculative_tokens)."
            )
        num_preempted = int(np.count_nonzero(outcome.preempted))
        counts[0] -= num_preempted
        num_running = len(drafted)
        known = self._counts_by_running.get(num_running)
        if known is None:
            self._counts_by_running[num_running] = counts
        else:
            known += counts
        num_committed = int(np.add.reduce(committed))
        self.num_proposed_tokens += int(np.add.reduce(outcome.num_proposed))
        if np.count_nonzero(outcome.finished):
            # Without a bonus token the text ended inside the draft: what followed was not rejected.
            ended = (committed == accepted) & (accepted < drafted)
            self._ended_after += np.bincount(accepted[ended], minlength=width)
        self.num_rounds += 1
        self.num_committed_tokens += num_committed
        self.num_pass_tokens += outcome.num_pass_tokens
        self.num_prefill_tokens += outcome.num_prefill_tokens
        self.num_draft_passes += len(outcome.draft_pass_sequences)
        self.num_catch_up_tokens += outcome.num_catch_up_tokens
        self.num_preemptions += num_preempted + outcome.num_preempted_prefills
        if self.num_rounds == 1:
            self.start_s = outcome.start_s
        self.end_s = outcome.start_s + outcome.elapsed_s
        self.draft_s += outcome.draft_s
        self.verify_s += outcome.verify_s
        self.schedule_s += outcome.schedule_s
        self.other_s += outcome.other_s
        if self.keep_rounds:
            self.rounds.append(_row(outcome, state, num_committed))

    def on_finished(self, metrics: RequestMetrics) -> None:
        """Take in a finished request."""
        self.requests.append(metrics)

    # Acceptance

    @property
    def accept_counts(self) -> Ints:
        """Int64 [K + 1, K + 1]: rounds of a sequence with k tokens verified and a accepted."""
        width = self.max_num_speculative_tokens + 1
        total = np.zeros(width * width, np.int64)
        for counts in self._counts_by_running.values():
            total += counts
        return total.reshape(width, width)

    @property
    def depth_counts_by_running(self) -> dict[int, Ints]:
        """Int64 [K + 1] rounds of a sequence by depth, for each number of running sequences."""
        width = self.max_num_speculative_tokens + 1
        by_running = sorted(self._counts_by_running.items())
        return {n: counts.reshape(width, width).sum(1) for n, counts in by_running if n > 0}

    @property
    def depth_counts(self) -> Ints:
        """Int64 [K + 1]: rounds of a sequence by the depth that was verified."""
        counts: Ints = self.accept_counts.sum(1)
        return counts

    @property
    def num_sequence_rounds(self) -> int:
        """Rounds summed over their sequences."""
        return int(self.accept_counts.sum())

    @property
    def num_drafted_tokens(self) -> int:
        """Drafted tokens that were verified."""
        return int(self.depth_counts @ np.arange(self.max_num_speculative_tokens + 1))

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were committed, bonus tokens left out."""
        counts = self.accept_counts.sum(0)
        return int(counts @ np.arange(self.max_num_speculative_tokens + 1))

    @property
    def num_wasted_tokens(self) -> int:
        """Proposed tokens that did not get into a text: trimmed, rejected, or past an end."""
        return self.num_proposed_tokens - self.num_accepted_tokens

    @property
    def acceptance_length(self) -> float:
        """Accepted + 1 (the bonus or recovered token), mean over rounds of a sequence."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_sequence_rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return _ratio(self.num_accepted_tokens, self.num_drafted_tokens)

    @property
    def mean_depth(self) -> float:
        """Tokens verified a sequence and round."""
        return _ratio(self.num_drafted_tokens, self.num_sequence_rounds)

    @property
    def acceptance_by_depth(self) -> Floats:
        """[K]: accepted over drafted in rounds of depth 1..K; NaN for a depth never used.

        Not comparable between depths of an adaptive policy: it goes deep where it expects much.
        """
        counts = self.accept_counts
        depths = np.arange(1, len(counts))
        return _divide(counts[1:] @ np.arange(len(counts)), depths * counts[1:].sum(1))

    @property
    def acceptance_by_position(self) -> Floats:
        """[K]: P(token j accepted | verified, and all before it accepted), j = 1..K.

        Position j is seen only in rounds with depth >= j whose first j - 1 tokens were accepted and
        did not end the text; in all others its fate is unknown (censored), and they are left out of
        numerator and denominator. NaN for a position never seen. Exact for the rounds that reached
        j; a policy that goes deep only where it expects acceptance makes them a favourable sample.
        """
        counts = self.accept_counts
        reached, passed = [], []
        for j in range(1, len(counts)):
            reached.append(counts[j:, j - 1 :].sum() - self._ended_after[j - 1])
            passed.append(counts[j:, j:].sum())
        return _divide(np.array(passed, np.int64), np.array(reached, np.int64))

    @property
    def survival_by_position(self) -> Floats:
        """[K]: P(the first j tokens are accepted), the Kaplan-Meier product over
        `acceptance_by_position`; it uses rounds of each depth, short ones included.
        """
        return np.cumprod(self.acceptance_by_position).astype(np.float64)

    # Time

    @property
    def elapsed_s(self) -> float:
        """Time inside rounds; idle waits between them are not in it."""
        return self.draft_s + self.verify_s + self.schedule_s + self.other_s

    @property
    def span_s(self) -> float:
        """From the first round's start to the last one's end, idle waits included."""
        return self.end_s - self.start_s if self.num_rounds else 0.0

    @property
    def time_shares(self) -> dict[str, float]:
        """Share of `elapsed_s` by part; they sum to 1, or are all 0 before the first round."""
        total = self.elapsed_s
        parts = ("draft", "verify", "schedule", "other")
        return {part: _ratio(getattr(self, f"{part}_s"), total) for part in parts}

    @property
    def throughput_tok_s(self) -> float:
        """Committed tokens over `elapsed_s`."""
        return _ratio(self.num_committed_tokens, self.elapsed_s)

    def goodput_tok_s(self, tpot_limit_s: float) -> float:
        """Generated tokens of finished requests whose TPOT kept the limit, over `elapsed_s`."""
        good = sum(r.num_generated_tokens for r in self.requests if r.tpot_s <= tpot_limit_s)
        return _ratio(good, self.elapsed_s)

    @property
    def ttft_s(self) -> dict[int, float]:
        """Time to first token, by percentile over requests that have one; NaN if none has."""
        return _percentiles([r.ttft_s for r in self.requests if r.num_generated_tokens > 0])

    @property
    def tpot_s(self) -> dict[int, float]:
        """Time per output token after the first, by percentile over requests that have one."""
        return _percentiles([r.tpot_s for r in self.requests if r.num_generated_tokens > 1])

    def as_dict(self) -> dict[str, float]:
        """Everything flat, with unit suffixes; what is unknown is left out."""
        values: dict[str, float] = {
            "rounds": self.num_rounds,
            "sequence_rounds": self.num_sequence_rounds,
            "requests": len(self.requests),
            "committed_tokens": self.num_committed_tokens,
            "proposed_tokens": self.num_proposed_tokens,
            "drafted_tokens": self.num_drafted_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "wasted_tokens": self.num_wasted_tokens,
            "pass_tokens": self.num_pass_tokens,
            "prefill_tokens": self.num_prefill_tokens,
            "draft_passes": self.num_draft_passes,
            "catch_up_tokens": self.num_catch_up_tokens,
            "preemptions": self.num_preemptions,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "mean_depth": self.mean_depth,
            "elapsed_s": self.elapsed_s,
            "span_s": self.span_s,
            "throughput_tok_s": self.throughput_tok_s,
        }
        values |= {f"{part}_share": share for part, share in self.time_shares.items()}
        for name, by_percentile in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            values |= {f"{name}_p{p}_ms": 1e3 * s for p, s in by_percentile.items()}
        for j, rate in enumerate(self.acceptance_by_position, 1):
            values[f"acceptance_at_position_{j}"] = float(rate)
        for k, count in enumerate(self.depth_counts):
            values[f"depth_{k}_share"] = _ratio(int(count), self.num_sequence_rounds)
        return {name: value for name, value in values.items() if not np.isnan(value)}


def _row(outcome: RoundOutcome, state: RoundState | None, num_committed: int) -> RoundRow:
    predicted = np.nan
    if state is not None:
        predicted = state.cost.outcome_pass_s(outcome)
    return RoundRow(
        num_running=len(outcome.depths),
        num_waiting=outcome.num_waiting,
        start_s=outcome.start_s,
        mean_depth=float(outcome.depths.mean()) if len(outcome.depths) else np.nan,
        num_drafted=int(outcome.num_drafted.sum()),
        num_accepted=int(outcome.num_accepted.sum()),
        num_committed=num_committed,
        num_preempted=int(outcome.preempted.sum()) + outcome.num_preempted_prefills,
        num_pass_tokens=outcome.num_pass_tokens,
        num_prefill_tokens=outcome.num_prefill_tokens,
        num_context_tokens=outcome.num_context_tokens,
        num_draft_passes=len(outcome.draft_pass_sequences),
        num_catch_up_tokens=outcome.num_catch_up_tokens,
        kv_used_fraction=outcome.kv_used_fraction,
        predicted_verify_s=predicted,
        draft_s=outcome.draft_s,
        verify_s=outcome.verify_s,
        schedule_s=outcome.schedule_s,
        other_s=outcome.other_s,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _divide(part: Ints, whole: Ints) -> Floats:
    """Elementwise part / whole, NaN where whole is 0."""
    result: Floats = np.full(len(whole), np.nan)
    np.divide(part, whole, out=result, where=whole > 0)
    return result


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    if not values:
        return dict.fromkeys(PERCENTILES, float("nan"))
    cuts = np.percentile(np.asarray(values), PERCENTILES)
    return {p: float(cut) for p, cut in zip(PERCENTILES, cuts, strict=True)}
