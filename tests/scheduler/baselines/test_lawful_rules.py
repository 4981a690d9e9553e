"""What rules declare under `lawful_under`, against the exact law of the texts that they lead to.

All rules that `make_scheduler` knows and that need no file are walked through every fate of small worlds
(`tests.decoder.rule_law`). Rules from files are of classes that are here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from specdepth.scheduler.baselines import make_scheduler
from specdepth.scheduler.baselines.adaptive_verification import AdaptiveVerificationDepth
from specdepth.scheduler.baselines.capped_greedy import Shrinkage
from specdepth.scheduler.baselines.confidence_trim import TRIM_RULES
from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.baselines.lawful import EVERY_RULE
from specdepth.scheduler.baselines.position_goodput import WindowGoodputDepth
from specdepth.scheduler.baselines.priced_stops import PricedStops
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import check_lawful, lawful_rules
from specdepth.scheduler.learned import LearnedScheduler
from tests.decoder.rule_law import DEPTH, EXACT, RuleLaw, TwoTokens
from tests.decoder.test_verification_exact import World
from tests.scheduler.baselines.test_registry_rules import WITHOUT_FILES
from tests.scheduler.conftest import build_card, build_weights

# One token more is dear, a second one nearly free: a budget for both hangs on the second one's confidence.
STAIRS = CostModel(name="stairs", tokens=(1, 2, 3, 6), verify_s=(1.0, 1.6, 1.62, 1.68))
SLOPE = CostModel.linear(base_s=1.0, token_s=0.25, knee=2, draft_base_s=0.02)

NAMED = [name.replace("fixed:4", "fixed:2") for name in WITHOUT_FILES if name != "dspark"]
EAGER: dict[str, Callable[[], Any]] = {
    # Settings under which laws of three tokens do stop them, and learning starts with the first round.
    "hf-confidence:0.7": lambda: make_scheduler("hf-confidence:0.7"),
    "llamacpp:0.6": lambda: make_scheduler("llamacpp:0.6"),
    "adaedl:0.4": lambda: make_scheduler("adaedl:0.4"),
    "svip:0.85": lambda: make_scheduler("svip:0.85"),
    "specdec++:0.35": lambda: make_scheduler("specdec++:0.35"),
    "window of one round": lambda: WindowGoodputDepth(window=1, interval=1, hysteresis=0.0),
    # The cuts after drafting walk down one ranking and go by what lies above a token in it, by that
    # token's own confidence, and by older rounds: never by the token or what follows it.
    "dspark": lambda: make_scheduler("dspark"),
    "adaptive-verification, warm": lambda: AdaptiveVerificationDepth(warmup_refits=0),
    "adaptive-verification, this round's budget": lambda: AdaptiveVerificationDepth(
        warmup_refits=0, stale_budget=False
    ),
    "priced stops": lambda: PricedStops(FixedDepth(DEPTH)),
    "policy": lambda: LearnedScheduler(
        build_weights(DEPTH), build_card(drafter="draft-model", max_num_speculative_tokens=DEPTH)
    ),
    "policy with stops": lambda: LearnedScheduler(
        build_weights(
            depths=tuple(range(1, DEPTH + 1)),
            depth=DEPTH - 1,  # as many outputs as depths
            action="offset",
            shrinkage={1: Shrinkage()},
            stops=True,
        ),
        build_card(drafter="draft-model", max_num_speculative_tokens=DEPTH),
    ),
}


@cache
def one_sequence() -> RuleLaw:
    return RuleLaw(World(1, None), cost=STAIRS)


@cache
def two_sequences() -> RuleLaw:
    return RuleLaw(TwoTokens(2, None), num_seqs=2, cost=SLOPE)


LAWS = [one_sequence, two_sequences]
BITING = [(name, one_sequence) for name in EAGER if ":" in name] + [
    (name, two_sequences) for name in ("dspark", "adaptive-verification, warm", "priced stops")
]
"""Where a rule must have stopped or cut here and there, or the law would be no test of it."""


@pytest.mark.parametrize(
    ("name", "law"),
    [(name, one_sequence) for name in NAMED] + [(name, law) for name in EAGER for law in LAWS],
)
def test_what_declares_rejection_keeps_the_law(name: str, law: Callable[[], RuleLaw]) -> None:
    make = EAGER.get(name, lambda: make_scheduler(name))
    rules = lawful_rules(make())
    assert rules in (EVERY_RULE, TRIM_RULES)
    if "rejection" in rules:
        check_lawful(make(), "rejection", has_draft_model=True)
        assert law().worst_error(make) < EXACT
        assert len(law().depths) > 1 or (name, law) not in BITING
    else:
        with pytest.raises(ValueError, match="does not declare"):
            check_lawful(make(), "rejection", has_draft_model=True)


def test_a_budget_from_this_rounds_confidences_bends_the_law() -> None:
    """The best budget looks at all confidences, also at those that give the first token away."""
    make = EAGER["adaptive-verification, this round's budget"]
    assert one_sequence().worst_error(make) > 0.05
