from __future__ import annotations

import pytest

from specdepth.agents.default_rules import STOPS, default_rules
from specdepth.decoder.trace_info import TraceInfo
from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.state import DrafterKind


def info(drafter: DrafterKind, pair: str = "made + made") -> TraceInfo:
    return TraceInfo(model_pair=pair, drafter=drafter, max_num_speculative_tokens=4)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_every_rule_can_be_made_for_the_trace(drafter: DrafterKind) -> None:
    names = default_rules(info(drafter))
    assert len(set(names)) == len(names) > 15
    for name in names:
        make_scheduler(
            name, model_pair="made + made", drafter=drafter, max_num_speculative_tokens=4
        )


def test_stops_between_draft_passes_need_a_draft_model() -> None:
    assert not set(STOPS) & set(default_rules(info("prompt-lookup")))
    assert set(STOPS) <= set(default_rules(info("draft-model")))


def test_a_pair_without_a_fitted_model_takes_an_estimator_that_learns() -> None:
    assert "greedy:match" in default_rules(info("prompt-lookup"))
    assert "greedy:confidence" in default_rules(info("draft-model"))
