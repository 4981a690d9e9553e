"""Imitation of a depth scheduler before PPO: the policy starts where the scheduler is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from torch.nn.functional import mse_loss

from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Bools, Floats, Ints

from .offset_policy import OffsetPolicy
from .rollout import SlotRolloutBuffer
from .slot_policy import SlotPolicy
from .slot_vec_env import SlotVecEnv
from .train_config import WarmStartConfig

SchedulerFactory = Callable[[], DepthScheduler]
RATE_SHARE = 0.3
"""Share of the rounds after which reference rates are taken over: what the critic learns from the
rest is then in the unit that PPO goes on with."""
LEARNING_RATE = 3e-3
BATCH_SIZE = 64
MIN_STEPS = 400
"""Gradient steps at least: a short warm start makes more passes over its few decisions."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Rounds driven by a scheduler. Legend: N rounds, A agents."""

    observations: NDArray[np.float32]
    """[N, A, 1 + F]"""
    actions: NDArray[Any]
    """[N, A] depths as honoured, 0 in empty slots; or [N, A, K] logits."""
    rewards: NDArray[np.float32]
    episode_starts: Bools
    """[N, A]; the first row is not marked."""
    elapsed_s: Floats
    failed: Bools
    last_dones: Bools
    """[A]"""
    last_active: Bools
    """[A]"""


@dataclass
class _Recorded:
    """Plays the part of the environment for a buffer that is filled afterwards."""

    last_elapsed_s: Floats
    last_failed: Bools
    active: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartResult:
    """How well the imitation went."""

    num_rounds: int
    num_decisions: int
    agreement: float
    """Share of decisions with a choice in which the policy's best depth is the scheduler's."""
    entropy: float
    """Mean entropy of the policy in these decisions, in nats."""


def warm_start(
    model: PPO,
    env: SlotVecEnv,
    make_scheduler: SchedulerFactory,
    config: WarmStartConfig,
    *,
    seed: int,
    deadline_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> WarmStartResult:
    """Let a scheduler drive `env`, then fit actor, critic and normalisation of `model` to that.

    A policy of offsets is the scheduler already: it drives itself, and only its critic is fitted. The
    reference rates of `env` become the scheduler's. `env` has to be reset afterwards.

    Args:
        model: with a `SlotPolicy` or an `OffsetPolicy`.
        env: the engines to drive.
        make_scheduler: makes one for each engine.
        config: how long, and how closely to imitate.
        seed: of the minibatches.
        deadline_s: `time.monotonic()` at which no further round starts.
        progress: called with the share that is done, 0..1.
    """
    report = progress or (lambda share: None)
    policy = model.policy
    assert isinstance(policy, SlotPolicy | OffsetPolicy)
    schedulers = [make_scheduler() for _ in env.engines]
    env.reset()
    first = max(int(config.rounds * RATE_SHARE), 1)
    total = max(config.rounds, first + 1)
    parts = []
    for start, stop in ((0, first), (first, total)):
        parts.append(_gather(env, schedulers, policy, start, stop, total, deadline_s, report))
        env.rates.refresh()
    rows = np.concatenate([p.observations[_counts(p)] for p in parts])
    rng = torch.Generator().manual_seed(seed)
    if isinstance(policy, OffsetPolicy):
        _fit_critic(policy, *_returns(model, parts[1]), config, rng)
        return WarmStartResult(
            num_rounds=sum(len(p.rewards) for p in parts),
            num_decisions=len(rows),
            agreement=1.0,
            entropy=0.0,
        )
    depths: Ints = np.concatenate([p.actions[_counts(p)] for p in parts])
    policy.normaliser.update(rows)
    _fit_actor(policy, torch.from_numpy(rows), torch.from_numpy(depths), config, rng)
    _fit_critic(policy, *_returns(model, parts[1]), config, rng)
    return _result(policy, rows, depths, sum(len(p.rewards) for p in parts))


def _counts(part: Demonstrations) -> Bools:
    counts: Bools = (part.observations[..., 0] > 0) & ~part.failed
    return counts


def _gather(
    env: SlotVecEnv,
    schedulers: list[DepthScheduler],
    policy: SlotPolicy | OffsetPolicy,
    start: int,
    stop: int,
    total: int,
    deadline_s: float | None,
    report: Callable[[float], None],
) -> Demonstrations:
    rows: list[tuple[NDArray[Any], ...]] = []
    dones: Bools = np.zeros(env.num_envs, np.bool_)
    observations = env.observations()
    for done in range(start, stop):
        # The first round of each part is needed: there is no policy without one.
        if done > start and deadline_s is not None and time.monotonic() > deadline_s:
            break
        actions: NDArray[Any] = np.zeros(env.num_envs, np.int64)
        if isinstance(policy, OffsetPolicy):
            actions = policy.predict(observations, deterministic=True)[0]
        else:
            for index, scheduler in enumerate(schedulers):
                state = env.state_of(index)
                depths = np.minimum(scheduler.choose(state), state.max_depths)
                actions[env.agents_of(index)] = depths.max() if env.one_depth else depths
        upcoming, rewards, ends, _ = env.step(actions)
        assert isinstance(upcoming, np.ndarray)
        for scheduler, outcome in zip(schedulers, env.last_outcomes, strict=True):
            if outcome is not None:
                scheduler.observe(outcome)
        rows.append((observations, actions, rewards, dones, env.last_elapsed_s, env.last_failed))
        observations, dones = upcoming, ends
        report((done + 1) / total)
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    return Demonstrations(
        observations=columns[0],
        actions=columns[1],
        rewards=columns[2],
        episode_starts=columns[3],
        elapsed_s=columns[4],
        failed=columns[5],
        last_dones=dones,
        last_active=env.active,
    )


def _returns(model: PPO, part: Demonstrations) -> tuple[torch.Tensor, torch.Tensor]:
    """Observations [rows, 1 + F] and their discounted returns [rows], with PPO's own discount."""
    used = model.rollout_buffer
    assert isinstance(used, SlotRolloutBuffer)
    num_rounds, num_agents = part.rewards.shape
    buffer = SlotRolloutBuffer(
        num_rounds,
        used.observation_space,
        used.action_space,
        device="cpu",
        gae_lambda=1.0,
        gamma=used.gamma,
        n_envs=num_agents,
        reference_round_s=used.reference_round_s,
    )
    nothing = torch.zeros(num_agents)
    unused = np.zeros((num_agents, buffer.action_dim), np.int64)
    for row in range(num_rounds):
        buffer.source = _Recorded(part.elapsed_s[row], part.failed[row], part.last_active)
        buffer.add(
            part.observations[row],
            unused,
            part.rewards[row],
            part.episode_starts[row],
            nothing,
            nothing,
        )
    buffer.compute_returns_and_advantage(nothing, part.last_dones)
    rows = buffer.active
    return torch.from_numpy(buffer.observations[rows]), torch.from_numpy(buffer.returns[rows])


def _batches(size: int, rng: torch.Generator, epochs: int) -> list[torch.Tensor]:
    epochs = max(epochs, MIN_STEPS // math.ceil(size / BATCH_SIZE))
    orders = (torch.randperm(size, generator=rng) for _ in range(epochs))
    return [order[at : at + BATCH_SIZE] for order in orders for at in range(0, size, BATCH_SIZE)]


def _fit_actor(
    policy: SlotPolicy,
    rows: torch.Tensor,
    depths: torch.Tensor,
    config: WarmStartConfig,
    rng: torch.Generator,
) -> None:
    parameters = [*policy.mlp_extractor.policy_net.parameters(), *policy.action_net.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    for at in _batches(len(rows), rng, config.epochs):
        log_probs = policy.log_probs(rows[at])
        allowed = policy.allowed(rows[at])
        target = allowed * (config.smoothing / allowed.sum(1, keepdim=True))
        target.scatter_add_(1, depths[at, None], torch.full((len(at), 1), 1.0 - config.smoothing))
        # Excluded depths have a target of 0 and a finite score: their product is 0.
        loss = -(target * log_probs).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _fit_critic(
    policy: SlotPolicy | OffsetPolicy,
    rows: torch.Tensor,
    returns: torch.Tensor,
    config: WarmStartConfig,
    rng: torch.Generator,
) -> None:
    parameters = [*policy.mlp_extractor.value_net.parameters(), *policy.value_net.parameters()]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    for at in _batches(len(rows), rng, config.epochs):
        loss = mse_loss(policy.predict_values(rows[at]).flatten(), returns[at])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _result(
    policy: SlotPolicy, rows: NDArray[np.float32], depths: Ints, num_rounds: int
) -> WarmStartResult:
    with torch.no_grad():
        observations = torch.from_numpy(rows)
        log_probs = policy.log_probs(observations)
        choice = policy.allowed(observations).sum(1) > 1
        if not bool(choice.any()):
            return WarmStartResult(
                num_rounds=num_rounds, num_decisions=len(rows), agreement=1.0, entropy=0.0
            )
        best = log_probs.argmax(1) == torch.from_numpy(depths)
        entropy = -(log_probs.exp() * log_probs).sum(1)
    return WarmStartResult(
        num_rounds=num_rounds,
        num_decisions=len(rows),
        agreement=float(best[choice].float().mean()),
        entropy=float(entropy[choice].mean()),
    )
