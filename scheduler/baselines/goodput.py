"""SmartSpec (TurboSpec): the one depth with the best goodput under one global acceptance rate.

Source: [Liu et al. 2024, arXiv 2406.14066]; `vllm/spec_decode/dsd.py`, class `DSD`, in
LiuXiaoxuanPKU/vllm (branch dsd) and its adaptation in AdaSpec [arXiv 2503.05096].
"""

from __future__ import annotations

import numpy as np

from specdepth.scheduler.grading import grade
from specdepth.scheduler.state import Floats, Ints, RoundOutcome, RoundState

from .lawful import EVERY_RULE
from .uniform import goodput_of, uniform_depths


class GoodputDepth:
    """The depth k that maximises expected tokens over predicted time, the same for all.

    Each of R sequences is expected to commit 1 + a + ... + a^k tokens, a being the acceptance rate of
    all. After each round a moves by 0.15 towards that round's rate: accepted tokens over tested ones.
    All depths are scanned, as in AdaSpec; SmartSpec stops at the first that is worse.

    Args:
        off_bias: factor on the score of depth 0. Both public codes use 1.1, for overheads of
            speculation that their tables lack; 1 trusts the cost model.
        revive_below: set the rate to 0.65 when it falls below this. AdaSpec: 0.3, so that it does not
            stay off for ever; 0 never does.

    Raises:
        ValueError: a bias that is not above 0, or `revive_below` outside 0..0.65.
    """

    lawful_under = EVERY_RULE

    initial_rate = 0.7
    """Acceptance rate before any round."""
    sample_weight = 0.15
    """Weight of a round in the rate."""
    revived_rate = 0.65

    def __init__(self, off_bias: float = 1.0, revive_below: float = 0.0) -> None:
        if not off_bias > 0:
            raise ValueError(f"off_bias is a factor above 0, got {off_bias}.")
        if not 0 <= revive_below <= self.revived_rate:
            raise ValueError(
                f"revive_below is a rate in 0..{self.revived_rate}, got {revive_below}."
            )
        self.off_bias = off_bias
        self.revive_below = revive_below
        self.reset()

    @classmethod
    def adaspec(cls) -> GoodputDepth:
        """With the settings of AdaSpec's code."""
        return cls(off_bias=1.1, revive_below=0.3)

    def reset(self) -> None:
        """Go back to the initial rate."""
        self.acceptance_rate = self.initial_rate

    def choose(self, state: RoundState) -> Ints:
        """Return the best depth, cut to what each sequence has on offer, int64 [R]."""
        depths = uniform_depths(state)
        if not state.num_running:
            return state.max_depths.copy()
        if self.acceptance_rate < self.revive_below:
            self.acceptance_rate = self.revived_rate
        survival: Floats = self.acceptance_rate ** np.arange(1.0, len(depths))
        scores = goodput_of(state, depths, survival)
        scores[0] *= self.off_bias
        best: Ints = depths[scores.argmax()]
        return best

    def observe(self, outcome: RoundOutcome) -> None:
        """Move the rate, if anything was tested."""
        grades = grade(outcome, int(outcome.num_drafted.max(initial=0)))
        num_tested = np.count_nonzero(grades.tested)
        if num_tested:
            rate = np.count_nonzero(grades.accepted) / num_tested
            self.acceptance_rate += self.sample_weight * (rate - self.acceptance_rate)

    def __repr__(self) -> str:
        return f"GoodputDepth(off_bias={self.off_bias:g}, revive_below={self.revive_below:g})"
