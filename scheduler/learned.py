"""Runs an exported policy with numpy alone: no stable-baselines3, gymnasium or torch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from .baselines.capped_greedy import CappedGreedyDepth
from .baselines.priced_stops import PricedStops
from .batch_row import batch_row
from .features import HIGH, LOW, NUM_FEATURES, feature_matrix
from .learned_offset import LogitSurvival
from .model_folder import ANY
from .policy_file import POLICY, Float32s, PolicyCard, PolicyWeights, read_policy, save_policy
from .state import Ints, RoundOutcome, RoundState

__all__ = ["LearnedScheduler", "PolicyCard", "PolicyWeights", "save_policy"]


class LearnedScheduler:
    """A policy shared by all sequences, in one of two forms.

    With `action` "depth" each sequence's depth is the best-scored output of its row. With "offset" the
    outputs are logits of acceptance by position, as bent by learning, and the capped greedy rule
    chooses the batch's depths by them: the network says what tokens are worth, the rule what they cost.
    With "batch" there is one row, of what the sequences have in common (`batch_row`), and one depth for
    all, which is clipped for those that cannot draft so deep.
    Weights with `stops` put `PricedStops` around the rule, and the policy has `keep_drafting` and `reset`.

    Deterministic. The network does not learn while it runs; the stops do.

    Args:
        weights: the network.
        card: what it was made for.

    Raises:
        ValueError: weights for another number of features.
    """

    # Under "rejection" with a draft model a depth may depend on verified tokens and on what was
    # known before this round's drafts were drawn. The features are that: the proposal length is K
    # for a draft model, and its confidences are those of an *earlier* round. Some of them belong to
    # tokens that were discarded, but knowing them cannot bend the law: random draws are keyed by
    # (seed, position, attempt) and never used twice, so given the committed text the drafts and
    # accept tests of this round are independent of them, and a round is exact for any depth that was
    # fixed before it. Stops go by the law of a token that is not drawn yet, and by past rounds, whose
    # discarded tokens tell nothing of this round's for the same reason.
    lawful_under = frozenset({"greedy", "coupled", "prompt-lookup", "rejection"})

    def __init__(self, weights: PolicyWeights, card: PolicyCard) -> None:
        if len(weights.mean) != NUM_FEATURES:
            raise ValueError(f"policy for {len(weights.mean)} features, there are {NUM_FEATURES}.")
        self.weights = weights
        self.card = card
        self.max_num_speculative_tokens = card.max_num_speculative_tokens
        self._layers = tuple(
            (np.ascontiguousarray(weight.T), bias)
            for weight, bias in zip(weights.weights, weights.biases, strict=True)
        )
        self._clip = np.float32(weights.clip)
        # Policies of offsets read features as they are, and those are bounded.
        self._is_raw = (
            not weights.mean.any()
            and bool((weights.inv_std == 1).all())
            and weights.clip >= max(float(HIGH.max()), -float(LOW.min()))
        )
        self._depths: Ints = np.array(weights.depths, np.int64)
        self._rule: CappedGreedyDepth | PricedStops | None = None
        if weights.action == "offset":
            self._rule = CappedGreedyDepth(LogitSurvival(self.scores), weights.shrinkage)
        if weights.stops:
            self._rule = stops = PricedStops(self._rule)
            # Looked up by name: a policy without stops must not have them.
            self.keep_drafting, self.reset = stops.keep_drafting, stops.reset

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model_pair: str | None = None,
        drafter: str | None = None,
        max_num_speculative_tokens: int | None = None,
    ) -> LearnedScheduler:
        """Load the policy in the folder `path`.

        Args:
            path: folder with `policy.safetensors` and `config.json`.
            model_pair: refuse a policy for another target and draft model; None takes any.
            drafter: refuse a policy for another kind of drafter; None takes any.
            max_num_speculative_tokens: refuse a policy for another K; None takes any, and offsets fit
                any: to them deeper tokens have no chance.

        Raises:
            ValueError: files that `read_policy` refuses, or a policy made for something else.
        """
        weights, card = read_policy(path)
        offsets = weights.action == "offset"
        POLICY.check_fits(
            Path(path),
            {
                "model pair": model_pair,
                "drafter": drafter,
                "max_num_speculative_tokens": None if offsets else max_num_speculative_tokens,
            },
            {
                "model pair": card.model_pair,
                "drafter": card.drafter,
                "max_num_speculative_tokens": card.max_num_speculative_tokens,
            },
        )
        return cls(weights, card)

    def scores(self, observations: Float32s) -> Float32s:
        """Score each action, float32 [R, actions], for raw features, float32 [R, F]."""
        hidden = observations
        if not self._is_raw:
            hidden = (observations - self.weights.mean) * self.weights.inv_std
            np.maximum(hidden, -self._clip, out=hidden)
            np.minimum(hidden, self._clip, out=hidden)
        last = len(self._layers) - 1
        for i, (weight, bias) in enumerate(self._layers):
            hidden = hidden @ weight
            hidden += bias
            if i < last:
                if self.weights.activation == "tanh":
                    np.tanh(hidden, out=hidden)
                else:
                    np.maximum(hidden, 0, out=hidden)
        return hidden

    def choose(self, state: RoundState) -> Ints:
        """Return the best depth of each sequence, int64 [R].

        Raises:
            ValueError: when the decoder's K or kind of drafter is not the policy's.
        """
        if self.card.drafter not in (state.drafter, ANY):
            raise ValueError(
                f"the policy was trained for the drafter {self.card.drafter}, the decoder has "
                f"{state.drafter}; train one for it, or use the policy where it belongs."
            )
        if self._rule is not None:
            return self._rule.choose(state)
        if state.max_num_speculative_tokens != self.max_num_speculative_tokens:
            raise ValueError(
                "the policy was trained for max_num_speculative_tokens "
                f"{self.max_num_speculative_tokens}, the decoder has "
                f"{state.max_num_speculative_tokens}; set the decoder's to the policy's."
            )
        rows, deepest = feature_matrix(state), state.max_depths
        together = self.weights.action == "batch" and state.num_running > 0
        if together:
            rows, deepest = batch_row(rows)[None], deepest.max(keepdims=True)
        scores = self.scores(rows)
        if self.card.mask_depths:
            np.copyto(scores, -np.inf, where=self._depths > deepest[:, None])
        best: Ints = self._depths[scores.argmax(axis=1)]
        return best.repeat(state.num_running) if together else best

    def observe(self, outcome: RoundOutcome) -> None:
        """Let the stops learn; the network is frozen."""
        if self._rule is not None:
            self._rule.observe(outcome)

    def __repr__(self) -> str:
        return f"LearnedScheduler({self.card.model_pair}, {self.card.drafter})"
