"""PPO's policy in the form "offset": it starts at a tuned greedy rule and bends what that rule believes.

Legend: A agents (slots), K deepest depth, F features, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import NUM_FEATURES
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.learned_offset import Float32s, survival_of_logits
from specdepth.scheduler.policy_file import PolicyWeights
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState
from specdepth.scheduler.survival_model import SurvivalModel

from .offset_weights import offset_weights

BOUND = 20.0
"""Of a logit; beyond it a chance is 0 or 1."""


class RawFeatures(BaseFeaturesExtractor):
    """Drops the `active` column and changes nothing else: features are bounded as they come.

    A survival model reads raw features, and the policy starts as one.

    Args:
        observation_space: of a slot, [1 + F].
    """

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, NUM_FEATURES)

    def forward(self, observations: Tensor) -> Tensor:
        """[rows, F] for [rows, 1 + F]."""
        return observations[:, 1:]


class OffsetPolicy(ActorCriticPolicy):
    """Logits of acceptance by position: normal around what one hidden layer makes of the features.

    All of it is stable-baselines3's own; the class says what the actions mean.
    """


class GivenLogits:
    """Turns logits of a round into depths, as `LearnedScheduler` does with those of its network.

    Args:
        shrinkage: of the rule, by number of running sequences.
    """

    def __init__(self, shrinkage: Mapping[int, Shrinkage]) -> None:
        self.shrinkage = dict(shrinkage)
        self._logits: Float32s | None = None
        self._rule = CappedGreedyDepth(self, self.shrinkage)

    def depths(self, state: RoundState, logits: Float32s) -> Ints:
        """Return the rule's depths for float32 [R, K] logits."""
        self._logits = logits
        return self._rule.choose(state)

    def survival(self, state: RoundState) -> Floats:
        """See `SurvivalEstimator`."""
        assert self._logits is not None
        return survival_of_logits(self._logits, state)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def starting_weights(scheduler: DepthScheduler) -> PolicyWeights:
    """What a policy of offsets starts as.

    Args:
        scheduler: a greedy rule over a fitted survival model, or a policy of offsets.

    Raises:
        ValueError: something else.
    """
    if isinstance(scheduler, CappedGreedyDepth) and isinstance(scheduler.survival, SurvivalModel):
        return offset_weights(scheduler, {})
    if isinstance(scheduler, LearnedScheduler) and _fits(scheduler.weights):
        return scheduler.weights
    raise ValueError(
        'action "offset" starts at a greedy rule over a fitted survival model, such as '
        f'warm_start.scheduler "rule:NAME", or at a policy of offsets, got {scheduler!r}.'
    )


def _fits(weights: PolicyWeights) -> bool:
    """Whether an `OffsetPolicy` can hold them."""
    raw = not weights.mean.any() and bool((weights.inv_std == 1).all())
    return weights.action == "offset" and len(weights.weights) == 2 and raw


def start_at(policy: OffsetPolicy, weights: PolicyWeights) -> None:
    """Make the mean of `policy` the network `weights`.

    Hidden units that it lacks keep their random inputs and say nothing yet.
    """
    units = weights.layer_sizes[1]
    first, last = policy.mlp_extractor.policy_net[0], policy.action_net
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        first.weight[:units] = torch.from_numpy(weights.weights[0])
        first.bias[:units] = torch.from_numpy(weights.biases[0])
        last.weight[:] = 0.0
        last.weight[:, :units] = torch.from_numpy(weights.weights[1])
        last.bias[:] = torch.from_numpy(weights.biases[1])
