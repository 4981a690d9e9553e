"""What a training run is made of: decoder, slots as agents, and PPO with their shared policy."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from torch import nn

from specdepth.decoder.engine import Engine
from specdepth.decoder.prompts import load_prompt_file
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.envs.recording_pool import RecordingPool
from specdepth.envs.reward import REWARDS, ReferenceRate, slot_rewards
from specdepth.envs.workload_config import PromptLike, PromptPool
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.baselines.registry import make_scheduler
from specdepth.scheduler.cost_files import load_cost
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.policy_file import PolicyWeights
from specdepth.scheduler.survival_model import SurvivalModel

from .depth_limit import deepest_depth
from .offset_policy import GivenLogits, OffsetPolicy, RawFeatures, start_at, starting_weights
from .rollout import SlotRolloutBuffer
from .slot_policy import BatchPolicy, SlotFeatures, SlotPolicy
from .slot_vec_env import SlotVecEnv, WorkloadSource
from .train_config import PPOConfig, TrainConfig

logger = logging.getLogger(__name__)


def make_decoder(config: TrainConfig) -> SpeculativeDecoder:
    """Load the models that `config.decoder` names.

    Raises:
        ValueError: see `SpeculativeDecoder.from_pretrained` and `load_cost`.
    """
    chosen = config.decoder
    cost = None if chosen.cost is None else load_cost(chosen.cost)
    if cost is None:
        logger.warning("no cost model given: prices are made up; run `specdepth profile` first.")
    return SpeculativeDecoder.from_pretrained(
        chosen.target,
        chosen.draft,
        max_num_speculative_tokens=deepest_depth(chosen.draft, chosen.max_num_speculative_tokens),
        max_num_seqs=chosen.max_num_seqs,
        dtype=chosen.dtype,
        device=chosen.device,
        verification=chosen.verification,
        cost=cost,
    )


def make_env(
    config: TrainConfig,
    decoder: SpeculativeDecoder,
    prompts: Sequence[PromptLike] | None = None,
) -> SlotVecEnv:
    """The slots of `decoder` as agents on workloads drawn from `config`; see `train`."""
    if prompts is None and config.prompts is not None:
        prompts = tuple(p for p in load_prompt_file(config.prompts) if p.split == "train")
    pool = PromptPool(decoder, prompts)
    return _slots(config, [decoder.engine], partial(pool.workload, config.workload))


def make_replay_env(config: TrainConfig, decoders: Sequence[ReplayDecoder]) -> SlotVecEnv:
    """The slots of `decoders`, all over one trace, as agents on its training requests."""
    pool = RecordingPool(decoders[0], looping=config.replay.looping)
    engines = [decoder.engine for decoder in decoders]
    return _slots(config, engines, partial(pool.workload, config.workload))


def _slots(config: TrainConfig, engines: Sequence[Engine], draw: WorkloadSource) -> SlotVecEnv:
    first = engines[0]
    rates = ReferenceRate(first.cost, first.config.max_num_seqs, by_load=config.by_load)
    start = starting_point(config)
    return SlotVecEnv(
        engines,
        draw,
        rates,
        timing=config.reward.timing,
        seed=config.seed,
        offsets=None if start is None else GivenLogits(start.shrinkage),
        reference=_scheduler(config) if config.reward.form == "relative" else None,
        token_worth=config.reward.token_worth,
        reward=REWARDS.get(config.reward.form, slot_rewards),
        survival=_survival(config) if config.reward.tokens == "expected" else None,
        one_depth=config.action == "batch",
    )


def starting_point(config: TrainConfig) -> PolicyWeights | None:
    """What a policy of offsets starts as; None for one of depths.

    Raises:
        ValueError: `warm_start.scheduler` is nothing to start at, or made for another K.
    """
    if config.action != "offset":
        return None
    return starting_weights(_scheduler(config))


def _scheduler(config: TrainConfig) -> DepthScheduler:
    return make_scheduler(
        config.warm_start.scheduler,
        max_num_speculative_tokens=config.decoder.max_num_speculative_tokens,
    )


def _survival(config: TrainConfig) -> SurvivalModel:
    rule = _scheduler(config)
    if isinstance(rule, CappedGreedyDepth) and isinstance(rule.survival, SurvivalModel):
        return rule.survival
    raise ValueError(
        'reward.tokens "expected" asks the fitted survival model of a greedy rule, such as '
        f'warm_start.scheduler "rule:NAME", got {rule!r}.'
    )


def make_model(
    config: PPOConfig, env: SlotVecEnv, seed: int, start: PolicyWeights | None = None
) -> PPO:
    """PPO with a policy shared by all slots; `PPO.train` is stable-baselines3's own.

    Args:
        config: its settings.
        env: the slots.
        seed: of weights, actions and minibatches.
        start: what a policy of offsets starts as; None for one of depths.
    """
    policy_kwargs: dict[str, Any] = {
        "features_extractor_class": SlotFeatures,
        "features_extractor_kwargs": {"masked": config.masked_features},
        "net_arch": {"pi": list(config.hidden), "vf": list(config.hidden)},
        "activation_fn": nn.Tanh if config.activation == "tanh" else nn.ReLU,
    }
    policy: type[SlotPolicy | OffsetPolicy] = BatchPolicy if env.one_depth else SlotPolicy
    if start is not None:
        policy = OffsetPolicy
        policy_kwargs["features_extractor_class"] = RawFeatures
        policy_kwargs["features_extractor_kwargs"] = {}
        policy_kwargs["net_arch"]["pi"] = [max(config.hidden[0], start.layer_sizes[1])]
        policy_kwargs["activation_fn"] = nn.Tanh
        policy_kwargs["log_std_init"] = math.log(config.offset_std)
    cost = env.engines[0].cost
    reference_s = config.reference_round_s or float(cost.round_s(np.zeros(1, np.int64)))
    with warnings.catch_warnings():
        # It counts rows of empty slots, of which the buffer yields none.
        warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
        model = PPO(
            policy,
            env,
            learning_rate=config.learning_rate,
            n_steps=config.n_steps,
            batch_size=config.batch_size,
            n_epochs=config.n_epochs,
            gamma=config.discount,
            gae_lambda=config.gae_lambda,
            clip_range=config.clip_range,
            ent_coef=config.ent_coef,
            vf_coef=config.vf_coef,
            max_grad_norm=config.max_grad_norm,
            target_kl=config.target_kl,
            rollout_buffer_class=SlotRolloutBuffer,
            rollout_buffer_kwargs={"reference_round_s": reference_s},
            policy_kwargs=policy_kwargs,
            seed=seed,
            device="cpu",
        )
    if start is not None:
        assert isinstance(model.policy, OffsetPolicy)
        start_at(model.policy, start)
    return connect(model, env)


def connect(model: PPO, env: SlotVecEnv) -> PPO:
    """Tell the model's rollout buffer where seconds and activity come from."""
    assert isinstance(model.rollout_buffer, SlotRolloutBuffer)
    model.rollout_buffer.source = env
    return model
