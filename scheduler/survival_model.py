"""Runs a fitted survival model with numpy alone.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from .features import FEATURE_NAMES, feature_matrix
from .model_folder import ANY
from .state import Floats, Ints, RoundOutcome, RoundState
from .survival_estimators import within_depths
from .survival_file import (
    SURVIVAL,
    Float32s,
    SurvivalCard,
    SurvivalWeights,
    read_survival,
    save_survival,
)

__all__ = ["SurvivalCard", "SurvivalModel", "SurvivalWeights", "save_survival"]


class SurvivalModel:
    """A `SurvivalEstimator` fitted on traces: the same for all sequences, and it learns no more.

    It reads columns of `feature_matrix`, so it never sees a token drafted in this round. Survival is
    the running product of conditional acceptances, so it cannot rise with depth. In an engine that
    drafts deeper than it was fitted for, deeper tokens have no chance.

    Args:
        weights: the network.
        card: what it was fitted for.
    """

    def __init__(self, weights: SurvivalWeights, card: SurvivalCard) -> None:
        self.weights = weights
        self.card = card
        self.max_num_speculative_tokens = weights.max_num_speculative_tokens
        self._columns: Ints = np.array([FEATURE_NAMES.index(name) for name in weights.inputs])
        self._hidden_weight = np.ascontiguousarray(weights.hidden_weight.T)
        # sigmoid(z) = (1 + tanh(z / 2)) / 2 cannot overflow, and halving is exact
        self._out_weight = np.ascontiguousarray(weights.out_weight.T) * np.float32(0.5)
        self._out_bias = weights.out_bias * np.float32(0.5)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model_pair: str | None = None,
        drafter: str | None = None,
    ) -> SurvivalModel:
        """Load the model in the folder `path`.

        Args:
            path: folder with `survival.safetensors` and `config.json`.
            model_pair: refuse a model for another target and draft model; None takes any.
            drafter: refuse a model for another kind of drafter; None takes any.

        Raises:
            ValueError: files that `read_survival` refuses, or a model made for something else.
        """
        weights, card = read_survival(path)
        SURVIVAL.check_fits(
            Path(path),
            {"model pair": model_pair, "drafter": drafter},
            {"model pair": card.model_pair, "drafter": card.drafter},
        )
        return cls(weights, card)

    def conditional_acceptance(self, features: Float32s) -> Float32s:
        """Chance of each position if those before it were accepted, float32 [R, K].

        Args:
            features: float32 [R, F] from `feature_matrix`.
        """
        hidden = features.take(self._columns, axis=1) @ self._hidden_weight
        hidden += self.weights.hidden_bias
        np.tanh(hidden, out=hidden)
        chance = hidden @ self._out_weight
        chance += self._out_bias
        np.tanh(chance, out=chance)
        chance *= 0.5
        chance += 0.5
        return chance

    def survival(self, state: RoundState) -> Floats:
        """Return the chance that the first j drafted tokens are all accepted, float64 [R, K].

        Raises:
            ValueError: when the decoder's kind of drafter is not the model's.
        """
        if self.card.drafter not in (state.drafter, ANY):
            raise ValueError(
                f"the survival model was fitted for the drafter {self.card.drafter}, the decoder has "
                f"{state.drafter}; fit one for it, or use the model where it belongs."
            )
        chance = self.conditional_acceptance(feature_matrix(state))
        survival: Floats = np.multiply.accumulate(chance, axis=1, dtype=np.float64)
        return within_depths(survival, state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn: the model is frozen."""

    def reset(self) -> None:
        """Nothing to forget."""

    def __repr__(self) -> str:
        return f"SurvivalModel({self.card.model_pair}, {self.card.drafter})"
