from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.agents.decode_stats import DecodeStats
from specdepth.agents.slot_vec_env import SlotVecEnv
from specdepth.envs.decode_env import LiveDecodeEnv
from specdepth.envs.recording_pool import RecordingPool
from specdepth.envs.replay_env import ReplayDecodeEnv
from specdepth.envs.reward import ReferenceRate, team_rewards
from specdepth.envs.workload_config import PromptPool, WorkloadConfig
from specdepth.scheduler.batch_row import batch_row
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.features import feature_matrix
from specdepth.scheduler.state import Floats, RoundOutcome, RoundState
from tests.agents.toy_training import toy_vec_env
from tests.envs.toy import toy_decoder, toy_prompts
from tests.envs.toy_trace import COST, toy_replay, toy_trace

WORKLOAD = WorkloadConfig(num_requests=6, concurrencies=(1, 2, 4), max_new_tokens=16)
CROWDED = WorkloadConfig(arrivals="constant", concurrency=4, num_requests=8)


def steps(env: SlotVecEnv, count: int, depth: int = 2) -> list[Any]:
    env.reset()
    return [env.step(np.full(env.num_envs, depth)) for _ in range(count)]


def test_agents_see_their_rows_of_the_environments_observation() -> None:
    """The same workload in both: same engine functions, same observations."""
    vec, decoder = toy_vec_env(), toy_decoder()
    pool = PromptPool(decoder, toy_prompts())
    env = LiveDecodeEnv(decoder, prompts=toy_prompts())
    workload = pool.workload(WORKLOAD, np.random.default_rng([0, 0]))
    seen, _ = env.reset(options={"workload": workload})
    assert np.array_equal(vec.reset(), seen)
    for depth in (0, 3, 4, 1, 2, 2):
        rows, _, _, _ = vec.step(np.full(4, depth))
        seen, *_ = env.step(np.full(4, depth))
        assert np.array_equal(np.asarray(rows), seen)


def test_rewards_of_a_round_sum_to_tokens_less_its_time_at_the_reference_rate() -> None:
    env = toy_vec_env()
    env.reset()
    for _ in range(20):
        running = env.state_of(0).num_running
        price = env.rates(running)
        _, rewards, _, _ = env.step(np.full(4, 3))
        outcome = env.last_outcomes[0]
        assert outcome is not None
        # 50 ms, and 3 ms for each token but the first, those of prompts left out
        seconds = 0.05 + 0.003 * (outcome.num_pass_tokens - outcome.num_prefill_tokens - 1)
        whole = outcome.num_committed.sum() - seconds / price
        assert rewards.sum() == pytest.approx(whole, abs=1e-4)


def test_empty_slots_earn_nothing() -> None:
    env, earned = toy_vec_env(), 0
    env.reset()
    for _ in range(20):
        active = env.active
        _, rewards, _, _ = env.step(np.full(4, 2))
        assert not rewards[~active].any()
        earned += int(np.count_nonzero(rewards))
    assert earned


def test_a_workload_that_is_served_ends_all_trajectories_of_its_engine_and_the_next_starts() -> (
    None
):
    env = toy_vec_env()
    history = steps(env, 150)
    ends = [(dones, infos) for _, _, dones, infos in history if dones.any()]
    assert len(ends) >= 2
    for dones, infos in ends:
        assert dones.all()
        episode = infos[0]["episode"]
        assert episode["tokens"] == 6 * 16
        assert all("episode" not in info for info in infos[1:])
    returns = [infos[0]["episode"]["r"] for _, infos in ends]
    first = next(i for i, (_, _, dones, _) in enumerate(history) if dones.any())
    total = sum(rewards.sum() for _, rewards, _, _ in history[: first + 1])
    assert returns[0] == pytest.approx(total, abs=1e-3)
    assert history[first][0][:, 0].any(), "the next workload's first observation"


def test_a_trajectory_goes_on_when_a_request_ends() -> None:
    env = toy_vec_env()
    env.reset()
    for _ in range(200):
        _, _, dones, _ = env.step(np.full(4, 2))
        outcome = env.last_outcomes[0]
        assert outcome is not None
        if outcome.finished.any() and not dones.any():
            return
    pytest.fail("no request ended before its workload")


def test_equal_seeds_give_equal_steps() -> None:
    first, second = steps(toy_vec_env(), 40), steps(toy_vec_env(), 40)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a[0], b[0])
        assert np.array_equal(a[1], b[1])
    other = steps(toy_vec_env(seed=9), 40)
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_generators_can_be_saved_and_put_back() -> None:
    env, other = toy_vec_env(), toy_vec_env(seed=5)
    steps(env, 60)
    other.set_rng_states(env.rng_states())
    assert np.array_equal(env.reset(), other.reset())


def test_several_engines_have_their_own_agents_and_workloads() -> None:
    decoders = [toy_decoder(), toy_decoder()]
    pool = PromptPool(decoders[0], toy_prompts())
    engines = [decoder.engine for decoder in decoders]
    env = SlotVecEnv(
        engines,
        lambda rng: pool.workload(WORKLOAD, rng),
        ReferenceRate(engines[0].cost, 4),
    )
    assert env.num_envs == 8
    history = steps(env, 60)
    assert any(dones[:4].all() and not dones[4:].any() for _, _, dones, _ in history)
    assert not np.array_equal(history[5][0][:4], history[5][0][4:])
    assert env.num_rounds == 120


def test_measured_time_is_the_clocks() -> None:
    env = toy_vec_env()
    env.timing = "measured"
    steps(env, 5)
    measured = env.last_elapsed_s[0]
    modelled = toy_vec_env()
    steps(modelled, 5)
    # On a virtual clock both are the same, but come by different ways.
    assert measured == pytest.approx(modelled.last_elapsed_s[0])


def test_unequal_engines_are_refused() -> None:
    engines = [toy_decoder().engine, toy_decoder(max_num_seqs=2).engine]
    with pytest.raises(ValueError, match="equal max_num_seqs"):
        SlotVecEnv(engines, lambda rng: None, ReferenceRate(engines[0].cost, 4))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="at least one engine"):
        SlotVecEnv([], lambda rng: None, ReferenceRate(engines[0].cost, 4))  # type: ignore[arg-type, return-value]


def failing(decoder: Any, rounds: range, error: Exception) -> None:
    run, calls = decoder.runner.run, iter(range(10**6))

    def maybe(plan: Any) -> Any:
        if next(calls) in rounds:
            raise error
        return run(plan)

    decoder.runner.run = maybe


def test_a_backend_failure_is_marked_and_the_next_workload_starts() -> None:
    decoder = toy_decoder()
    env = toy_vec_env(decoder)
    failing(decoder, range(3, 4), RuntimeError("CUDA error"))
    history = steps(env, 3)
    assert not env.last_failed.any()
    rows, rewards, dones, _ = env.step(np.full(4, 2))
    assert env.last_failed.all()
    assert dones.all()
    assert not rewards.any()
    assert np.asarray(rows)[:, 0].any()
    env.step(np.full(4, 2))
    assert not env.last_failed.any()
    assert len(history) == 3


def test_a_backend_that_stays_broken_ends_training() -> None:
    decoder = toy_decoder()
    env = toy_vec_env(decoder)
    failing(decoder, range(0, 10**6), RuntimeError("CUDA error"))
    env.reset()
    for _ in range(2):
        env.step(np.full(4, 2))
    with pytest.raises(RuntimeError, match="CUDA error"):
        env.step(np.full(4, 2))


def test_errors_of_the_program_are_raised() -> None:
    decoder = toy_decoder()
    env = toy_vec_env(decoder)
    failing(decoder, range(0, 1), TypeError("a bug"))
    env.reset()
    with pytest.raises(TypeError):
        env.step(np.full(4, 2))


def test_closing_leaves_the_engine_idle() -> None:
    decoder = toy_decoder()
    env = toy_vec_env(decoder)
    steps(env, 3)
    env.close()
    assert not decoder.engine.has_work
    with pytest.raises(RuntimeError, match="call reset first"):
        env.state_of(0)


def test_statistics_are_those_of_the_engine() -> None:
    env = toy_vec_env()
    env.reset()
    dones = np.zeros(1, np.bool_)
    while not dones.any():
        metrics = env.engines[0].metrics
        _, _, dones, _ = env.step(np.full(4, 2))
    values = env.stats.as_dict()
    assert values["acceptance_length"] == pytest.approx(metrics.acceptance_length)
    assert values["num_speculative_tokens"] == pytest.approx(metrics.mean_depth)
    assert values["rounds"] == metrics.num_rounds
    assert values["throughput_tok_s"] == pytest.approx(metrics.throughput_tok_s)
    by_load = env.stats.by_load()
    assert set(by_load) <= {1, 2, 3, 4}
    assert all(0 <= load["mean_depth"] <= 2 for load in by_load.values())


def test_statistics_of_nothing_are_empty() -> None:
    assert DecodeStats(4).as_dict() == {}
    assert DecodeStats(4).by_load() == {}


def replay_vec_env(
    costs: list[CostModel], workload: WorkloadConfig = WORKLOAD, **options: Any
) -> SlotVecEnv:
    trace = toy_trace()
    decoders = [toy_replay(trace, cost, **options) for cost in costs]
    pool = RecordingPool(decoders[0])
    rates = ReferenceRate(costs if len(set(map(id, costs))) > 1 else costs[0], 4)
    engines = [decoder.engine for decoder in decoders]
    return SlotVecEnv(engines, lambda rng: pool.workload(workload, rng), rates)


def test_each_of_many_replay_engines_goes_as_it_would_alone() -> None:
    vec = replay_vec_env([COST] * 3)
    pool = RecordingPool(toy_replay())
    envs = [ReplayDecodeEnv(toy_trace(), COST, engine_options={"max_num_seqs": 4}) for _ in "abc"]
    rows = vec.reset().reshape(3, 4, -1)
    for index, env in enumerate(envs):
        workload = pool.workload(WORKLOAD, np.random.default_rng([0, index]))
        seen, _ = env.reset(options={"workload": workload})
        assert np.array_equal(rows[index], seen)
    for depths in np.random.default_rng(1).integers(0, 5, (12, 3, 4)):
        rows, _, _, _ = vec.step(depths.reshape(-1))  # type: ignore[assignment]
        for index, env in enumerate(envs):
            seen, *_ = env.step(depths[index])
            assert np.array_equal(rows.reshape(3, 4, -1)[index], seen)


def test_engines_of_different_machines_are_paid_at_rates_of_their_own() -> None:
    """Times are in units of a machine's own rate, so ten times slower is paid the same."""
    slow = CostModel.linear(base_s=0.5, token_s=0.03)
    env = replay_vec_env([COST, slow])
    env.set_rng_states([env.rng_states()[0]] * 2)
    env.reset()
    dones = np.zeros(8, np.bool_)
    while not dones.any():
        _, rewards, dones, _ = env.step(np.tile([1, 2, 3, 4], 2))
        assert rewards[:4] == pytest.approx(rewards[4:], abs=1e-4)
        assert env.last_elapsed_s[4] == pytest.approx(10 * env.last_elapsed_s[0])
    env.rates.refresh()
    for load in range(1, 5):
        assert env.rates(load, 1) == pytest.approx(10 * env.rates(load, 0))
    assert env.rates(4) < 0.062 / 4, "measured, not the start"


def test_different_machines_at_one_rate_are_refused() -> None:
    slow = CostModel.linear(base_s=0.5)
    engines = [toy_replay(toy_trace(), cost).engine for cost in (COST, slow)]
    for costs in (COST, [slow, COST], [COST, slow, slow]):
        with pytest.raises(ValueError, match="2 engines of different machines need"):
            SlotVecEnv(engines, lambda rng: None, ReferenceRate(costs, 4))  # type: ignore[arg-type, return-value]


def test_preemption_on_replay_is_survived() -> None:
    env = replay_vec_env([COST] * 2, CROWDED, block_size=4, num_kv_blocks=12)
    env.reset()
    preempted = 0
    for _ in range(60):
        env.step(np.full(8, 4))
        preempted += sum(int(outcome.preempted.sum()) for outcome in env.last_outcomes if outcome)
    assert preempted > 0


def paid_vec_env(**settings: Any) -> SlotVecEnv:
    trace = toy_trace()
    decoders = [toy_replay(trace) for _ in range(2)]
    pool = RecordingPool(decoders[0])
    return SlotVecEnv(
        [decoder.engine for decoder in decoders],
        lambda rng: pool.workload(WORKLOAD, rng),
        ReferenceRate(COST, 4),
        **settings,
    )


def test_a_team_is_paid_alike_and_its_empty_slots_nothing() -> None:
    team, own = paid_vec_env(reward=team_rewards), paid_vec_env()
    team.reset()
    own.reset()
    for _ in range(20):
        active = own.active.reshape(2, 4)
        whole = np.asarray(team.step(np.full(8, 3))[1]).reshape(2, 4)
        each = np.asarray(own.step(np.full(8, 3))[1]).reshape(2, 4)
        assert whole == pytest.approx(np.where(active, each.sum(1, keepdims=True), 0.0), abs=1e-4)


class Certain:
    """A survival model that is sure of the first two tokens, and that the third is wrong."""

    def survival(self, state: RoundState) -> Floats:
        """[R, K]"""
        return np.where(np.arange(4) < np.minimum(2, state.max_depths)[:, None], 1.0, 0.0)

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def test_expected_tokens_are_paid_for_and_rates_go_by_what_was_committed() -> None:
    expected, sampled = paid_vec_env(survival=Certain()), paid_vec_env()
    expected.reset()
    sampled.reset()
    differed = False
    for _ in range(20):
        slots = [expected.agents_of(engine) for engine in range(2)]
        rewards = np.asarray(expected.step(np.full(8, 4))[1])
        usual = np.asarray(sampled.step(np.full(8, 4))[1])
        for engine, at in enumerate(slots):
            outcome = expected.last_outcomes[engine]
            assert outcome is not None
            hoped = 1 + np.minimum(outcome.num_drafted, 2)
            assert rewards[at] - usual[at] == pytest.approx(hoped - outcome.num_committed, abs=1e-4)
            differed |= bool((hoped != outcome.num_committed).any())
    assert differed
    assert np.array_equal(expected.rates.tokens, sampled.rates.tokens)


def test_one_agent_an_engine_sees_what_its_sequences_have_in_common() -> None:
    env = paid_vec_env(one_depth=True)
    rows = env.reset()
    for _ in range(30):
        assert env.active.tolist() == [True, False, False, False] * 2
        for engine in range(2):
            assert env.agents_of(engine).tolist() == [4 * engine]
            common = batch_row(feature_matrix(env.state_of(engine)))
            assert np.array_equal(rows[4 * engine, 1:], common)
            assert not rows[4 * engine + 1 : 4 * engine + 4].any()
        rows = np.asarray(env.step(np.full(8, 2))[0])


def test_one_depth_is_for_all_sequences_and_paid_at_the_mean() -> None:
    env, own = paid_vec_env(one_depth=True), paid_vec_env()
    env.reset()
    own.reset()
    ignored = np.array([3, 0, 4, 1, 1, 2, 0, 4])
    for _ in range(20):
        slots = [own.state_of(engine).slots for engine in range(2)]
        deepest = [env.state_of(engine).max_depths for engine in range(2)]
        rewards = np.asarray(env.step(ignored)[1]).reshape(2, 4)
        each = np.asarray(own.step(np.repeat([3, 1], 4))[1]).reshape(2, 4)
        for engine, depth in enumerate((3, 1)):
            outcome = env.last_outcomes[engine]
            assert outcome is not None
            assert outcome.num_drafted.tolist() == np.minimum(depth, deepest[engine]).tolist()
            mean = each[engine][slots[engine]].mean()
            assert rewards[engine].tolist() == pytest.approx([mean, 0, 0, 0], abs=1e-4)
    assert env.num_rounds == env.num_decisions == 40
    assert own.num_decisions > 40
