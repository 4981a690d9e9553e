"""What holds for every ladder, bandit and confidence stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdepth.scheduler.baselines.adaedl import AdaEDL
from specdepth.scheduler.baselines.bandits import EpsilonGreedyDepth, UCBDepth
from specdepth.scheduler.baselines.confidence import HFConfidence, LlamaCppConfidence
from specdepth.scheduler.baselines.lawful import EVERY_RULE
from specdepth.scheduler.baselines.sglang_ladder import SGLangLadder
from specdepth.scheduler.baselines.specdec_plus_plus import SpecDecPlusPlus
from specdepth.scheduler.baselines.svip import SVIP
from specdepth.scheduler.depth import DraftSignals, check_depths, check_lawful
from tests.scheduler.conftest import build_outcome, build_state

STOPS: list[Callable[[], Any]] = [AdaEDL, HFConfidence, LlamaCppConfidence, SVIP, SpecDecPlusPlus]
BATCH_RULES: list[Callable[[], Any]] = [
    SGLangLadder,
    UCBDepth,
    lambda: EpsilonGreedyDepth(0.3),
    lambda: EpsilonGreedyDepth(0.3, bands=None),
]
RULES = STOPS + BATCH_RULES
SLOTS, DEPTH = 6, 5


def play(rule: Any, seed: int, rounds: int) -> list[list[int]]:
    """Depths and answers of `rule` in a random life of an engine: arrivals, preemptions, ends."""
    rng = np.random.default_rng(seed)
    drafter = str(rng.choice(["draft-model", "prompt-lookup"]))
    numbers = np.full(SLOTS, -1)
    waiting, newest = list(range(3)), 3
    seen: list[list[int]] = []
    for _ in range(rounds):
        for slot in np.flatnonzero((numbers < 0) & (rng.random(SLOTS) < 0.5)):
            if waiting and rng.random() < 0.5:
                numbers[slot] = waiting.pop()
            else:
                numbers[slot], newest = newest, newest + 1
        slots = rng.permutation(np.flatnonzero(numbers >= 0))
        size = len(slots)
        state = build_state(
            size,
            DEPTH,
            slots=slots,
            request_ids=numbers[slots],
            max_depths=rng.integers(0, DEPTH + 1, size),
            max_num_seqs=SLOTS,
            drafter=drafter,
        )
        depths = check_depths(rule.choose(state), state, rule)
        seen.append(depths.tolist())
        if type(rule) in STOPS:
            assert (depths <= state.max_depths).all()
        depths = np.minimum(depths, state.max_depths)
        top1 = np.full((size, DEPTH), np.nan)
        if drafter == "draft-model" and hasattr(rule, "keep_drafting"):
            top1 = rng.random((size, DEPTH))
            for step in range(int(depths.max(initial=0))):
                rows = np.flatnonzero(depths > step)
                part = top1[rows, : step + 1]
                keeps = rule.keep_drafting(state, DraftSignals(rows, step, part, 2 - part, part))
                assert keeps.dtype == np.bool_
                assert keeps.shape == rows.shape
                depths[rows[~keeps]] = step
                seen.append(keeps.tolist())
        preempted = rng.random(size) < 0.1
        depths[preempted] = 0
        accepted = rng.integers(0, depths + 1)
        top1[np.arange(DEPTH) > np.minimum(accepted, depths - 1)[:, None]] = np.nan
        committed = np.where(preempted, 0, accepted + 1)
        rule.observe(
            build_outcome(
                state,
                depths,
                accepted,
                num_committed=committed,
                preempted=preempted,
                draft_top1=top1,
                verify_s=float(rng.random()),
            )
        )
        waiting += numbers[slots[preempted]].tolist()
        numbers[slots[preempted | (rng.random(size) < 0.1)]] = -1
    return seen


@pytest.mark.parametrize("make", RULES)
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_a_random_life_breaks_no_rule_and_reset_makes_it_new(
    make: Callable[[], Any], seed: int
) -> None:
    rule = make()
    first = play(rule, seed, 25)
    if hasattr(rule, "reset"):
        rule.reset()
    assert play(rule, seed, 25) == first


@pytest.mark.parametrize("make", RULES)
def test_each_is_lawful_under_every_rule(make: Callable[[], Any]) -> None:
    rule = make()
    assert rule.lawful_under == EVERY_RULE
    check_lawful(rule, "rejection", has_draft_model=True)


@pytest.mark.parametrize("make", RULES)
def test_an_empty_batch_gets_no_depths(make: Callable[[], Any]) -> None:
    rule = make()
    assert rule.choose(build_state(0)).tolist() == []


@pytest.mark.parametrize("make", RULES)
def test_outcomes_before_the_first_choice_or_of_nobody_are_borne(make: Callable[[], Any]) -> None:
    rule, state = make(), build_state(0)
    rule.observe(build_outcome(state, state.max_depths, state.max_depths))
    rule.choose(state)
    rule.observe(build_outcome(state, state.max_depths, state.max_depths))


@pytest.mark.parametrize("make", RULES)
def test_choosing_for_32_sequences_takes_well_under_a_millisecond(make: Callable[[], Any]) -> None:
    rule, state = make(), build_state(32, drafter="draft-model")
    top1 = np.full((32, 8), 0.9)
    top1[:, 6:] = np.nan
    times = []
    for _ in range(300):
        start = time.perf_counter()
        depths = rule.choose(state)
        times.append(time.perf_counter() - start)
        accepted = np.minimum(5, depths)
        rule.observe(build_outcome(state, depths, accepted, draft_top1=top1))
    assert np.median(times) < 1e-3  # about 10 microseconds on a quiet core
