from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.baselines.svip import SVIP
from specdepth.scheduler.depth import DraftSignals


def test_svip_compares_the_root_of_the_next_entropy(make_state: Any) -> None:
    entropy = np.array([[9.0, 0.36], [0.0, 0.37], [0.0, -1e-9], [0.0, 0.25]])
    top1 = np.full_like(entropy, 0.5)
    signals = DraftSignals(np.arange(4), 1, top1, entropy, top1)
    state = make_state(4, drafter="draft-model")
    # Roots: 0.6, 0.608, 0 and 0.5.
    assert SVIP(0.6).keep_drafting(state, signals).tolist() == [True, False, True, True]


def test_svip_offers_all_there_is(make_state: Any) -> None:
    assert SVIP().choose(make_state(3, max_depths=np.array([0, 2, 9]))).tolist() == [0, 2, 8]


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_svip_needs_a_finite_threshold(threshold: float) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        SVIP(threshold)
