"""Replay of an engine that decides late and drafts for everybody."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.decoder.config import EngineConfig
from specdepth.decoder.engine_profile import EngineProfile, Lagged
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.baselines import FixedDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState
from tests.decoder.traces import toy_trace

COST = CostModel.linear(knee=4, draft_base_s=0.004, draft_token_s=0.001)


def eight_texts() -> Trace:
    """Of 20 tokens each, with a draft model that is often right."""
    rng = np.random.default_rng(1)
    left = np.tile(np.arange(20, 0, -1), 8)
    return toy_trace(
        (20,) * 8,
        drafter="draft-model",
        top=4,
        proposal_length=np.full(160, 4),
        accepted=np.minimum(np.minimum(rng.geometric(0.4, 160) - 1, 4), left),
        max_new_tokens=np.full(8, 20),
        stopped=np.zeros(8, np.bool_),
    )


class ByPosition:
    """Depth from the context length that it sees, so that depths tell which state was shown."""

    lawful_under = frozenset({"greedy", "coupled", "prompt-lookup", "rejection"})

    def __init__(self) -> None:
        self.shown: list[RoundState] = []
        self.told: list[RoundOutcome] = []

    def choose(self, state: RoundState) -> Ints:
        self.shown.append(state)
        return state.positions % (state.max_num_speculative_tokens + 1)

    def observe(self, outcome: RoundOutcome) -> None:
        self.told.append(outcome)


def replay(
    scheduler: ByPosition | FixedDepth, profile: EngineProfile, load: int = 3
) -> tuple[list[RoundOutcome], ServeResult]:
    decoder = ReplayDecoder(
        eight_texts(), COST, EngineConfig(max_num_seqs=4, max_num_speculative_tokens=4), profile
    )
    rounds: list[RoundOutcome] = []
    workload = Workload(requests=decoder.requests(), process=ClosedLoop.constant(load))
    return rounds, serve(decoder.engine, workload, scheduler, on_round=rounds.append)


@pytest.mark.parametrize("lag", [1, 2])
def test_depths_belong_to_the_state_some_rounds_ago(lag: int) -> None:
    scheduler = ByPosition()
    rounds, _ = replay(scheduler, EngineProfile(decision_lag=lag))
    decided = [outcome for outcome in rounds if len(outcome.depths)]
    seen: dict[int, list[int]] = {}
    for outcome in decided:
        for request, depth in zip(
            outcome.request_ids.tolist(), outcome.depths.tolist(), strict=True
        ):
            seen.setdefault(request, []).append(depth)
    # The first rounds of a request that comes while others run are not drafted for.
    late = [depths for request, depths in seen.items() if request >= 3]
    assert all(depths[:lag] == [0] * lag for depths in late)
    assert any(depths[lag] for depths in late)


def test_without_lag_the_scheduler_is_used_as_it_is() -> None:
    plain, wrapped = ByPosition(), ByPosition()
    first, _ = replay(plain, EngineProfile())
    second, _ = replay(wrapped, EngineProfile.named("specdepth"))
    assert [o.depths.tolist() for o in first] == [o.depths.tolist() for o in second]


def test_outcomes_come_in_the_order_of_the_state_that_was_shown() -> None:
    scheduler = ByPosition()
    replay(scheduler, EngineProfile(decision_lag=1))
    assert len(scheduler.told) == len(scheduler.shown)
    for shown, told in zip(scheduler.shown, scheduler.told, strict=True):
        assert shown.request_ids.tolist() == told.request_ids.tolist()
        # What left in between did nothing.
        assert (told.num_committed[told.preempted] == 0).all()
        assert (told.num_committed[~told.preempted] > 0).all()
    assert any(told.preempted.any() for told in scheduler.told)


def test_padded_drafts_run_over_everybody_and_only_cost_time() -> None:
    plain, slow = ByPosition(), ByPosition()
    shrinking, cheap = replay(plain, EngineProfile())
    padded, dear = replay(slow, EngineProfile(pad_drafts=True))
    assert [o.num_accepted.tolist() for o in shrinking] == [o.num_accepted.tolist() for o in padded]
    for one, other in zip(shrinking, padded, strict=True):
        assert len(one.draft_pass_sequences) == len(other.draft_pass_sequences)
        assert set(other.draft_pass_sequences) <= {len(other.depths)}
    assert dear.makespan_s > cheap.makespan_s


def test_lag_costs_a_fixed_depth_only_the_first_rounds() -> None:
    _, prompt = replay(FixedDepth(3), EngineProfile())
    _, late = replay(FixedDepth(3), EngineProfile.named("vllm-like"))
    assert prompt.num_tokens == late.num_tokens
    assert late.metrics.num_rounds > prompt.metrics.num_rounds


def test_reset_reaches_the_scheduler_inside_and_forgets_states() -> None:
    class Counts(ByPosition):
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    inside = Counts()
    lagged = Lagged(inside, 2)
    lagged.reset()
    assert inside.resets == 1
    assert lagged.lawful_under == inside.lawful_under


def test_profiles_have_names() -> None:
    assert EngineProfile.named("vllm-like:2") == EngineProfile(decision_lag=2, pad_drafts=True)
    with pytest.raises(ValueError, match='unknown engine profile "sglang"'):
        EngineProfile.named("sglang")
    with pytest.raises(ValueError, match=r"decision_lag must be in 0\.\.8"):
        EngineProfile.named("vllm-like:9")
