"""Stop drafting where the next token no longer earns what it costs.

Legend: R running sequences, D of them still drafting, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.depth import DepthScheduler, DraftSignals, lawful_rules
from specdepth.scheduler.grading import grade
from specdepth.scheduler.online_logistic import OnlineLogistic, log_odds
from specdepth.scheduler.state import Bools, Floats, Ints, RoundOutcome, RoundState

from .capped_greedy import CappedGreedyDepth
from .pricing import prefill_s, verify_seconds


class PricedStops:
    """Caps before drafting; after each draft pass the sequences go on that earn the next one.

    A sequence that goes on wins a token with its survival: the product of the acceptance rates that the
    draft model's largest probabilities mean in this round, up to the token that would be drawn now
    (`OnlineLogistic`, fitted to verdicts). It pays for verifying that token in this pass, and for the
    next draft pass unless it is at its cap; the pass that showed the token is paid already. Both prices
    go by the whole batch: of the sequences in the order of what they win, as many go on as win most
    in all.

    Seconds are turned into tokens at the rate that rounds have earned of late, the price of time of a
    long run [Dinkelbach 1967, "On nonlinear fractional programming"], which is never less than that
    of decoding without drafts. Survival does not rise along a draft, so a token that does not pay is
    followed by none that does, and looking one token ahead is enough (the monotone case of optimal
    stopping).

    A stopped token gets no verdict, so the rule that sets the caps learns of the likelier tokens only, and
    pays for a pass that shows nothing worth keeping now and then. Telling it that stopped tokens fell
    made it give up drafting that paid.

    With another drafter than a draft model it is the inner rule.

    Args:
        caps: chooses them; None: `CappedGreedyDepth` with `ConfidenceSurvival`. Its own hooks are not
            used.
    """

    memory = 0.98
    """Weight of the past, after each round, in the rate of tokens."""

    def __init__(self, caps: DepthScheduler | None = None) -> None:
        self.caps = CappedGreedyDepth(ConfidenceSurvival()) if caps is None else caps
        # Stops go by q_j of sequences still drafting, before x_j is drawn, and by past rounds.
        self.lawful_under = lawful_rules(self.caps)
        self._forget()

    def _forget(self) -> None:
        self.acceptance: OnlineLogistic | None = None
        """P(accepted) from the largest draft probability; from the first round of a draft model on."""
        self._earned = self._spent = 0.0
        self._state: RoundState | None = None
        """Of the round under way, with a draft model."""
        self._round_caps: Ints = np.zeros(0, np.int64)
        self._num_drawn = 0

    @property
    def gain(self) -> float:
        """Tokens of recent rounds over those that decoding without drafts makes in the same time, at
        least 1.
        """
        return max(self._earned / self._spent, 1.0) if self._spent else 1.0

    def reset(self) -> None:
        """Forget what was learned."""
        self._forget()
        reset = getattr(self.caps, "reset", None)
        if reset is not None:
            reset()

    def choose(self, state: RoundState) -> Ints:
        """Return the caps, int64 [R]."""
        depths = self.caps.choose(state)
        top, size = state.max_num_speculative_tokens, state.num_running
        if state.drafter == "draft-model" and size:
            self._state = state
            if self.acceptance is None or len(self.acceptance.intercepts) != top:
                self.acceptance = OnlineLogistic(top)
            self._round_caps = np.minimum(depths, state.max_depths)
            self._num_drawn = 0
        return depths

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: who goes on, so that the batch wins most."""
        assert self.acceptance is not None
        rows, step, size = signals.rows, signals.num_drafted, len(signals.rows)
        survival = survival_so_far(self.acceptance, signals.top1)
        rides = self._round_caps[rows] > step + 1
        rate = self.gain / _plain_token_s(state)
        # Who is at its cap does without the next pass, so it may be in front of likelier ones.
        pass_s = state.cost.draft_pass_s(np.arange(size + 1))
        order = np.argsort(rate * pass_s[size] / size * rides - survival, kind="stable")
        verify_s = verify_seconds(state, self._num_drawn + size)[self._num_drawn :]
        seconds = verify_s - verify_s[0]
        seconds[1:] += pass_s[np.cumsum(rides[order])]
        wins = -rate * seconds
        wins[1:] += np.cumsum(survival[order])
        num_going = int(wins.argmax())
        stays = np.zeros(size, np.bool_)
        stays[order[:num_going]] = True
        self._num_drawn += num_going
        return stays

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how likely tokens were, and what time is worth."""
        self.caps.observe(outcome)
        state, self._state = self._state, None
        if self.acceptance is None or state is None:
            return
        grades = grade(outcome, len(self.acceptance.intercepts))
        self.acceptance.observe(log_odds(outcome.draft_top1), grades.tested, grades.accepted)
        self._earned = self.memory * self._earned + float(outcome.num_committed.sum())
        seconds = state.cost.outcome_s(outcome) - prefill_s(state)
        self._spent = self.memory * self._spent + seconds / _plain_token_s(state)

    def __repr__(self) -> str:
        return f"PricedStops({self.caps!r})"


def _plain_token_s(state: RoundState) -> float:
    """Seconds a token where nobody drafts."""
    return float(verify_seconds(state, 0)[0]) / state.num_running


def survival_so_far(acceptance: OnlineLogistic, top1: Floats) -> Floats:
    """Return P(all tokens up to the next one are accepted), float64 [D].

    Args:
        acceptance: of K positions.
        top1: [D, at most K] largest draft probabilities; an unknown one is worth nothing.
    """
    features = np.zeros((len(top1), len(acceptance.intercepts)))
    features[:, : top1.shape[1]] = log_odds(top1)
    rates = acceptance.predict(features)[:, : top1.shape[1]]
    return np.asarray(np.nan_to_num(rates).prod(axis=1), np.float64)
