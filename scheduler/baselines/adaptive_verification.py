"""vLLM's adaptive verification: a budget for the batch, filled with the likeliest tokens.

Source: vLLM #47808 and #52228, `vllm/v1/worker/gpu/spec_decode/adaptive_verification.py`, class
`AdaptiveVerificationManager` (`get_num_tokens`, `_assign_draft_token_budget`).

Legend: R running sequences, D of them that drafted, K deepest depth, S engine slots.
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.state import Bools, Floats, Ints, RoundState
from specdepth.scheduler.survival import SurvivalEstimator

from .admission import expected_tokens, rank_tokens
from .confidence_trim import TRIM_RULES, ConfidenceTrim
from .lawful import EVERY_RULE
from .pricing import full_draft_s, verify_seconds


class AdaptiveVerificationDepth(ConfidenceTrim):
    """B verified drafted tokens in all, chosen on the last round's confidences, given to the B
    likeliest tokens of this round.

    B maximises expected tokens over (draft + verify) time on the confidences that each sequence
    showed in the round before, 1 for a newcomer. With a draft model whole drafts are verified until
    the estimator was fitted `warmup_refits` times, so that its own cuts do not hide what it must
    learn from.

    A stale budget does not leak this round's later tokens into earlier decisions, so the rule is lossless
    under rejection sampling with a draft model too; with `stale_budget=False` it is not, and is
    refused there.

    Args:
        survival: of prompt lookup's proposals; None: by match length.
        warmup_refits: of the estimator, 100 rounds each.
        stale_budget: False: choose B on this round's own confidences, where that is lawful.

    Raises:
        ValueError: when `warmup_refits` is negative.
    """

    def __init__(
        self,
        survival: SurvivalEstimator | None = None,
        warmup_refits: int = 3,
        stale_budget: bool = True,
    ) -> None:
        super().__init__(survival)
        if warmup_refits < 0:
            raise ValueError(f"warmup_refits is 0 or more, got {warmup_refits}.")
        self.warmup_refits = warmup_refits
        self.stale_budget = stale_budget
        self.lawful_under = EVERY_RULE if stale_budget else TRIM_RULES
        self._forget_confidences()

    def reset(self) -> None:
        """Forget what was learned."""
        super().reset()
        self._forget_confidences()

    def _forget_confidences(self) -> None:
        self._owners: Ints = np.empty(0, np.int64)
        self._confidences: Floats = np.empty((0, 0))

    def _admit(self, state: RoundState, rows: Ints, survival: Floats, num_offered: Ints) -> Ints:
        offered = np.arange(survival.shape[1]) < num_offered[:, None]
        judged = self._exchange(state, rows, survival, offered) if self.stale_budget else survival
        if state.drafter == "draft-model":
            assert self.confidence is not None
            if self.confidence.num_refits < self.warmup_refits:
                return num_offered
        tokens = expected_tokens(rank_tokens(judged), state.num_running)
        seconds = full_draft_s(state) + verify_seconds(state, len(tokens) - 1)
        budget = int((tokens / seconds).argmax())
        return rank_tokens(survival).depths(budget, len(rows))

    def _exchange(self, state: RoundState, rows: Ints, survival: Floats, offered: Bools) -> Floats:
        """Return the survival [D, K] that the last confidences mean for what is on offer now, and
        remember this round's confidences instead.
        """
        slots, owners = state.slots[rows], state.request_ids[rows]
        shape = (state.max_num_seqs, survival.shape[1])
        if self._confidences.shape != shape:
            self._owners = np.full(shape[0], -1)
            self._confidences = np.ones(shape)
        self._confidences[slots[self._owners[slots] != owners]] = 1.0
        self._owners[slots] = owners
        last = self._confidences[slots]
        before = np.ones_like(survival)
        before[:, 1:] = survival[:, :-1]
        now = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
        self._confidences[slots] = np.where(offered, now, last)
        return np.where(offered, np.cumprod(last, axis=1), 0.0)
