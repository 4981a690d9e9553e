from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.offset_search import SearchConfig, ascend
from specdepth.agents.offset_weights import offset_weights
from specdepth.agents.pressure_search import search_pressure
from specdepth.agents.pressure_weights import PRESSURE_SCALES, pressure_weights
from specdepth.agents.rule_tuning import TrainingReplay
from specdepth.agents.scarce_pool import scarce_pool
from specdepth.scheduler.features import FEATURE_NAMES
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard
from tests.agents.toy_rule import toy_rule
from tests.envs.toy_trace import COST, toy_trace

QUICK = SearchConfig(iterations=2, pairs=1, num_requests=4, num_replays=1)
CARD = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)
POLICY = LearnedScheduler(offset_weights(toy_rule(), {}), CARD)


def test_only_loads_that_can_be_short_of_memory_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = list[float]()
    searched = list[tuple[int, int | None]]()
    init = TrainingReplay.__init__

    def note(self: TrainingReplay, *args: object, **options: object) -> None:
        config = options["config"]
        searched.append((args[2][0], config.num_kv_blocks))  # type: ignore[index, attr-defined]
        init(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingReplay, "__init__", note)
    search_pressure(toy_trace(), COST, POLICY, (1, 4), (0.6, 0.9), QUICK, shares.append)
    assert shares == [0.5, 1.0]
    pools = [scarce_pool(toy_trace(), 4, share) for share in (0.6, 0.9)]
    assert searched == [(4, pool.num_kv_blocks) for pool in pools if pool is not None]


def test_it_adds_a_unit_that_sees_memory_alone_and_is_faster_on_its_replays() -> None:
    trace = toy_trace()
    config = SearchConfig(iterations=2, pairs=2, num_requests=6, num_replays=1)
    weights = search_pressure(trace, COST, POLICY, (4,), (0.4,), config)
    units = POLICY.weights.layer_sizes[1]
    np.testing.assert_array_equal(weights.weights[0][:units], POLICY.weights.weights[0])
    np.testing.assert_array_equal(weights.weights[1][:, :units], POLICY.weights.weights[1])
    (row,) = weights.weights[0][units:]
    assert [FEATURE_NAMES[column] for column in np.flatnonzero(row)] == ["kv_room"]
    engine = scarce_pool(trace, 4, 0.4)
    replay = TrainingReplay(trace, COST, [4], num_requests=6, config=engine)
    seeing = replay.throughput(LearnedScheduler(weights, CARD), 4)
    assert seeing > replay.throughput(POLICY, 4)
    again = search_pressure(trace, COST, POLICY, (4,), (0.4,), config)
    for one, other in zip(weights.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_gains_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingReplay, "throughput", lambda self, scheduler, load: 1.0)
    weights = search_pressure(toy_trace(), COST, POLICY, (4,), (0.6,), QUICK)
    assert weights.layer_sizes == POLICY.weights.layer_sizes


def test_the_parameters_have_a_search_of_their_own_length() -> None:
    summit = np.array([0.5, -1.0, -0.5])
    found = ascend(
        lambda values, step: -float(((values - summit) ** 2).sum()),
        SearchConfig(iterations=30, pairs=8, sigma=0.1),
        seed=0,
        num_values=len(PRESSURE_SCALES),
    )
    assert np.linalg.norm(found - summit) < 0.3 * np.linalg.norm(summit)


def test_it_can_go_on_from_a_policy_that_sees_memory_already() -> None:
    seeing = pressure_weights(POLICY.weights, np.ones(len(PRESSURE_SCALES)))
    policy = LearnedScheduler(seeing, CARD)
    weights = search_pressure(toy_trace(), COST, policy, (4,), (0.6,), QUICK)
    assert weights.layer_sizes[1] >= seeing.layer_sizes[1]


@pytest.mark.parametrize("shares", [(), (0.0,), (0.5, 1.0)])
def test_pools_that_are_no_share_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="pool_shares"):
        search_pressure(toy_trace(), COST, POLICY, (4,), shares, QUICK)
