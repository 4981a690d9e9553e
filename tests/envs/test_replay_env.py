from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import MultiDiscrete
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.envs import REPLAY_DECODE
from specdepth.envs.replay_env import ReplayDecodeEnv
from specdepth.scheduler.cost import CostModel
from tests.envs.toy_trace import COST, toy_trace

ID = f"specdepth.envs:{REPLAY_DECODE}"
SMALL = {"num_requests": 5, "concurrencies": (1, 2, 4)}
SLOTS = {"max_num_seqs": 4}


def small_env(trace: Any = None, **changes: Any) -> ReplayDecodeEnv:
    arguments: dict[str, Any] = {"cost": COST, "workload": SMALL, "engine_options": SLOTS}
    return ReplayDecodeEnv(trace or toy_trace(), **(arguments | changes))


def play(env: Any, depth: int = 2, seed: int | None = 0, **options: Any) -> list[Any]:
    env.reset(seed=seed, options=options)
    steps = []
    while True:
        steps.append(env.step(np.full(env.unwrapped.num_slots, depth)))
        if steps[-1][2] or steps[-1][3]:
            return steps


def assert_equal_steps(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a[0], b[0])
        assert a[1:] == b[1:]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    toy_trace().save(tmp_path / "toy.npz")
    COST.save(tmp_path / "cost.json")
    return {"trace": tmp_path / "toy.npz", "cost": str(tmp_path / "cost.json")}


def made(**arguments: Any) -> dict[str, Any]:
    return {"workload": SMALL, "engine_options": SLOTS} | arguments


def test_it_is_registered_as_deterministic() -> None:
    assert not gymnasium.spec(REPLAY_DECODE).nondeterministic


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_gymnasiums_full_check_and_stable_baselines3_accept_it(drafter: Any) -> None:
    env = gymnasium.make(ID, **made(trace=toy_trace(drafter=drafter), cost=COST))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*unconventional shape")
        for seed in range(5):  # the checker samples its action
            env.action_space.seed(seed)
            check_env(env.unwrapped, skip_render_check=True)
        check_env_for_sb3(env)
    env.close()


def test_equal_seeds_give_equal_episodes_to_the_last_bit() -> None:
    env = small_env()
    first = play(env, seed=3)
    play(env, seed=8)  # what was played before leaves no trace
    assert_equal_steps(first, play(env, seed=3))
    assert [step[1] for step in first] != [step[1] for step in play(env, seed=4)]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_like_the_original(way: Any) -> None:
    env = small_env()
    env.reset(seed=1)
    for _ in range(5):
        env.step(np.full(4, 3))
    other = way(env)
    for depth in (0, 1, 2, 3, 4):
        assert_equal_steps([env.step(np.full(4, depth))], [other.step(np.full(4, depth))])
    assert_equal_steps(play(env, seed=None), play(other, seed=None))


def test_every_observation_lies_in_the_space_and_the_last_is_empty() -> None:
    env = small_env(toy_trace(drafter="draft-model"))
    env.action_space.seed(0)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            assert observation in env.observation_space
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            assert np.isfinite(reward)
            over = terminated or truncated
        assert terminated
        assert not observation.any()


def test_a_round_pays_its_tokens_at_the_reference_rate_less_its_modelled_time() -> None:
    env = small_env(seconds_per_token=0.02)
    for _, reward, _, _, info in play(env, 3):
        seconds = 0.05 + 0.003 * (info["num_pass_tokens"] - 1)
        assert info["step_s"] == pytest.approx(seconds + info["prefill_s"])
        assert reward == pytest.approx(0.02 * info["num_committed_tokens"] - info["step_s"])


def test_the_work_is_the_recorded_one_whatever_is_done() -> None:
    env = small_env()
    env.reset(seed=0)
    rows = np.array([request.recording for request in env.run.workload.requests], np.int64)
    expected = int(env.decoder.trace.num_tokens[rows].sum())
    for depth in (0, 1, 4):
        assert sum(step[4]["num_committed_tokens"] for step in play(env, depth)) == expected


def test_prices_move_the_clock_and_decide_what_pays() -> None:
    for token_s, deep_pays in ((0.0, True), (0.2, False)):
        env = small_env(cost=CostModel.linear(base_s=0.05, token_s=token_s))
        deep, none = (sum(step[1] for step in play(env, depth)) for depth in (4, 0))
        assert (deep > none) is deep_pays


@pytest.mark.parametrize("lookahead", ["reserve", "clip"])
def test_few_blocks_bring_memory_pressure(lookahead: str) -> None:
    options = {**SLOTS, "block_size": 4, "num_kv_blocks": 12, "lookahead": lookahead}
    workload = {"arrivals": "constant", "concurrency": 4, "num_requests": 8}
    env = small_env(engine_options=options, workload=workload)
    steps = play(env, 4)
    assert steps[-1][2]
    assert max(step[4]["kv_used_fraction"] for step in steps) > 0.7
    assert sum(step[4]["num_preempted"] for step in steps) > 0
    loose = play(small_env(workload=workload), 4)
    assert sum(step[4]["num_preempted"] for step in loose) == 0


@pytest.mark.parametrize("arrivals", ["constant", "varying", "poisson", "bursty"])
def test_every_kind_of_workload_is_served(arrivals: str) -> None:
    info = play(small_env(workload={**SMALL, "arrivals": arrivals, "rate": 2.0}))[-1][4]
    assert info["num_finished_requests"] == 5


def test_a_workload_of_chosen_recordings_can_be_given() -> None:
    env = small_env()
    requests = env.decoder.requests(np.array([2, 7]))
    fixed = Workload(requests=requests, process=ClosedLoop.constant(2))
    steps = play(env, workload=fixed)
    tokens = sum(step[4]["num_committed_tokens"] for step in steps)
    assert tokens == env.decoder.trace.num_tokens[[2, 7]].sum()


def test_k_is_the_traces_unless_told_otherwise() -> None:
    assert small_env().action_space == MultiDiscrete([5] * 4)
    options = {"max_num_seqs": 2, "max_num_speculative_tokens": 3}
    assert small_env(engine_options=options).action_space == MultiDiscrete([4] * 2)


def test_trace_and_prices_may_be_files(files: dict[str, Any]) -> None:
    env = gymnasium.make(ID, **made(**files))
    memory = small_env(Trace.load(files["trace"]))
    assert_equal_steps(play(env), play(memory))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gymnasiums_vector_environments_step_it(mode: str, files: dict[str, Any]) -> None:
    vec = gymnasium.make_vec(ID, num_envs=2, vectorization_mode=mode, **made(**files))
    singles = [gymnasium.make(ID, **made(**files)) for _ in range(2)]
    try:
        seen, _ = vec.reset(seed=[5, 6])  # type: ignore[arg-type]
        own = [env.reset(seed=seed)[0] for env, seed in zip(singles, (5, 6), strict=True)]
        assert np.array_equal(seen, np.stack(own))
        for depth in (0, 2, 4, 1):
            seen, rewards, *_ = vec.step(np.full((2, 4), depth))
            steps = [env.step(np.full(4, depth)) for env in singles]
            assert np.array_equal(seen, np.stack([step[0] for step in steps]))
            assert rewards.tolist() == [step[1] for step in steps]
    finally:
        vec.close()


def test_a_vector_environment_starts_the_next_episode_by_itself(files: dict[str, Any]) -> None:
    vec = gymnasium.make_vec(ID, num_envs=4, **made(**files))
    vec.reset(seed=0)
    ends = [vec.step(np.full((4, 4), 2))[2] for _ in range(150)]
    assert np.all(np.sum(ends, axis=0) >= 2)
    vec.close()


def test_it_needs_neither_torch_nor_transformers(files: dict[str, Any]) -> None:
    code = (
        "import gymnasium, sys\n"
        f"env = gymnasium.make({ID!r}, trace={str(files['trace'])!r}, cost={files['cost']!r})\n"
        "env.reset(seed=0)\n"
        "assert not {'torch', 'transformers', 'stable_baselines3'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workload": {"num_request": 3}}, "its fields are arrivals"),
        ({"workload": {"temperature": 0.5}}, "recorded at temperature 0.0"),
        ({"engine_options": {"num_blocks": 3}}, "engine_options: .*there are max_num_seqs"),
        ({"engine_options": {"max_num_speculative_tokens": 9}}, "recorded up to 4"),
        ({"split": "held-out", "trace": toy_trace(2)}, "no requests in its split"),
        ({"trace": "no/such.npz"}, r"cannot read trace no/such\.npz|no trace"),
        ({"cost": "no/such.json"}, r"cannot read cost model no/such\.json"),
        ({"max_rounds": 0}, "max_rounds must be at least 1"),
        ({"render_mode": "human"}, "nothing to render"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_env(**arguments).reset(seed=0)
