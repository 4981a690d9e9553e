from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.bandits import EpsilonGreedyDepth, UCBDepth


def pull(bandit: Any, state: Any, make_outcome: Any, tok_s: dict[int, float]) -> int:
    """One round of one sequence in which each depth gives these tokens per second."""
    depths = bandit.choose(state)
    depth = int(depths[0])
    assert depths.tolist() == [depth] * state.num_running
    accepted = np.zeros_like(depths)
    bandit.observe(make_outcome(state, depths, accepted, verify_s=state.num_running / tok_s[depth]))
    return depth


class Machine:
    """Rounds of a made-up machine: each drafted token is accepted with the same probability."""

    def __init__(self, make_state: Any, make_outcome: Any, acceptance: float = 0.6) -> None:
        self.make_state, self.make_outcome = make_state, make_outcome
        self.acceptance = acceptance
        self.rng = np.random.default_rng(7)

    def play(self, bandit: Any, num_running: int, rounds: int) -> list[int]:
        state = self.make_state(num_running)
        chosen = []
        for _ in range(rounds):
            depths = bandit.choose(state)
            runs = self.rng.geometric(1 - self.acceptance, num_running) - 1
            seconds = state.cost.pass_s(int(num_running + depths.sum()))
            bandit.observe(
                self.make_outcome(state, depths, np.minimum(runs, depths), verify_s=seconds)
            )
            chosen.append(int(depths[0]))
        return chosen

    def share_of_best(self, picks: list[int], num_running: int) -> float:
        """Expected throughput of the depth picked most often, over that of the best depth."""
        depths, rate = np.arange(9), self.acceptance
        tokens = (1 - rate ** (depths + 1)) / (1 - rate)
        tok_s = tokens / self.make_state(1).cost.pass_s(num_running * (1 + depths))
        share: float = tok_s[Counter(picks).most_common(1)[0][0]] / tok_s.max()
        return share


# UCB


def test_ucb_pulls_each_arm_in_turn_first(make_state: Any, make_outcome: Any) -> None:
    state, tok_s = make_state(1, 2), {0: 10.0, 1: 20.0, 2: 15.0}
    ucb = UCBDepth(min_pulls=2)
    assert [pull(ucb, state, make_outcome, tok_s) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ucb_by_hand(make_state: Any, make_outcome: Any) -> None:
    ucb, state = UCBDepth(0.5, min_pulls=1), make_state(1, 2)
    tok_s = {0: 10.0, 1: 20.0, 2: 15.0}
    assert [pull(ucb, state, make_outcome, tok_s) for _ in range(3)] == [0, 1, 2]
    # Means 0.5, 1, 0.75 and the same bonus for all.
    assert pull(ucb, state, make_outcome, tok_s | {1: 10.0}) == 1
    # Means 0.5, 15 / 20 = 0.75, 0.75; bonus sqrt(0.5 ln 4 / n) = 0.833, 0.589, 0.833. One that divides by
    # all pulls, as the published code does, would take arm 1 again.
    assert pull(ucb, state, make_outcome, tok_s) == 2


def test_ucb_without_exploration_takes_the_best_mean(make_state: Any, make_outcome: Any) -> None:
    ucb, state = UCBDepth(0.0, min_pulls=1), make_state(1, 2)
    tok_s = {0: 10.0, 1: 20.0, 2: 15.0}
    assert [pull(ucb, state, make_outcome, tok_s) for _ in range(6)] == [0, 1, 2, 1, 1, 1]


def test_ucb_finds_the_best_depth_at_each_load(make_state: Any, make_outcome: Any) -> None:
    machine, ucb = Machine(make_state, make_outcome), UCBDepth()
    chosen: dict[int, list[int]] = {4: [], 32: []}
    for _ in range(30):  # loads take turns, and don't disturb each other
        for load, picks in chosen.items():
            picks += machine.play(ucb, load, 50)
    for load, picks in chosen.items():
        assert machine.share_of_best(picks[-500:], load) > 0.97
    assert machine.share_of_best(chosen[4][-500:], 32) < 0.9, "the loads want different depths"


def test_ucb_batch_sizes_share_a_bandit_up_to_each_doubling(
    make_state: Any, make_outcome: Any
) -> None:
    ucb, tok_s = UCBDepth(), dict.fromkeys(range(9), 10.0)
    for num_running in (1, 2, 3, 4, 5, 8, 9, 16):
        pull(ucb, make_state(num_running), make_outcome, tok_s)
    pulls = {bucket: arms.pulls.sum() for (bucket, _), arms in ucb._bandits.items()}
    assert pulls == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2}


def test_ucb_ignores_rounds_that_committed_nothing(make_state: Any, make_outcome: Any) -> None:
    ucb, state = UCBDepth(), make_state(2)
    for _ in range(3):
        depths = ucb.choose(state)
        nothing = np.zeros(2, np.int64)
        ucb.observe(
            make_outcome(
                state, depths, nothing, num_committed=nothing, preempted=np.ones(2, np.bool_)
            )
        )
    assert ucb.choose(state).tolist() == [0, 0], "still the first pull"


@pytest.mark.parametrize("options", [{"exploration": -1.0}, {"min_pulls": 0}])
def test_ucb_refuses_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="UCB needs"):
        UCBDepth(**options)


# TLT


def first_draw(*, above: bool) -> np.random.Generator:
    """A generator whose first draw is above, or below, the rate at which medians are refreshed."""
    seeds = (n for n in range(1000) if (np.random.default_rng(n).random() > 0.1) == above)
    return np.random.default_rng(next(seeds))


def seen(bandit: EpsilonGreedyDepth, state: Any, rounds: int = 60) -> set[int]:
    return {int(bandit.choose(state)[0]) for _ in range(rounds)}


def test_tlt_bands_give_the_deepest_depths_to_the_smallest_batches(make_state: Any) -> None:
    # 8 .. 0 in four runs: 8 7 6, 5 4, 3 2, 1 0.
    bandit = EpsilonGreedyDepth(epsilon=1.0)
    bands = {1: {6, 7, 8}, 2: {4, 5}, 4: {4, 5}, 5: {2, 3}, 20: {2, 3}, 21: {0, 1}, 300: {0, 1}}
    for size, arms in bands.items():
        assert seen(bandit, make_state(size)) == arms, size


def test_tlt_with_fewer_arms_than_bands_uses_the_shallowest_in_the_rest(make_state: Any) -> None:
    bandit = EpsilonGreedyDepth(epsilon=1.0)
    assert [seen(bandit, make_state(size, 1)) for size in (1, 2, 5, 21)] == [{1}, {0}, {0}, {0}]


def test_epsilon_greedy_opens_all_arms_but_those_of_too_large_passes(make_state: Any) -> None:
    bandit = EpsilonGreedyDepth(epsilon=1.0, bands=None)
    assert seen(bandit, make_state(4), 200) == set(range(9))
    assert seen(bandit, make_state(400), 200) == set(range(5)), "400 * 5 tokens and no more"
    assert seen(bandit, make_state(3000)) == {0}, "the smallest there is"


def test_epsilon_greedy_tries_each_arm_and_then_takes_the_best_median(
    make_state: Any, make_outcome: Any
) -> None:
    bandit = EpsilonGreedyDepth(epsilon=0.0, bands=None)
    state, tok_s = make_state(1, 2), {0: 10.0, 1: 20.0, 2: 15.0}
    picks = [pull(bandit, state, make_outcome, tok_s) for _ in range(5)]
    assert picks == [0, 1, 2, 1, 1]
    # One slow round of three does not move the median; two more of the next four do.
    picks = [pull(bandit, state, make_outcome, tok_s | {1: 5.0}) for _ in range(4)]
    assert picks == [1, 1, 1, 2]


def test_epsilon_greedy_reward_pools_accept_lengths_over_groups(
    make_state: Any, make_outcome: Any
) -> None:
    bandit = EpsilonGreedyDepth(epsilon=0.0, bands=None)
    for num_running, accepted, expected in ((1, 0, 10.0), (2, 4, 20.0), (4, 4, 40.0)):
        state = make_state(num_running)
        depths = bandit.choose(state)
        assert depths.tolist() == [0] * num_running, "the first arm of a new group"
        bandit._rng = first_draw(above=True)  # no refresh
        bandit.observe(make_outcome(state, depths, np.full(num_running, accepted)))
        group, _ = bandit._pulled or pytest.fail("nothing pulled")
        # The first median, 1 token, times the batch over 0.1 s.
        assert group.medians[0] == pytest.approx(expected)
    state = make_state(8)
    depths = bandit.choose(state)
    bandit._rng = first_draw(above=False)
    bandit.observe(make_outcome(state, depths, np.full(8, 4)))
    group, _ = bandit._pulled or pytest.fail("nothing pulled")
    assert group.medians[0] == pytest.approx(5 * 8 / 0.1)  # the median of 1 5 5 5


def test_epsilon_greedy_explores_at_its_rate(make_state: Any, make_outcome: Any) -> None:
    bandit = EpsilonGreedyDepth(epsilon=0.1, bands=None)
    state, tok_s = make_state(1), {depth: 10.0 + depth for depth in range(9)}
    picks = [pull(bandit, state, make_outcome, tok_s) for _ in range(2000)]
    others = sum(depth != 8 for depth in picks[100:]) / 1900
    assert 0.06 < others < 0.12  # 0.1 * 8/9


def test_epsilon_greedy_finds_the_best_depth(make_state: Any, make_outcome: Any) -> None:
    machine = Machine(make_state, make_outcome)
    for load in (4, 32):
        picks = machine.play(EpsilonGreedyDepth(bands=None), load, 1000)
        assert machine.share_of_best(picks[-300:], load) > 0.97


def test_tlt_finds_the_best_depth_of_its_band(make_state: Any, make_outcome: Any) -> None:
    machine = Machine(make_state, make_outcome)
    picks = machine.play(EpsilonGreedyDepth(), 32, 500)
    assert machine.share_of_best(picks[-200:], 32) > 0.97


def test_epsilon_greedy_forgets_what_left_the_window(make_state: Any, make_outcome: Any) -> None:
    bandit = EpsilonGreedyDepth(epsilon=0.0, bands=None, window=5)
    state = make_state(1, 1)
    for _ in range(50):
        pull(bandit, state, make_outcome, {0: 10.0, 1: 20.0})
    picks = [pull(bandit, state, make_outcome, {0: 10.0, 1: 5.0}) for _ in range(5)]
    assert picks == [1, 1, 1, 0, 0], "three slow rounds of five"
    group, _ = bandit._pulled or pytest.fail("nothing pulled")
    assert len(group.rewards[1].values) == 5


def test_random_arms_repeat_with_their_seed(make_state: Any, make_outcome: Any) -> None:
    def picks(bandit: EpsilonGreedyDepth) -> list[int]:
        tok_s = dict.fromkeys(range(9), 10.0)
        return [pull(bandit, make_state(4), make_outcome, tok_s) for _ in range(100)]

    one = EpsilonGreedyDepth(0.5, seed=1)
    first = picks(one)
    assert picks(EpsilonGreedyDepth(0.5, seed=1)) == first
    assert picks(EpsilonGreedyDepth(0.5, seed=2)) != first
    one.reset()
    assert picks(one) == first


@pytest.mark.parametrize(
    "options",
    [{"epsilon": 1.5}, {"window": 0}, {"bands": (2, 5)}, {"bands": (1, 5, 5)}, {"bands": ()}],
)
def test_epsilon_greedy_refuses_bad_settings(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epsilon is|ascend from 1"):
        EpsilonGreedyDepth(**options)
