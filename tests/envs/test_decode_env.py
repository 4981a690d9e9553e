from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.envs import LIVE_DECODE
from specdepth.envs.decode_env import LiveDecodeEnv
from specdepth.envs.workload_config import WorkloadConfig
from specdepth.scheduler.cost import CostModel
from tests.decoder.tiny import noisy_copy
from tests.envs.toy import toy_decoder, toy_model, toy_prompts

SMALL = {"num_requests": 5, "concurrencies": (1, 2, 4), "max_new_tokens": 12}
ZERO = np.zeros(4, np.int64)


def small_env(decoder: SpeculativeDecoder | None = None, **changes: Any) -> LiveDecodeEnv:
    arguments: dict[str, Any] = {"prompts": toy_prompts(), "workload": SMALL}
    return LiveDecodeEnv(decoder or toy_decoder(), **(arguments | changes))


def play(env: Any, depth: int = 2, seed: int | None = 0, **options: Any) -> list[Any]:
    """Steps of an episode with one depth for all."""
    env.reset(seed=seed, options=options)
    steps = []
    while True:
        steps.append(env.step(np.full(env.unwrapped.num_slots, depth)))
        if steps[-1][2] or steps[-1][3]:
            return steps


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_gymnasium_and_stable_baselines3_accept_it(clock: str) -> None:
    decoder = toy_decoder()
    if clock == "wall":
        from specdepth.decoder.clock import WallClock

        decoder.engine.clock = WallClock()
    env = gymnasium.make(
        f"specdepth.envs:{LIVE_DECODE}", decoder=decoder, prompts=toy_prompts(), workload=SMALL
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*unconventional shape")
        check_env(env.unwrapped, skip_render_check=True)
        check_env_for_sb3(env)
    env.close()


def test_it_is_registered_as_nondeterministic() -> None:
    assert gymnasium.spec(LIVE_DECODE).nondeterministic


def test_on_a_virtual_clock_it_passes_the_determinism_checks_of_gymnasium() -> None:
    """They are skipped for the registered id, which declares itself nondeterministic."""
    from gymnasium.envs.registration import EnvSpec

    env = small_env()
    env.spec = EnvSpec("specdepth/Virtual-v0", entry_point=small_env, nondeterministic=False)
    for seed in range(5):  # the checker samples its action
        env.action_space.seed(seed)
        check_env(env, skip_render_check=True)


def test_equal_seeds_give_equal_episodes_on_a_virtual_clock() -> None:
    first, second, other = (play(small_env(), seed=s) for s in (3, 3, 4))
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a[0], b[0])
        assert a[1:4] == b[1:4]
        assert a[4] == b[4]
    assert [step[1] for step in first] != [step[1] for step in other]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_every_observation_lies_in_the_space(seed: int, data: st.DataObject) -> None:
    env = SHARED
    observation, _ = env.reset(seed=seed)
    assert observation in env.observation_space
    env.action_space.seed(seed)
    over = False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert observation in env.observation_space
        assert np.isfinite(reward)
        over = terminated or truncated
    assert terminated
    assert not observation.any()


def test_metadata_names_the_columns() -> None:
    env = small_env()
    assert len(env.metadata["column_names"]) == env.observation_space.shape[1]  # type: ignore[index]
    assert env.metadata["column_names"][0] == "active"


def test_the_return_is_tokens_at_the_reference_rate_less_the_time_there_was_work() -> None:
    for depth in (0, 2, 4):
        env = small_env(seconds_per_token=0.02)
        steps = play(env, depth)
        total = sum(step[1] for step in steps)
        info = steps[-1][4]
        first_s = env.run.now_s - sum(step[4]["step_s"] for step in steps)
        assert total == pytest.approx(5 * 12 * 0.02 - info["now_s"] + first_s)


def test_the_work_is_the_same_whatever_is_done() -> None:
    tokens = [
        sum(step[4]["num_committed_tokens"] for step in play(small_env(), depth))
        for depth in (0, 1, 4)
    ]
    assert set(tokens) == {60}


def test_deep_pays_where_tokens_are_free_and_none_where_they_are_dear() -> None:
    for token_s, deep_pays in ((0.0, True), (0.2, False)):
        deep, none = (
            sum(step[1] for step in play(small_env(toy_decoder(token_s=token_s)), depth))
            for depth in (4, 0)
        )
        assert (deep > none) is deep_pays


def test_seconds_of_rounds_that_only_prefill_are_charged_to_the_step_before() -> None:
    env = small_env(
        toy_decoder(max_num_batched_tokens=4), workload={**SMALL, "concurrencies": (1,)}
    )
    steps = play(env, 0)
    absorbed = [step[4]["prefill_s"] for step in steps]
    assert sum(seconds > 0 for seconds in absorbed) == 4  # before each request but the first
    for step in steps:
        info = step[4]
        parts = info["draft_s"] + info["verify_s"] + info["other_s"] + info["prefill_s"]
        assert info["step_s"] == pytest.approx(parts)
        price = 0.05  # one sequence without speculation
        assert step[1] == pytest.approx(info["num_committed_tokens"] * price - info["step_s"])


def test_thinking_costs_nothing() -> None:
    env = small_env()
    env.reset(seed=0)
    env.decoder.engine.clock.wait_until(env.decoder.engine.clock.now() + 60)
    *_, info = env.step(ZERO)
    assert info["step_s"] < 0.2


def test_entries_of_empty_slots_are_ignored_and_deep_ones_clipped() -> None:
    env = small_env(workload={**SMALL, "concurrencies": (1,), "num_requests": 2})
    env.reset(seed=0)
    *_, info = env.step(np.array([4, 4, 4, 4]))
    assert info["num_running"] == 1
    assert info["num_drafted_tokens"] == 4
    assert max(step[4]["num_drafted_tokens"] for step in play(env, 4)) == 4


@pytest.mark.parametrize("arrivals", ["constant", "varying", "poisson", "bursty"])
def test_every_kind_of_workload_is_served(arrivals: str) -> None:
    env = small_env(workload={**SMALL, "arrivals": arrivals, "rate": 2.0})
    info = play(env)[-1][4]
    assert info["num_finished_requests"] == 5


def test_a_workload_can_be_given_for_one_episode() -> None:
    env = small_env()
    drawn = env._draw(WorkloadConfig(num_requests=2, max_new_tokens=3))
    fixed = Workload(requests=drawn.requests, process=ClosedLoop.constant(2))
    assert play(env, workload=fixed)[-1][4]["num_finished_requests"] == 2
    assert play(env, workload={"num_requests": 3})[-1][4]["num_finished_requests"] == 3
    assert play(env)[-1][4]["num_finished_requests"] == 5


def test_an_episode_is_truncated_after_max_rounds() -> None:
    env = small_env(max_rounds=3)
    steps = play(env)
    assert len(steps) == 3
    assert steps[-1][2:4] == (False, True)
    assert len(play(env, max_rounds=2)) == 2


def test_it_works_with_a_draft_model_and_a_small_pool() -> None:
    cost = CostModel.linear(base_s=0.05, token_s=0.003, draft_base_s=0.005, draft_token_s=1e-4)
    decoder = toy_decoder(
        cost=cost, draft=noisy_copy(toy_model(), 0.1), block_size=4, num_kv_blocks=14
    )
    env = small_env(decoder, workload={**SMALL, "concurrencies": (4,), "num_requests": 8})
    steps = play(env, 4)
    assert steps[-1][2]
    assert sum(step[4]["num_preempted"] for step in steps) > 0
    assert sum(step[4]["draft_s"] for step in steps) > 0


def fail_after(decoder: SpeculativeDecoder, rounds: int, error: Exception) -> None:
    run = decoder.runner.run
    left = iter(range(rounds))

    def failing(plan: Any) -> Any:
        if next(left, None) is None:
            raise error
        return run(plan)

    decoder.runner.run = failing  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory"), MemoryError("no"), OSError("gone")]
)
def test_a_backend_failure_truncates_and_says_so(error: Exception) -> None:
    env = small_env()
    fail_after(env.decoder, 3, error)
    steps = play(env)
    assert len(steps) == 4
    before, last = steps[-2], steps[-1]
    assert last[1:4] == (0.0, False, True)
    assert np.array_equal(last[0], before[0])
    assert last[4] == {"error_type": type(error).__name__, "error": str(error)}
    assert not env.decoder.engine.has_work


def test_after_a_backend_failure_it_can_be_reset() -> None:
    env = small_env()
    run = env.decoder.runner.run
    fail_after(env.decoder, 2, RuntimeError("once"))
    play(env)
    env.decoder.runner.run = run  # type: ignore[method-assign]
    assert play(env)[-1][2]


def test_a_failure_after_a_finished_round_keeps_that_rounds_reward() -> None:
    decoder = toy_decoder(max_num_batched_tokens=4)
    env = small_env(decoder, workload={**SMALL, "concurrencies": (1,)})
    whole = play(env, 0)
    at = next(i for i, step in enumerate(whole) if step[4]["prefill_s"] > 0)
    run = decoder.runner.run

    def failing(plan: Any) -> Any:
        if not len(plan.slots) and decoder.engine.metrics.num_rounds > 1:
            raise RuntimeError("while prefilling")
        return run(plan)

    decoder.runner.run = failing  # type: ignore[method-assign]
    steps = play(env, 0)
    assert len(steps) == at + 1
    assert steps[-1][3]
    assert steps[-1][4]["error_type"] == "RuntimeError"
    assert steps[-1][1] == pytest.approx(0.05 - 0.05, abs=1e-10)  # steps of the virtual clock


@pytest.mark.parametrize(
    "error", [TypeError("a bug"), ValueError("a bug"), NotImplementedError(), ZeroDivisionError()]
)
def test_errors_of_the_program_are_raised(error: Exception) -> None:
    env = small_env()
    env.reset(seed=0)
    fail_after(env.decoder, 0, error)
    with pytest.raises(type(error)):
        env.step(ZERO)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workload": {"num_request": 3}}, "its fields are arrivals"),
        ({"workload": 3}, "must be a Workload or a WorkloadConfig"),
        ({"max_rounds": 0}, "max_rounds must be at least 1"),
        ({"seconds_per_token": -1.0}, "seconds_per_token must be 0 or more"),
        ({"render_mode": "human"}, "nothing to render"),
        ({"decoder_options": {"max_num_seqs": 2}}, "not with a finished decoder"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_env(**arguments)


def test_a_decoder_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a function that makes one"):
        LiveDecodeEnv(lambda: 3, prompts=toy_prompts())  # type: ignore[arg-type]


def test_unknown_options_and_actions_of_a_wrong_shape_are_refused() -> None:
    env = small_env()
    with pytest.raises(ValueError, match="unknown reset options prompt"):
        env.reset(options={"prompt": 1})
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"expected \(4,\)"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match=r"expected depths in 0\.\.4"):
        env.step(np.full(4, 5))
    env.step(ZERO)  # the round is still there


def test_stepping_without_an_episode_is_an_error() -> None:
    env = small_env()
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(ZERO)
    play(env)
    with pytest.raises(RuntimeError, match="The episode is over"):
        env.step(ZERO)
    env.reset(seed=0)
    env.close()
    assert not env.decoder.engine.has_work
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(ZERO)


def test_a_function_makes_the_decoder_and_the_spec_copies_no_models() -> None:
    decoder = toy_decoder()
    for source in (decoder, lambda: decoder):
        env = gymnasium.make(LIVE_DECODE, decoder=source, prompts=toy_prompts(), workload=SMALL)
        assert env.spec is not None
        assert env.spec.kwargs["decoder"]() is decoder
        again = gymnasium.make(env.spec)
        assert again.unwrapped.decoder is decoder  # type: ignore[attr-defined]


def test_prices_can_be_given() -> None:
    cost = CostModel.linear(base_s=1.0, token_s=0.1)
    env = small_env(cost=cost)
    assert env.decoder.engine.cost is cost
    _, info = env.reset(seed=0)
    assert info["seconds_per_token"] == pytest.approx((1.0 + 0.1) / 2)


SHARED = small_env()
