from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdepth.agents.slot_policy import SlotPolicy
from specdepth.agents.slot_vec_env import SlotVecEnv
from specdepth.agents.train import make_model
from specdepth.agents.train_config import WarmStartConfig
from specdepth.agents.warm_start import WarmStartResult, warm_start
from specdepth.scheduler.baselines import FixedDepth, TableDepth, make_scheduler
from specdepth.scheduler.depth import DepthScheduler
from tests.agents.toy_training import toy_config, toy_vec_env
from tests.envs.toy import toy_decoder

CONFIG = WarmStartConfig(rounds=60)


def imitate(
    scheduler: DepthScheduler, env: SlotVecEnv | None = None, **arguments: Any
) -> tuple[WarmStartResult, Any, SlotVecEnv]:
    env = env or toy_vec_env()
    model = make_model(toy_config(Path("unused")).ppo, env, 0)
    settings: dict[str, Any] = {"config": CONFIG, "seed": 0} | arguments
    return warm_start(model, env, lambda: scheduler, **settings), model, env


@pytest.mark.parametrize("name", ["off", "fixed:4", "fixed:2", "table:1-1=4,2-2=2,3-=0"])
def test_the_policy_chooses_what_the_scheduler_does(name: str) -> None:
    result, _, _ = imitate(make_scheduler(name))
    assert result.agreement > 0.95


def test_smoothing_leaves_something_to_explore() -> None:
    sharp, _, _ = imitate(FixedDepth(2), config=WarmStartConfig(rounds=60, smoothing=0.0))
    smooth, model, env = imitate(FixedDepth(2), config=WarmStartConfig(rounds=60, smoothing=0.4))
    assert sharp.entropy < 0.1 < 0.5 < smooth.entropy
    rows = torch.from_numpy(env.observations()[env.active])
    assert isinstance(model.policy, SlotPolicy)
    allowed = model.policy.allowed(rows)
    probs = model.policy.log_probs(rows).exp()[allowed.sum(1) > 2]
    assert len(probs)
    share = 0.4 / allowed.sum(1)[allowed.sum(1) > 2]
    assert probs[:, 2].tolist() == pytest.approx((0.6 + share).tolist(), abs=0.1)


def test_reference_rates_become_the_schedulers() -> None:
    """Drafts are free and nearly always right: a round of depth 4 gives about 4 tokens."""
    env = toy_vec_env(toy_decoder(token_s=0.0))
    before = env.rates(1)
    imitate(FixedDepth(4), env)
    assert before == pytest.approx(0.05)
    assert env.rates(1) < 0.7 * before


@pytest.mark.parametrize(("token_s", "sign"), [(0.0, 1), (0.2, -1)])
def test_the_critic_learns_from_the_same_rounds(token_s: float, sign: int) -> None:
    """Against decoding without speculation, depth 4 is far better or far worse."""
    env = toy_vec_env(toy_decoder(token_s=token_s))
    env.rates.refresh = lambda: None  # type: ignore[method-assign]
    _, model, _ = imitate(FixedDepth(4), env)
    rows = torch.from_numpy(env.observations()[env.active])
    assert isinstance(model.policy, SlotPolicy)
    assert sign * model.policy.predict_values(rows).mean().item() > 1


def test_equal_seeds_give_equal_weights() -> None:
    weights = []
    for _ in range(2):
        _, model, _ = imitate(TableDepth([(1, 2, 3), (3, 9, 1)]))
        assert isinstance(model.policy, SlotPolicy)
        weights.append(model.policy.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_deadline_ends_it_early_but_not_empty() -> None:
    shares: list[float] = []
    result, _, _ = imitate(FixedDepth(1), deadline_s=time.monotonic() - 1, progress=shares.append)
    assert result.num_rounds == 2
    assert shares == sorted(shares)


def test_the_scheduler_is_told_what_came_of_its_choices() -> None:
    class Listening(FixedDepth):
        def observe(self, outcome: Any) -> None:
            seen.append(outcome.num_drafted.max())

    seen: list[int] = []
    imitate(Listening(3), config=WarmStartConfig(rounds=20))
    assert len(seen) == 20
    assert max(seen) == 3
