"""A greedy rule, and offsets of what it believes, as one network with a hidden layer.

Legend: K deepest depth, F features, P parameters of a load, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth, Shrinkage
from specdepth.scheduler.features import FEATURE_NAMES, NUM_FEATURES
from specdepth.scheduler.policy_file import Float32s, PolicyWeights
from specdepth.scheduler.state import Floats
from specdepth.scheduler.survival_model import SurvivalModel

INPUTS: Mapping[str, tuple[float, float]] = {
    "acceptance_slow": (0.5, 0.4),
    "acceptance": (0.5, 0.4),
    "match_4_up": (0.5, 0.3),
    "full_streak": (0.5, 0.3),
    "generated": (0.6, 0.4),
    "last_accepted": (0.3, 0.4),
    "match_agreement": (0.7, 0.4),
}
"""Features that offsets may lean on: middle, and how far the logit moves with a parameter of 1."""
SCALES: Floats = np.array([0.15, 0.1, 0.15, 0.2, 0.05, *(scale for _, scale in INPUTS.values())])
"""[P] what a parameter of 1 changes: pull, exponent, log of the price, logit, logit a position, inputs."""
FLAGS = {1: "load_1", 2: "load_2", 4: "load_3_4", 8: "load_5_8", 16: "load_9_16", 32: "load_17_32"}
"""Column that marks a load."""
LAST_FLAG = "load_33_up"
_LINEAR = 0.05
"""A tanh unit is a line for inputs so small."""
_CLOSED = 20.0
"""And constant beyond this."""


def offset_weights(
    rule: CappedGreedyDepth, by_load: Mapping[int, Floats], *, stops: bool = False
) -> PolicyWeights:
    """Write parameters by load into one hidden layer beside the survival model of `rule`.

    A load has two units of its own: one follows the inputs where the load's flag is set and is -1
    elsewhere, the other says whether it is set.

    Args:
        rule: over a fitted survival model.
        by_load: [P] parameters by load; loads that are not in it keep the rule's numbers.
        stops: whether the policy decides after each draft pass too.

    Raises:
        ValueError: a rule over something else.
    """
    if not isinstance(rule.survival, SurvivalModel):
        raise ValueError(f"offsets bend a rule over a fitted survival model, got {rule!r}.")
    model = rule.survival.weights
    top, columns = model.max_num_speculative_tokens, _columns(model.inputs)
    hidden: list[Float32s] = [np.zeros((len(model.hidden_bias), NUM_FEATURES), np.float32)]
    hidden[0][:, columns] = model.hidden_weight
    bias, out = [model.hidden_bias], [model.out_weight]
    out_bias = model.out_bias.astype(np.float64)
    shrinkage = {load: rule.shrinkage_at(load) for load in {*rule.shrinkage, *by_load}}
    middles = np.array([middle for middle, _ in INPUTS.values()])
    for load, values in by_load.items():
        moves = values * SCALES
        shrinkage[load] = _moved(shrinkage[load], moves[:3])
        flags = [FLAGS[load], *([LAST_FLAG] if load == max(FLAGS) else [])]
        rows = np.zeros((2, NUM_FEATURES), np.float32)
        rows[0, _columns(tuple(INPUTS))] = _LINEAR * moves[5:]
        rows[0, _columns(tuple(flags))] = _CLOSED
        rows[1, _columns(tuple(flags))] = 2 * _CLOSED
        hidden.append(rows)
        middle = _LINEAR * float(middles @ moves[5:])
        bias.append(np.array([-_CLOSED - middle, -_CLOSED], np.float32))
        by_position = moves[3] + moves[4] * (np.arange(top) - 2.0)
        # The first unit lacks 1 where the flag is not set, which is where the second says -1.
        first = np.full(top, 1 / _LINEAR)
        out.append(np.stack([first, by_position / 2 - first / 2], axis=1).astype(np.float32))
        out_bias += by_position / 2 + first / 2
    layers = (np.concatenate(hidden), np.concatenate(out, axis=1))
    return PolicyWeights(
        weights=layers,
        biases=(np.concatenate(bias), out_bias.astype(np.float32)),
        mean=np.zeros(NUM_FEATURES, np.float32),
        inv_std=np.ones(NUM_FEATURES, np.float32),
        depths=tuple(range(1, top + 1)),
        action="offset",
        shrinkage=shrinkage,
        stops=stops,
    )


def _columns(names: Sequence[str]) -> list[int]:
    return [FEATURE_NAMES.index(name) for name in names]


def _moved(shrinkage: Shrinkage, moves: Floats) -> Shrinkage:
    return replace(
        shrinkage,
        pull=float(np.clip(shrinkage.pull + moves[0], 0.0, 0.95)),
        exponent=max(shrinkage.exponent + float(moves[1]), 0.3),
        price=shrinkage.price * float(np.exp(moves[2])),
    )
