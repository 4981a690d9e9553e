from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from specdepth.agents.feature_groups import FEATURE_GROUPS, columns_of, feature_mask
from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.learned import LearnedScheduler
from specdepth.scheduler.policy_file import PolicyCard, PolicyWeights


def test_every_column_is_in_exactly_one_group() -> None:
    counts = Counter(chain.from_iterable(FEATURE_GROUPS.values()))
    assert counts == Counter(FEATURE_NAMES)


def test_no_group_is_empty() -> None:
    assert all(FEATURE_GROUPS.values())


@pytest.mark.parametrize(
    ("group", "some"),
    [
        ("batch-size", {"load_1", "running"}),
        ("acceptance", {"acceptance", "full_streak"}),
        ("memory-pressure", {"kv_used", "kv_room"}),
        ("proposal", {"match_1", "draft_top1_first"}),
        ("prices", {"verify_price", "draft_price"}),
    ],
)
def test_the_groups_that_ablations_name_hold_what_they_say(group: str, some: set[str]) -> None:
    assert some <= set(columns_of([group]))


def test_columns_come_in_the_order_of_the_feature_table() -> None:
    columns = columns_of(["prices", "acceptance"])
    assert list(columns) == sorted(columns, key=FEATURE_NAMES.index)
    assert set(columns) == {*FEATURE_GROUPS["prices"], *FEATURE_GROUPS["acceptance"]}


def test_a_mask_is_0_in_its_columns_and_1_elsewhere() -> None:
    mask = feature_mask(["memory-pressure"])
    assert mask.dtype == np.float32
    off = {name for name, factor in zip(FEATURE_NAMES, mask, strict=True) if factor == 0}
    assert off == {"kv_used", "kv_room"}
    assert set(mask.tolist()) == {0.0, 1.0}
    assert feature_mask([]).min() == 1.0


def test_an_unknown_group_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no group of features 'load'; there are batch-size, "):
        feature_mask(["load"])


def test_an_exported_policy_with_masked_scales_does_not_see_the_columns() -> None:
    rng = np.random.default_rng(0)
    mask = feature_mask(["prices"])
    policy = LearnedScheduler(
        PolicyWeights(
            weights=(rng.normal(size=(3, NUM_FEATURES)).astype(np.float32),),
            biases=(np.zeros(3, np.float32),),
            mean=rng.normal(size=NUM_FEATURES).astype(np.float32),
            inv_std=mask * np.float32(2.0),
            depths=(0, 1, 2),
        ),
        PolicyCard(model_pair="a + b", drafter="prompt-lookup", max_num_speculative_tokens=2),
    )
    rows = rng.random((5, NUM_FEATURES)).astype(np.float32)
    others = rows.copy()
    others[:, mask == 0] = rng.random((5, int((mask == 0).sum())))
    assert np.array_equal(policy.scores(rows), policy.scores(others))
    others[:, mask == 1] += 0.1
    assert not np.array_equal(policy.scores(rows), policy.scores(others))
