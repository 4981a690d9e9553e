from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdepth.agents import offset_search
from specdepth.agents.offset_search import STOP_PRICES, SearchConfig, ascend, search_offsets
from specdepth.agents.offset_weights import SCALES, offset_weights
from specdepth.agents.rule_tuning import TrainingReplay
from specdepth.decoder.trace import Trace
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.baselines.priced_stops import PricedStops
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard
from tests.agents.toy_rule import toy_rule
from tests.envs.toy_trace import COST, toy_trace

DRAFT_COST = CostModel.linear(knee=6, draft_base_s=0.004, draft_token_s=0.0005)
QUICK = SearchConfig(iterations=2, pairs=2, num_requests=4, num_replays=1)


def test_it_climbs_towards_a_summit() -> None:
    summit = np.linspace(-1, 1, len(SCALES))
    found = ascend(
        lambda values, step: -float(((values - summit) ** 2).sum()),
        SearchConfig(iterations=30, pairs=8, sigma=0.1),
        seed=0,
    )
    assert np.linalg.norm(found - summit) < 0.3 * np.linalg.norm(summit)


def test_all_samples_of_a_step_are_scored_on_the_same_requests() -> None:
    steps = list[int]()

    def score(values: np.ndarray, step: int) -> float:
        steps.append(step)
        return 0.0

    ascend(score, QUICK, seed=0)
    assert steps == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_search_can_be_repeated_and_tells_how_far_it_is() -> None:
    shares = list[float]()
    first = search_offsets(toy_trace(), COST, toy_rule(), (1, 4), QUICK, shares.append)
    again = search_offsets(toy_trace(), COST, toy_rule(), (1, 4), QUICK)
    for one, other in zip(first.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.shrinkage == again.shrinkage
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_searched_offsets_are_faster_than_the_rule_on_their_requests() -> None:
    trace: Trace = toy_trace(accept=0.9)  # the made-up model underrates it by far
    config = SearchConfig(iterations=8, pairs=4, num_requests=8, num_replays=1, step=1.5)
    weights = search_offsets(trace, COST, toy_rule(), (4,), config)
    training = TrainingReplay(trace, COST, [4], num_requests=8)
    card = PolicyCard(model_pair="toy + toy", drafter="prompt-lookup", max_num_speculative_tokens=4)
    gained = training.throughput(LearnedScheduler(weights, card), 4)
    assert gained > training.throughput(toy_rule(), 4)


@pytest.mark.parametrize(("logit", "kept"), [(-20.0, False), (0.0, False), (20.0, True)])
def test_a_load_keeps_the_rule_where_offsets_do_not_gain(
    logit: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up model underrates the drafts, so to believe less or the same gains nothing."""
    values = np.zeros(len(SCALES))
    values[3] = logit  # which bends all positions alike
    monkeypatch.setattr(offset_search, "ascend", lambda *_: values)
    weights = search_offsets(toy_trace(accept=0.9), COST, toy_rule(), (4,), QUICK)
    expected = offset_weights(toy_rule(), {4: values} if kept else {})
    assert weights.layer_sizes == expected.layer_sizes
    for one, other in zip(weights.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_with_a_draft_model_the_price_of_stops_is_searched_too() -> None:
    trace, rule = toy_trace(drafter="draft-model"), toy_rule(drafter="draft-model")
    weights = search_offsets(trace, DRAFT_COST, rule, (1, 4), QUICK)
    assert weights.stops
    for load in (1, 4):
        rates = []
        training = TrainingReplay(trace, DRAFT_COST, [load], num_requests=4)
        starts = rule.shrinkage_at(load), Shrinkage()
        tried = [replace(one, stop_price=price) for one in starts for price in STOP_PRICES]
        for one in tried:
            stops = PricedStops(CappedGreedyDepth(rule.survival, {load: one}))
            rates.append(training.throughput(stops, load))
        assert weights.shrinkage[load] == tried[int(np.argmax(rates))]
    assert {one.stop_price for one in weights.shrinkage.values()} != {1.0}


def test_numbers_that_keep_all_from_drafting_under_stops_are_dropped() -> None:
    trace, rule = toy_trace(drafter="draft-model", accept=0.9), toy_rule(drafter="draft-model")
    never = CappedGreedyDepth(rule.survival, Shrinkage(price=1e6))
    weights = search_offsets(trace, DRAFT_COST, never, (4,), QUICK)
    assert weights.shrinkage[4].price == 1


@pytest.mark.parametrize("loads", [(), (3,), (1, 64)])
def test_loads_without_a_flag_are_refused(loads: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="offsets are searched at loads"):
        search_offsets(toy_trace(), COST, toy_rule(), loads, QUICK)


@pytest.mark.parametrize("name", ["iterations", "pairs", "sigma", "step", "num_requests"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SearchConfig(**{name: 0})
