"""The capped greedy rule as it is defined: every token ranked, every candidate priced, none left out."""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.baselines.capped_greedy import Shrinkage
from specdepth.scheduler.state import Floats, Ints, RoundState


def plain_depths(survival: Floats, state: RoundState, shrinkage: Shrinkage) -> Ints:
    """Depths [R] of the best candidate; of equal ones the one with the lowest cap, then the shortest.

    Sums and prices are formed in the order of the rule, so that equal means equal to the last bit.
    """
    num_running, depth = survival.shape
    worth = survival**shrinkage.exponent
    if shrinkage.pull:
        possible = np.arange(depth) < state.max_depths[:, None]
        mean = worth.sum(axis=0) / np.maximum(possible.sum(axis=0), 1)
        pulled = np.where(possible, worth + shrinkage.pull * (mean - worth), 0.0)
        worth = np.minimum.accumulate(pulled, axis=1)
    tokens = sorted((-worth[row, j], j, row) for row in range(num_running) for j in range(depth))
    tokens = [token for token in tokens if token[0] < 0]

    prefill, context = max(state.num_prefill_tokens, 0), max(state.num_context_tokens, 0)
    sizes = num_running + prefill + np.arange(len(tokens) + 1)
    verify_s = state.cost.pass_s(sizes, prefill, context)
    prompts_s = 0.0
    if prefill:
        prompts_s = state.cost.pass_s(int(sizes[0]), prefill, context)
        prompts_s -= state.cost.pass_s(num_running, 0, context)
    verify_s = verify_s + (state.cost.overhead_s - prompts_s)
    verify_s = verify_s[0] + shrinkage.price * (verify_s - verify_s[0])

    drafts = state.drafter == "draft-model"
    each_s = np.diff(state.cost.draft_pass_s(np.arange(num_running + 1)))
    share_s = state.cost.draft_token_s * np.maximum(state.draft_lag, 0)
    share_s = share_s / np.maximum(state.num_remaining, 1)
    best, best_rate = np.zeros(num_running, np.int64), num_running / verify_s[0]
    for cap in range(1, depth + 1) if drafts else [depth]:
        depths, in_pass = np.zeros(num_running, np.int64), np.zeros(depth, np.int64)
        expected = draft_s = 0.0
        for worth_less, column, row in tokens:
            if column >= cap:
                continue
            depths[row] += 1
            expected -= worth_less
            added_s = each_s[in_pass[column]] + (share_s[row] if column == 0 else 0.0)
            in_pass[column] += 1
            draft_s += added_s if drafts else 0.0
            rate = (num_running + expected) / (verify_s[depths.sum()] + shrinkage.price * draft_s)
            if rate > best_rate:
                best, best_rate = depths.copy(), rate
    return best
