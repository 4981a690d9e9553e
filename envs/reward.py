"""What a round is worth: seconds against tokens, for the batch and for each slot.

Legend: R sequences of the round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

Timing = Literal["modelled", "measured"]
"""Whether rounds are charged by the cost model or by the clock."""


def charged_s(outcome: RoundOutcome) -> float:
    """Seconds of a round without the time to decide.

    Between showing a state and getting depths, a trainer may run a whole policy update; an exported
    policy takes a ten-thousandth of a round.
    """
    return outcome.elapsed_s - outcome.schedule_s


def modelled_s(outcome: RoundOutcome, cost: CostModel) -> float:
    """The same by the cost model: what the round takes on average, free of timing noise."""
    return cost.outcome_s(outcome)


def decision_s(
    state: RoundState, outcome: RoundOutcome, cost: CostModel, elapsed_s: float
) -> float:
    """Seconds of a round that its depths answer for.

    Prompts that ride in the pass come with the requests: so many seconds a token, whatever is done.
    Left in, they would be noise in the reward and raise the reference price of a token, and with it
    the depths that seem to pay. A sequence that was preempted, though, is an effect of depths: what
    its text will take to be computed again is charged at once.

    Args:
        state: what the depths were chosen for.
        outcome: what came of it.
        cost: prices of both parts.
        elapsed_s: the round by the clock or by the cost model.
    """
    size, prefill = outcome.num_pass_tokens, outcome.num_prefill_tokens
    context = outcome.num_context_tokens
    prompts_s = cost.outcome_pass_s(outcome) - cost.pass_s(size - prefill, 0, context)
    lost = state.positions[outcome.preempted]
    num_lost, pairs = int(lost.sum()), int(lost @ lost)
    return elapsed_s - prompts_s + cost.pass_s(num_lost, num_lost, 0, pairs)


def depth_0_seconds_per_token(cost: CostModel, num_running: int) -> float:
    """Seconds a token of the simplest reference policy, no speculation, with `num_running`."""
    rows = np.zeros(max(num_running, 1), np.int64)
    return float(cost.round_s(rows)) / len(rows)


def added_s(state: RoundState, outcome: RoundOutcome, cost: CostModel) -> Floats:
    """Seconds that each sequence's own drafts add to the round, float64 [R].

    The round by the cost model, less the same round without that sequence's drafts. In the target
    pass these are its drafted tokens. With a draft model, it is its place in the draft passes that
    it took part in, a whole pass where it drafted alone, and what it had to catch up on. Passes
    that others needed as well are not in it.
    """
    size, prefill = outcome.num_pass_tokens, outcome.num_prefill_tokens
    context = outcome.num_context_tokens
    whole_s = cost.pass_s(size, prefill, context)
    # By depth, of which there are few: a third of the time that arrays take.
    depths = range(int(outcome.num_drafted.max(initial=0)) + 1)
    by_depth = [whole_s - cost.pass_s(size - depth, prefill, context) for depth in depths]
    seconds = np.array(by_depth).take(outcome.num_drafted)
    if state.drafter == "draft-model" and not cost.drafter_is_free:
        sequences = np.array(outcome.draft_pass_sequences, np.int64)
        saved = cost.draft_pass_s(sequences) - np.where(
            sequences > 1, cost.draft_pass_s(np.maximum(sequences - 1, 1)), 0.0
        )
        upto = np.concatenate([[0.0], np.cumsum(saved)])
        seconds = seconds + upto[np.minimum(outcome.num_proposed, len(saved))]
        lag = np.where(outcome.num_proposed > 0, np.maximum(state.draft_lag, 0), 0)
        seconds = seconds + cost.draft_token_s * lag
    return np.asarray(seconds, np.float64)


class SlotReward(Protocol):
    """A form of reward: what each sequence is paid for a round, float64 [R]."""

    def __call__(
        self,
        state: RoundState,
        outcome: RoundOutcome,
        *,
        elapsed_s: float,
        seconds_per_token: float,
        cost: CostModel,
        tokens: Floats | None = None,
    ) -> Floats:
        """See `slot_rewards` for the arguments."""
        ...


def slot_rewards(
    state: RoundState,
    outcome: RoundOutcome,
    *,
    elapsed_s: float,
    seconds_per_token: float,
    cost: CostModel,
    tokens: Floats | None = None,
) -> Floats:
    """Reward of each sequence for a round, in tokens at the reference rate, float64 [R].

        tokens_i - (added_i + (elapsed - sum of added) / R) / seconds_per_token

    `added_i` is `added_s`: a difference reward, since leaving its drafts out is what a sequence
    could have done instead. The rest of the round, which it cannot change, is split evenly, so that
    rewards sum to the round's (committed - elapsed / seconds_per_token) and are near 0 on average
    under a policy that is as fast as the reference. That matters with a discount by time: a slot
    with a large income a second would count its own delays twice.

    An even split of draft passes that several sequences share would keep any from drafting deep
    alone; charging nobody would let two equally deep ones ride free. Here the one is free to leave
    and each pays 1 / R, which neither repairs nor worsens where the batch stands.

    Args:
        state: what the depths were chosen for.
        outcome: what came of it.
        elapsed_s: seconds to charge; see `decision_s`.
        seconds_per_token: of a reference policy, at this load.
        cost: prices for `added_s`.
        tokens: [R] to pay for; None: those committed. See `expected_tokens`.
    """
    added = added_s(state, outcome, cost)
    rest = (elapsed_s - added.sum()) / max(len(added), 1)
    paid = outcome.num_committed if tokens is None else tokens
    rewards: Floats = paid - (added + rest) / seconds_per_token
    return rewards


def team_rewards(
    state: RoundState,
    outcome: RoundOutcome,
    *,
    elapsed_s: float,
    seconds_per_token: float,
    cost: CostModel,
    tokens: Floats | None = None,
) -> Floats:
    """The sum of `slot_rewards` for everybody, float64 [R]: nobody learns whose doing it was.

    Args as there.
    """
    paid = outcome.num_committed if tokens is None else tokens
    whole = float(paid.sum()) - elapsed_s / seconds_per_token
    return np.full(state.num_running, whole)


def throughput_rewards(
    state: RoundState,
    outcome: RoundOutcome,
    *,
    elapsed_s: float,
    seconds_per_token: float,
    cost: CostModel,
    tokens: Floats | None = None,
) -> Floats:
    """Tokens a second of the round for everybody, float64 [R]: what one would try first.

    It is given in speeds of one sequence without speculation, a constant of the machine, so that it
    is of order 1 to 10. A sum of rates over rounds is not the rate of the whole, since rounds take
    different times, and it goes up when an easy sequence is favoured over a hard one.

    Args as in `slot_rewards`; the reference rate has no part in it.
    """
    paid = outcome.num_committed if tokens is None else tokens
    speed = float(paid.sum()) / elapsed_s * depth_0_seconds_per_token(cost, 1)
    return np.full(state.num_running, speed)


REWARDS: Mapping[str, SlotReward] = {
    "difference": slot_rewards,
    "team": team_rewards,
    "throughput": throughput_rewards,
}
"""Forms of reward that need no reference policy, by name."""


def expected_tokens(survival: Floats, outcome: RoundOutcome) -> Floats:
    """Tokens that a survival model expected of the depths that were drafted, float64 [R].

        1 + sum of survival_j over j <= k, and 0 for a sequence that was preempted

    In place of the tokens committed it takes the luck of the text out of a round's reward, and puts
    the errors of the model in: over a workload it no longer sums to the tokens of the texts, and a
    policy is paid for going where the model is too hopeful.

    Args:
        survival: [R, K] chance that the first j drafted tokens are all accepted, as of the state.
        outcome: what was drafted.
    """
    places = np.arange(survival.shape[1])
    expected = 1.0 + np.where(places < outcome.num_drafted[:, None], survival, 0.0).sum(1)
    return np.asarray(np.where(outcome.preempted, 0.0, expected), np.float64)


def relative_rewards(
    state: RoundState,
    outcome: RoundOutcome,
    *,
    runs: Ints,
    depths: Ints,
    token_worth: float,
    seconds_per_token: float,
    cost: CostModel,
) -> Floats:
    """What each sequence gained over the depth that a reference rule had chosen for it, float64 [R].

        worth * (min(run, k) - min(run, k')) - (T(n) - T(n - k + k')) / seconds_per_token

    A trace knows the run at each position, and so what the other depth k' would have earned there. That
    is a control variate: 0 where policy and rule agree, so that all noise of the text is gone, and what
    is left is the rule's advantage function but for what comes later [Kakade & Langford 2002, the
    performance difference lemma]. What comes later is in the worth of a token, below 1: a token not
    taken now is often taken cheaply in the next round.

    Args:
        state: what the depths were chosen for, of a drafter that costs nothing.
        outcome: what came of it, nobody preempted.
        runs: [R] tokens that would be accepted at most.
        depths: [R] the reference rule's, k'.
        token_worth: of a further token, in tokens of the reference rate.
        seconds_per_token: of the reference policy, at this load.
        cost: prices T of passes.
    """
    size, prefill = outcome.num_pass_tokens, outcome.num_prefill_tokens
    context, drafted = outcome.num_context_tokens, outcome.num_drafted
    gained = np.minimum(runs, drafted) - np.minimum(runs, depths)
    other_s = cost.pass_s(size - drafted + depths, prefill, context)
    added = cost.pass_s(size, prefill, context) - other_s
    return np.asarray(token_worth * gained - added / seconds_per_token, np.float64)


class ReferenceRate:
    """Seconds per token of a reference policy at each number of running sequences.

    Starts as decoding without speculation by the cost model, and is then measured: `note` collects
    rounds, `refresh` takes them over [Dinkelbach 1967, On nonlinear fractional programming: the best
    ratio is found by maximising tokens less seconds at the price of the last ratio]. With a closed
    loop the load is not the policy's doing and each load has its own rate, never above that without
    speculation: at a bad policy's price, its own depths would seem to pay. With arrivals
    (`by_load=False`) there is one rate for all: with a rate of its own, being stuck at a worse load
    would cost nothing. Legend: M machines.

    Args:
        cost: prices of the machine; or of several, each of which then has its own rates.
        max_num_seqs: S, the highest load.
        by_load: one rate for each load, or one for all.
        prior_rounds: weight of what is known at the start, in rounds.
        decay: weight that earlier rounds keep at a `refresh`.
    """

    def __init__(
        self,
        cost: CostModel | Sequence[CostModel],
        max_num_seqs: int,
        *,
        by_load: bool = True,
        prior_rounds: float = 20.0,
        decay: float = 0.7,
    ) -> None:
        self.costs = (cost,) if isinstance(cost, CostModel) else tuple(cost)
        """[M]"""
        loads = np.arange(max_num_seqs + 1)
        prior = np.array(
            [[depth_0_seconds_per_token(cost, n) for n in loads.tolist()] for cost in self.costs]
        )
        self.by_load, self.decay = by_load, decay
        self._prior_tokens: Floats = prior_rounds * np.maximum(loads, 1.0)
        self._prior_s: Floats = prior * self._prior_tokens
        self.seconds: Floats = np.zeros(prior.shape)
        """[M, S + 1] measured seconds by load, decayed."""
        self.tokens: Floats = np.zeros(prior.shape)
        """[M, S + 1] tokens committed in them."""
        self._rates = self._compute()

    def __call__(self, num_running: int, machine: int = 0) -> float:
        """Seconds per token at a load, as of the last `refresh`."""
        return float(self._rates[machine, num_running])

    def note(
        self, num_running: int, elapsed_s: float, num_committed: int, machine: int = 0
    ) -> None:
        """Collect a round."""
        self.seconds[machine, num_running] += elapsed_s
        self.tokens[machine, num_running] += num_committed

    def refresh(self) -> None:
        """Take over what was collected; rates stand still in between."""
        self._rates = self._compute()
        self.seconds *= self.decay
        self.tokens *= self.decay

    def state(self) -> dict[str, list[list[float]]]:
        """What `restore` needs, as JSON values."""
        return {
            "seconds": self.seconds.tolist(),
            "tokens": self.tokens.tolist(),
            "rates": self._rates.tolist(),
        }

    def restore(self, state: dict[str, list[list[float]]]) -> None:
        """Put back what `state` returned.

        Raises:
            ValueError: of another number of slots or machines.
        """
        # Of one machine, states of earlier versions are [S + 1].
        arrays = [
            np.atleast_2d(np.array(state[name], np.float64))
            for name in ("seconds", "tokens", "rates")
        ]
        if any(array.shape != self.seconds.shape for array in arrays):
            machines, size = self.seconds.shape
            raise ValueError(
                f"reference rates of {len(arrays[0])} machines with {arrays[0].shape[1] - 1} slots, "
                f"expected {machines} with {size - 1}."
            )
        self.seconds, self.tokens, self._rates = arrays

    def _compute(self) -> Floats:
        if self.by_load:
            mixed = (self._prior_s + self.seconds) / (self._prior_tokens + self.tokens)
            return np.minimum(mixed, self._prior_s / self._prior_tokens)
        # Loads that never occur must not weigh: the prior is one round's worth at the highest load.
        seconds = self._prior_s[:, -1] + self.seconds.sum(1)
        tokens = self._prior_tokens[-1] + self.tokens.sum(1)
        return np.repeat((seconds / tokens)[:, None], self.seconds.shape[1], axis=1)
