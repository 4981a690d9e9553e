"""The policy network shared by all slots: normalised features in, one score a depth out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.distributions import CategoricalDistribution, Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import Tensor

from specdepth.scheduler.features import FEATURE_NAMES, HIGH, NUM_FEATURES, UNIT_DEPTH

from .feature_groups import feature_mask

CLIP = 5.0
"""Bound of normalised features."""
MIN_STD = 0.1
"""Features are bounded by 1 or so. One that hardly varied in training, such as the flag of a load
that never occurred, must not become huge where it does."""
_MAX_DEPTH = FEATURE_NAMES.index("max_depth")
MAX_DEPTH_COLUMN = 1 + _MAX_DEPTH
MOST_SHOWN = float(HIGH[_MAX_DEPTH])
EXCLUDED = -1e8
"""Score of a depth that cannot be honoured."""


class SlotFeatures(BaseFeaturesExtractor):
    """Drops the `active` column and normalises by running mean and standard deviation.

    The statistics are part of the network, so they are saved with it, and folded into the export.
    They only move in `update`, which must not run between collecting a rollout and training on it:
    the old log-probabilities would be of another policy.

    Args:
        observation_space: of a slot, [1 + F].
    """

    mean: Tensor
    inv_std: Tensor
    keep: Tensor
    count: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(self, observation_space: spaces.Space[Any], masked: Sequence[str] = ()) -> None:
        super().__init__(observation_space, NUM_FEATURES)
        # Not saved: it follows from the settings, and older checkpoints have none.
        self.register_buffer("keep", torch.from_numpy(feature_mask(masked)), persistent=False)
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("inv_std", self.keep.clone())
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(NUM_FEATURES, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(NUM_FEATURES, dtype=torch.float64))

    def forward(self, observations: Tensor) -> Tensor:
        """Normalised features, [rows, F], for [rows, 1 + F]."""
        return ((observations[:, 1:] - self.mean) * self.inv_std).clamp(-CLIP, CLIP)

    def update(self, observations: NDArray[np.float32]) -> None:
        """Take observations [rows, 1 + F] of active slots into the statistics."""
        if not len(observations):
            return
        rows = torch.from_numpy(observations[:, 1:].astype(np.float64))
        self.count += len(rows)
        self.sums += rows.sum(0)
        self.squares += (rows**2).sum(0)
        mean = self.sums / self.count
        std = (self.squares / self.count - mean**2).clamp_min(0).sqrt()
        self.mean.copy_(mean)
        self.inv_std.copy_(self.keep / std.clamp_min(MIN_STD))


class SlotPolicy(ActorCriticPolicy):
    """stable-baselines3's MLP policy with depths masked that a slot cannot use.

    Where a proposal has two tokens, depths above 2 are all the same; where it has none, there is
    nothing to decide: the distribution is a point, its log-probability 0, and such rows leave the
    policy loss by themselves while the critic still learns from them. An exported policy masks alike
    (`PolicyCard.mask_depths`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.action_dist, CategoricalDistribution):
            raise ValueError("SlotPolicy needs one discrete depth an agent.")
        assert isinstance(self.action_space, spaces.Discrete)
        self._depths = torch.arange(int(self.action_space.n))

    def allowed(self, obs: Tensor) -> Tensor:
        """Whether each depth can be honoured, bool [rows, K + 1]; depth 0 always can."""
        shown = obs[:, MAX_DEPTH_COLUMN, None]
        # At its bound the feature says no more than that; the engine clips what goes too far.
        return (self._depths <= torch.round(shown * UNIT_DEPTH)) | (shown >= MOST_SHOWN)

    def log_probs(self, obs: Tensor) -> Tensor:
        """Log-probability of each depth, [rows, K + 1]; finite where it is excluded."""
        features = self.extract_features(obs)
        assert isinstance(features, Tensor)
        scores = self.action_net(self.mlp_extractor.forward_actor(features))
        return torch.log_softmax(scores.masked_fill(~self.allowed(obs), EXCLUDED), dim=1)

    def _distribution(self, latent: Tensor, obs: Tensor) -> Distribution:
        scores = self.action_net(latent)
        return self.action_dist.proba_distribution(scores.masked_fill(~self.allowed(obs), EXCLUDED))

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values [rows, 1] and log-probabilities for observations [rows, 1 + F]."""
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        distribution = self._distribution(latent_pi, obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.value_net(latent_vf), distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities and entropy, all [rows]."""
        assert isinstance(obs, Tensor)
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        distribution = self._distribution(latent_pi, obs)
        return self.value_net(latent_vf), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """Distribution over depths."""
        assert isinstance(obs, Tensor)
        features = self.extract_features(obs)
        assert isinstance(features, Tensor)
        return self._distribution(self.mlp_extractor.forward_actor(features), obs)

    @property
    def normaliser(self) -> SlotFeatures:
        """The running statistics.

        Raises:
            ValueError: another extractor was chosen.
        """
        if not isinstance(self.features_extractor, SlotFeatures):
            raise ValueError("the policy has no SlotFeatures.")
        return self.features_extractor


class BatchPolicy(SlotPolicy):
    """The same network where one row stands for all sequences, and its depth is for all of them.

    The class says what the actions mean, to whoever exports them.
    """
