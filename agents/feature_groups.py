"""Groups of features by what they tell a policy, and masks that take groups away from it.

A masked column is multiplied by 0 after its normalisation, so it is constant for the network in
training, evaluation and deployment alike: an exported policy carries it as an `inv_std` of 0. What is
masked can still be guessed where other columns go along with it: prices follow the number of running
sequences, which is why an ablation of one should stand beside an ablation of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES

FEATURE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "batch-size": (
        *("load_1", "load_2", "load_3_4", "load_5_8", "load_9_16", "load_17_32", "load_33_up"),
        *("running", "running_share", "waiting_share", "pass_tokens", "prefill_share"),
    ),
    "acceptance": (
        *("acceptance", "acceptance_slow", "last_accepted", "full_streak", "batch_acceptance"),
        *("drafted_tokens", "drafted_rounds", "rounds_since_draft"),
        *("last_depth", "batch_last_depth"),
    ),
    "memory-pressure": ("kv_used", "kv_room"),
    "proposal": (
        *("proposal_length", "max_depth", "match_1", "match_2", "match_3", "match_4_up"),
        *("match_agreement", "num_matches", "last_match", "batch_offer_share"),
        *("match_tokens", "match_distance", "match_in_output"),
        *("agreement_1", "agreement_2", "agreement_3"),
        *("agreement_4", "agreement_6", "agreement_8", "agreement_12", "agreement_16"),
        *("draft_known", "draft_top1_first", "draft_top1_mean", "draft_top1_min"),
        *("draft_entropy_mean", "draft_margin_mean"),
    ),
    "target": ("target_known", "target_top1", "target_entropy"),
    "prices": ("verify_price", "verify_price_deep", "draft_price", "draft_lag"),
    "progress": ("context", "generated", "remaining", "remaining_near"),
}
"""Columns by group; every column is in one.

`batch-size`: how many sequences share the pass, and what else rides in it. `acceptance`: what earlier
rounds drafted and got accepted. `memory-pressure`: KV blocks. `proposal`: what the drafter shows, of
this proposal or of the last one. `target`: how sure the target was. `prices`: what the cost model says
of this moment. `progress`: how far the request is.
"""


def columns_of(groups: Iterable[str]) -> tuple[str, ...]:
    """Names of the columns of `groups`, in the order of the feature table.

    Raises:
        ValueError: an unknown group.
    """
    chosen = set[str]()
    for group in groups:
        if group not in FEATURE_GROUPS:
            known = ", ".join(FEATURE_GROUPS)
            raise ValueError(f"no group of features {group!r}; there are {known}.")
        chosen.update(FEATURE_GROUPS[group])
    return tuple(name for name in FEATURE_NAMES if name in chosen)


def feature_mask(groups: Iterable[str]) -> NDArray[np.float32]:
    """Factor of each normalised feature, float32 [F]: 0 in the columns of `groups`, else 1.

    Whether a depth can be honoured is decided on the raw `max_depth`, which no mask touches.

    Raises:
        ValueError: an unknown group.
    """
    masked = columns_of(groups)
    factors = np.ones(NUM_FEATURES, np.float32)
    factors[[FEATURE_NAMES.index(name) for name in masked]] = 0.0
    return factors
