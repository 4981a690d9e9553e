"""Stop drafting where the draft model is not confident: the rules of transformers and of llama.cpp.

Both look at the probability that the draft model gives to a drafted token. The seam shows the law of the
next token and its largest probability, not the token, so the largest probability stands for it. Under
greedy drafting the two are the same number. Under sampling the largest is at least as large, so these
rules stop no sooner than the originals; in return a decision never looks at a drawn token.

Prompt lookup proposes tokens with certainty: its law is a point mass, whose largest probability is 1. No
threshold up to 1 stops it, so both rules then draft what is on offer, up to K. That is also what
transformers and llama.cpp do with their own lookup drafters, which ignore these thresholds.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.depth import DraftSignals
from specdepth.scheduler.state import Bools, Floats, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE

_MIN_SAMPLES = 6
"""Drafted tokens before the first fit; transformers asks for more than 5."""
_MISS_COST = 3.0
"""What a stop before an acceptable token costs, in drafts that would have been rejected."""


class HFConfidence:
    """Stop *after* the first drafted token whose probability is below a threshold; refit the threshold.

    Source: `ConfidenceCriteria` (generation/stopping_criteria.py) and
    `AssistedCandidateGenerator.update_candidate_strategy` (generation/candidate_generator.py) of
    transformers 5, with `num_assistant_tokens` = K and the "constant" schedule.

    The unsure token is kept and verified, as there, and a sequence always drafts at least one. The
    seam can only ask before a token is drawn, so a sequence that stops has ridden in one draft pass
    more than it used; transformers saves that pass.

    After each round the threshold is the one that minimises false positives + 3 x false negatives, as
    rates on the ROC curve of past drafted tokens (probability against accepted), up to the first
    rejected token of a draft. Transformers collects them for one sequence, from scratch at each call.
    Here all sequences share the threshold, and the last `window` tokens are kept.

    Args:
        threshold: at the start; 0.4 in transformers.
        window: past tokens that the refit looks at; 0 keeps `threshold` as it is, as transformers does
            where scikit-learn is not installed.

    Raises:
        ValueError: a threshold outside 0..1 or a negative window.
    """

    # Whether position j is verified depends on the laws of earlier positions and on past rounds'
    # verified tokens, never on x_j.
    lawful_under = EVERY_RULE

    def __init__(self, threshold: float = 0.4, *, window: int = 1000) -> None:
        self.initial_threshold = _checked_threshold(threshold)
        if window < 0:
            raise ValueError(f"the window is 0 or more tokens, got {window}.")
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget past tokens and go back to the first threshold."""
        self.threshold = self.initial_threshold
        """In force now."""
        self._confidences: Floats = np.empty(0)
        self._matched: Bools = np.empty(0, np.bool_)

    def choose(self, state: RoundState) -> Ints:
        """Return what is on offer, int64 [R]: drafting decides where to stop."""
        return np.minimum(state.max_depths, state.max_num_speculative_tokens)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: whether the token drawn last was probable enough."""
        if signals.num_drafted == 0:
            return np.ones(len(signals.rows), np.bool_)
        return np.asarray(signals.top1[:, signals.num_drafted - 1] >= self.threshold)

    def observe(self, outcome: RoundOutcome) -> None:
        """Refit the threshold to what was accepted."""
        if not self.window:
            return
        accepted = outcome.num_accepted
        # A text that ended inside its draft shows no rejection: its last committed token is accepted.
        rejected = (outcome.num_drafted > accepted) & (outcome.num_committed > accepted)
        columns = np.arange(outcome.draft_top1.shape[1])
        shown = columns < (accepted + rejected)[:, None]
        shown &= ~np.isnan(outcome.draft_top1)
        if not shown.any():
            return
        matched = (columns < accepted[:, None])[shown]
        self._confidences = np.append(self._confidences, outcome.draft_top1[shown])[-self.window :]
        self._matched = np.append(self._matched, matched)[-self.window :]
        threshold = roc_threshold(self._confidences, self._matched)
        if threshold is not None:
            self.threshold = threshold

    def __repr__(self) -> str:
        return f"HFConfidence({self.initial_threshold:g}, window={self.window})"


class LlamaCppConfidence:
    """Stop *before* the first token whose draft probability is below `p_min`; it isn't verified.

    Source: `common_speculative_impl_draft_simple::draft` in common/speculative.cpp of llama.cpp, with
    its draft-max = K and its draft-min = 0, so a draft may be empty. There the probability is
    renormalised over the ten likeliest tokens; here it is the plain one, which is a little smaller.

    Args:
        p_min: least probability of a drafted token; 0.75 in llama.cpp's `common_speculative_params`.

    Raises:
        ValueError: when it is outside 0..1.
    """

    # Goes by q_j before x_j is drawn.
    lawful_under = EVERY_RULE

    def __init__(self, p_min: float = 0.75) -> None:
        self.p_min = _checked_threshold(p_min)

    def choose(self, state: RoundState) -> Ints:
        """Return what is on offer, int64 [R]: drafting decides where to stop."""
        return np.minimum(state.max_depths, state.max_num_speculative_tokens)

    def keep_drafting(self, state: RoundState, signals: DraftSignals) -> Bools:
        """Return bool [D]: whether the next token is probable enough."""
        return np.asarray(signals.top1[:, -1] >= self.p_min)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def __repr__(self) -> str:
        return f"LlamaCppConfidence({self.p_min:g})"


def roc_threshold(confidences: Floats, matched: Bools) -> float | None:
    """Return the confidence that best separates accepted tokens from rejected ones.

    Minimises FPR + 3 FNR, where tokens of at least the threshold count as positive; of equally good
    thresholds the highest.

    Args:
        confidences: [N] draft probabilities.
        matched: [N] whether each token was accepted.

    Returns:
        One of `confidences`; None with too few tokens, or where all had the same fate.
    """
    num_matched = int(np.count_nonzero(matched))
    num_others = len(matched) - num_matched
    if len(matched) < _MIN_SAMPLES or not num_matched or not num_others:
        return None
    order = np.argsort(-confidences, kind="stable")
    descending = confidences[order]
    true_positives = np.cumsum(matched[order])
    false_positives = np.arange(1, len(matched) + 1) - true_positives
    cost = false_positives / num_others + _MISS_COST * (1 - true_positives / num_matched)
    # Equal confidences can't be told apart: a threshold lets all of them through or none.
    cost[:-1][descending[:-1] == descending[1:]] = np.inf
    return float(descending[np.argmin(cost)])


def _checked_threshold(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise ValueError(f"a confidence threshold is a probability in 0..1, got {threshold}.")
    return threshold
