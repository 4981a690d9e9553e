"""Stop drafting where the next token no longer earns what it costs.

Legend: R running sequences, D of them still drafting, K deepest depth.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.confidence_survival import ConfidenceSurvival
from specdepth.scheduler.depth import DepthScheduler, DraftSignals, lawful_rules
from specdepth.scheduler.grading import grade
from specdepth.scheduler.online_logistic import OnlineLogistic, log_odds
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .capped_greedy import CappedGreedyDepth
from .pricing import prefill_s, verify_seconds


class PricedStops:
    """After each draft pass: who draws the token that it showed, and who rides in the next pass.

    A pass shows the law of the next token. To draw that token wins a token with its survival: the product
    of the acceptance rates that the draft model's largest probabilities mean in this round, up to
    that token (`OnlineLogistic`, fitted to verdicts). It costs its verification and nothing else, the
    pass is paid already. Of those who draw, some ride in the next pass, for the token after: it wins that
    token's survival, which is this one's times the chance that the next stands if this one does
    (a second model, on this one's confidence), and pays for the pass and for the verification. Both
    prices go by the whole batch: of the sequences in the order of what they win, as many as win most
    in all.

    Seconds are turned into tokens at the rate that rounds have earned of late, the price of time of a
    long run [Dinkelbach 1967, "On nonlinear fractional programming"], which is never less than that
    of decoding without drafts; times the `Shrinkage.stop_price` of the load where the inner rule has one.
    Survival does not rise along a draft, so it looks one token ahead (the
    monotone case of optimal stopping).

    Before drafting the inner rule says who drafts at all, and no more: they may all go as deep as there is
    room. A cap that is set before anything was shown takes away the option to go on where the draft model
    turns out to be sure, and where it does not the stops end the draft sooner. Depth 0 is not left to
    the stops: they are asked when the first pass is paid.

    A stopped token gets no verdict, so the inner rule learns of the likelier tokens only, and pays for a
    pass that shows nothing worth keeping now and then. Telling it that stopped tokens fell made it give
    up drafting that paid.

    With another drafter than a draft model it is the inner rule.

    Args:
        caps: says who drafts; None: `CappedGreedyDepth` with `ConfidenceSurvival`. Its own hooks are
            not used.
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
        self.following: OnlineLogistic | None = None
        """P(the next token is accepted, if this one is) from this one's, [K - 1] positions."""
        self._earned = self._spent = 0.0
        self._state: RoundState | None = None
        """Of the round under way, with a draft model."""
        self._limits: Ints = np.zeros(0, np.int64)
        """[R] how deep each may go in it."""
        self._verify_s: Floats = np.zeros(0)
        """Seconds without draft passes by drawn tokens, as far as they go."""
        self._survival: Floats = np.zeros(0)
        """[R] chance that all tokens that a pass has shown are accepted."""
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
        """Return all that is possible for those who draft, int64 [R]."""
        depths = self.caps.choose(state)
        top = state.max_num_speculative_tokens
        if state.drafter != "draft-model" or not state.num_running:
            return depths
        if self.acceptance is None or len(self.acceptance.intercepts) != top:
            self.acceptance = OnlineLogistic(top)
            self.following = OnlineLogistic(top - 1)
        self._state = state
        self._limits = np.where(depths > 0, state.max_depths, 0)
        self._verify_s = verify_seconds(state, int(self._limits.sum()))
        self._survival = np.zeros(state.num_running)
        return self._limits

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Ints:
        """Return how deep each may go, int64 [D]: no further, one token, or on to the next pass."""
        assert self.acceptance is not None
        assert self.following is not None
        rows, step = signals.rows, signals.num_drafted
        if not step:
            self._num_drawn = 0
        tokens_a_second = self.gain / self._plain_token_s(state)
        if isinstance(self.caps, CappedGreedyDepth):
            tokens_a_second *= self.caps.shrinkage_at(state.num_running).stop_price
        prices = tokens_a_second * (
            self._verify_s[self._num_drawn :] - self._verify_s[self._num_drawn]
        )
        shown = log_odds(signals.top1[:, step:])
        survival = stands_at(self.acceptance, shown, step)
        if step:
            survival *= self._survival[rows]
        self._survival[rows] = survival
        draws = _most_won(survival, prices)
        answer = np.full(len(rows), step)
        answer[draws] = step + 1
        may_ride = draws[self._limits[rows[draws]] > step + 1]
        if len(may_ride):
            pass_s = state.cost.draft_passes_s(len(may_ride))
            prices = prices[len(draws) :][: len(pass_s)] - prices[len(draws)]
            prices += tokens_a_second * pass_s
            follows = stands_at(self.following, shown[may_ride], step)
            rides = may_ride[_most_won(survival[may_ride] * follows, prices)]
            answer[rides] = self._limits[rows[rides]]
        self._num_drawn += len(draws)
        return answer

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how likely tokens were, and what time is worth."""
        self.caps.observe(outcome)
        state, self._state = self._state, None
        if self.acceptance is None or self.following is None or state is None:
            return
        grades = grade(outcome, len(self.acceptance.intercepts))
        shown = log_odds(outcome.draft_top1)
        self.acceptance.observe(shown, grades.tested, grades.accepted)
        self.following.observe(shown[:, :-1], grades.tested[:, 1:], grades.accepted[:, 1:])
        self._earned = self.memory * self._earned + float(outcome.num_committed.sum())
        seconds = state.cost.outcome_s(outcome) - prefill_s(state)
        self._spent = self.memory * self._spent + seconds / self._plain_token_s(state)

    def _plain_token_s(self, state: RoundState) -> float:
        """Seconds a token where nobody drafts."""
        return float(self._verify_s[0]) / state.num_running

    def __repr__(self) -> str:
        return f"PricedStops({self.caps!r})"


def stands_at(model: OnlineLogistic, shown: Floats, position: int) -> Floats:
    """Return P(accepted) of one position, float64 [D].

    Args:
        model: of positions.
        shown: [D, 1] log-odds of the largest draft probabilities; an unknown one is worth nothing.
        position: which.
    """
    rates = model.predict(shown, first=position)[:, 0]
    return np.asarray(np.fmax(rates, 0.0))  # NaN becomes 0


def _most_won(worth: Floats, prices: Floats) -> Ints:
    """Return the likeliest of D sequences, as many as win most: indices, the likeliest first.

    Args:
        worth: [D] tokens that each wins.
        prices: [more than D] what the first n of them cost together, in tokens.
    """
    order = np.argsort(-worth, kind="stable")
    wins = -prices[: len(worth) + 1]
    wins[1:] += np.cumsum(worth[order])
    return order[: int(wins.argmax())]
