"""Machines drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.agents.random_costs import random_cost


@pytest.mark.parametrize("draft_model", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_random_machine_is_one_that_could_be(seed: int, draft_model: bool) -> None:
    cost = random_cost(np.random.default_rng(seed), draft_model=draft_model)
    passes = np.array([cost.pass_s(n) for n in range(1, 1025)])
    assert (np.diff(passes) >= -1e-12).all()
    assert 5e-3 <= passes[0] <= 0.2
    assert passes[-1] < 1024 * passes[0]  # never worse than one token after the other
    assert cost.pass_s(256, 256) <= cost.pass_s(256)
    assert cost.drafter_is_free is not draft_model
    if draft_model:
        assert 0.01 * passes[0] < cost.draft_pass_s(1) < 0.7 * passes[0]


def test_the_same_seed_gives_the_same_machine_and_seeds_differ() -> None:
    one, same, other = (random_cost(np.random.default_rng(n), draft_model=True) for n in (0, 0, 1))
    assert one == same
    assert one != other


def test_machines_differ_in_what_depth_costs() -> None:
    costs = [random_cost(np.random.default_rng(n), draft_model=False) for n in range(40)]
    knees = [cost.knee_tokens() for cost in costs]
    assert min(knees) < 10
    assert max(knees) > 150
    padded = [bool(cost.cuda_graph_sizes) for cost in costs]
    assert 0 < sum(padded) < len(padded)
