"""Fits a survival model to rows of a trace: a small network, monotone where survival must be.

Each position's acceptance given that those before it were accepted is fitted by binary cross-entropy on
the positions that a verdict reached; survival is their product. Sequential temperature scaling, as in
DSpark (arXiv 2607.05147), was tried on requests left out of a fit: temperatures came out between 1.00
and 1.02, so there is none.

Legend: M rows, I inputs, H hidden units, K deepest depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from specdepth.scheduler.features import FEATURE_NAMES
from specdepth.scheduler.state import DrafterKind, Floats
from specdepth.scheduler.survival_file import SurvivalWeights

from .survival_rows import SurvivalRows

_HISTORY = (
    "acceptance",
    "acceptance_slow",
    "last_depth",
    "last_accepted",
    "full_streak",
    "drafted_tokens",
    "drafted_rounds",
    "rounds_since_draft",
    "generated",
    "target_known",
    "target_top1",
    "target_entropy",
)
_MATCH = ("match_1", "match_2", "match_3", "match_4_up")
_AGREEMENT = tuple(f"agreement_{depth}" for depth in (1, 2, 3, 4, 6, 8, 12, 16))
_LOOKUP = (
    *("match_agreement", "proposal_length", "last_match", "num_matches", *_MATCH),
    *("match_tokens", "match_distance", "match_in_output", *_AGREEMENT),
)
_DRAFT = (
    "draft_known",
    "draft_top1_first",
    "draft_top1_mean",
    "draft_top1_min",
    "draft_entropy_mean",
    "draft_margin_mean",
)
_RISING = ("acceptance", "acceptance_slow", "match_agreement", *_AGREEMENT)
"""Inputs that survival may not fall with. Nor may it from a match to a longer one."""


def inputs_for(drafter: DrafterKind) -> tuple[str, ...]:
    """Features that say something about a sequence's proposal.

    None tells of the machine or the batch: acceptance does not depend on them, and a model that saw
    them would not transfer.
    """
    return (*_HISTORY, *(_DRAFT if drafter == "draft-model" else _LOOKUP))


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivalFitConfig:
    """How to fit.

    Raises:
        ValueError: a number out of range.
    """

    hidden_units: int = 24
    """H."""
    num_steps: int = 2000
    """Gradient steps, whatever the number of rows."""
    batch_size: int = 1024
    learning_rate: float = 0.01
    """At the start; it falls to 0 along a cosine."""
    weight_decay: float = 1e-4
    monotone: bool = True
    """Survival never falls as match length, agreement or the acceptance averages rise."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_units", "num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.learning_rate > 0 or not self.weight_decay >= 0:
            raise ValueError(
                "learning_rate must be above 0 and weight_decay 0 or more, got "
                f"{self.learning_rate} and {self.weight_decay}."
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurvivalFit:
    """A fitted model."""

    weights: SurvivalWeights
    loss: float
    """Mean cross-entropy of the training rows, nats a verdict."""


def fit_survival(
    rows: SurvivalRows, inputs: tuple[str, ...], config: SurvivalFitConfig | None = None
) -> SurvivalFit:
    """Fit a model. The same rows, settings and machine give the same weights.

    Args:
        rows: of the training split only.
        inputs: names of columns of `feature_matrix`.
        config: see `SurvivalFitConfig`.

    Raises:
        ValueError: no rows, unknown inputs.
    """
    config = config or SurvivalFitConfig()
    if not len(rows):
        raise ValueError("there is nothing to fit: no sequence of the trace had a proposal.")
    data = _Data(rows, inputs)
    network = _train(data, config)
    with torch.no_grad():
        loss = float(_loss(network(data.inputs), data.targets, data.reached))
    return SurvivalFit(weights=network.weights(data), loss=loss)


class _Data:
    """Rows as tensors, inputs centred and scaled."""

    def __init__(self, rows: SurvivalRows, inputs: tuple[str, ...]) -> None:
        columns = [FEATURE_NAMES.index(name) for name in inputs]
        values = rows.features[:, columns].astype(np.float64)
        self.names = inputs
        self.mean: Floats = values.mean(axis=0)
        std = values.std(axis=0)
        self.changes = std > 1e-6
        self.std: Floats = np.where(self.changes, std, 1.0)
        self.inputs = torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))
        self.targets = torch.from_numpy(rows.survived.astype(np.float32))
        self.reached = torch.from_numpy(rows.reached.astype(np.float32))


class _Network(nn.Module):
    """Two layers; with `monotone`, weights on the way from rising inputs to the logits are positive.

    Other inputs keep free signs in the first layer, so the logits may fall with them.
    """

    def __init__(self, data: _Data, config: SurvivalFitConfig) -> None:
        super().__init__()
        num_inputs, num_outputs = data.inputs.shape[1], data.targets.shape[1]
        hidden = config.hidden_units
        self._monotone = config.monotone
        # An input that never changed says nothing, and must say nothing where it does change.
        changes = torch.from_numpy(data.changes)
        self._first = nn.Parameter(torch.randn(hidden, num_inputs) * changes / num_inputs**0.5)
        self._first_bias = nn.Parameter(torch.zeros(hidden))
        self._last = nn.Parameter(torch.randn(num_outputs, hidden) / hidden**0.5)
        self._last_bias = nn.Parameter(torch.zeros(num_outputs))
        scale = torch.from_numpy(data.std.astype(np.float32))
        flags = [i for i, name in enumerate(data.names) if name in _MATCH]
        rising = [i for i, name in enumerate(data.names) if name in _RISING]
        self._rising = torch.zeros(num_inputs, dtype=torch.bool)
        self._rising[[*rising, *flags]] = True
        # Weight of "match of n" = sum of positive steps 1..n, in units of the raw flags.
        stairs = torch.eye(num_inputs)
        for row, i in enumerate(flags):
            stairs[i, flags[: row + 1]] = 1.0
        self._stairs = scale[:, None] * stairs / scale

    def layers(self) -> tuple[Tensor, Tensor]:
        """Weights with their signs: [H, I] and [K, H]."""
        if not self._monotone:
            return self._first, self._last
        first = torch.where(self._rising, self._first.abs(), self._first)
        return first @ self._stairs.T, self._last.abs()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [M, K] for scaled inputs [M, I]."""
        first, last = self.layers()
        hidden = torch.tanh(functional.linear(inputs, first, self._first_bias))
        return functional.linear(hidden, last, self._last_bias)

    def weights(self, data: _Data) -> SurvivalWeights:
        """Weights on raw features, with the scaling folded in."""
        with torch.no_grad():
            first, last = (layer.double().numpy() for layer in self.layers())
            first = first / data.std
            first_bias = self._first_bias.double().numpy() - first @ data.mean
            return SurvivalWeights(
                inputs=data.names,
                hidden_weight=first.astype(np.float32),
                hidden_bias=first_bias.astype(np.float32),
                out_weight=last.astype(np.float32),
                out_bias=self._last_bias.numpy().copy(),
            )


def _train(data: _Data, config: SurvivalFitConfig) -> _Network:
    rng = np.random.default_rng(config.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = _Network(data, config)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        fused=True,  # parameters are so few that a step is mostly calls
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.num_steps)
    for at in islice(_batches(rng, len(data.inputs), config.batch_size), config.num_steps):
        loss = _loss(network(data.inputs[at]), data.targets[at], data.reached[at])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return network


def _batches(rng: np.random.Generator, num_rows: int, size: int) -> Iterator[Tensor]:
    """Indices of rows in random order, again and again."""
    while True:
        order = rng.permutation(num_rows)
        for start in range(0, num_rows, size):
            yield torch.from_numpy(order[start : start + size])


def _loss(logits: Tensor, targets: Tensor, reached: Tensor) -> Tensor:
    """Cross-entropy a verdict; unreached positions count nothing."""
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reached, reduction="sum")
    return losses / reached.sum().clamp(min=1.0)
