"""The exact law of the texts that a depth rule leads to under rejection sampling, by enumeration.

Every draft that can be drawn and every verdict on it is walked with its probability, and the rule is
copied wherever fate forks, so that what it remembers of a discarded draft stays in the branches
where it was drawn. Verdicts are measured off `verify_rejection`, as test_verification_exact does.
The rule is shown what the engine shows it, in the engine's order. Round times depend on all
drafted tokens, discarded ones too: a lawful rule may go by them.

Legend: R sequences, A of them active, K deepest depth, V vocabulary, L tokens of each text.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from specdepth.decoder.verification import verify_rejection
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DraftSignals, ProposalSignals, check_depths
from specdepth.scheduler.state import Floats, Ints, RoundState, SequenceHistory
from tests.decoder.stop_rules import as_depths
from tests.decoder.test_verification_exact import (
    Batch,
    Prefix,
    World,
    measure_acceptance,
    measure_final,
)
from tests.scheduler.conftest import build_outcome, build_state

DEPTH = 2
"""K: the fate of a token may hang on the law that follows it, which needs two."""
EXACT = 1e-9
"""Bisecting the uniforms leaves errors of 1e-11 each."""
_HISTORY = (
    *("num_drafted_tokens", "num_accepted_tokens", "num_drafted_rounds", "full_streak"),
    *("rounds_since_draft", "last_depth", "last_accepted", "acceptance_ema", "acceptance_ema_slow"),
)


class TwoTokens(World):
    """Half as many branches, for two sequences at once; drafts are sure of little."""

    vocab_size = 2

    def distributions(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        weights = 0.3 + torch.rand(2, 2, generator=generator, dtype=torch.float64)
        target, draft = weights / weights.sum(-1, keepdim=True)
        return target, draft


class AppendixA(TwoTokens):
    """DSpark's counterexample: the target says 0.7 and 0.3, the draft 0.5 and 0.5; what the draft
    says next gives away which token it drew.
    """

    def distributions(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        target, draft = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64)
        return target, draft

    def __init__(self) -> None:
        super().__init__(0, None)
        for prefix in self.draft:
            if prefix and prefix[-1] == 0:
                self.draft[prefix] = torch.tensor([0.9, 0.1], dtype=torch.float64)


@dataclass(kw_only=True, slots=True)
class _Node:
    """What is known after some rounds in one branch of fate."""

    rule: Any
    history: SequenceHistory
    texts: tuple[Prefix, ...]
    mass: float
    num_rounds: int = 0


class RuleLaw:
    """Walks all fates of a rule in a world.

    Args:
        world: laws of target and draft after each prefix.
        num_seqs: R; their draws are independent, the rule sees them together.
        length: L.
        cost: shown to the rule.
    """

    def __init__(
        self,
        world: World,
        num_seqs: int = 1,
        length: int = 2,
        cost: CostModel | None = None,
    ) -> None:
        self.world, self.num_seqs, self.length = world, num_seqs, length
        self.cost = cost or CostModel.linear(base_s=1.0, token_s=0.3, draft_base_s=0.05)
        self.depths: set[int] = set()
        """Depths that the last walk verified somewhere."""

    @cached_property
    def verdicts(self) -> dict[tuple[Prefix, Prefix], list[tuple[Prefix, float]]]:
        """What a round commits, with its probability, for each prefix and draft."""
        size = self.world.vocab_size
        prefixes = {
            prefix: 1.0
            for length in range(self.length)
            for prefix in itertools.product(range(size), repeat=length)
        }
        table: dict[tuple[Prefix, Prefix], list[tuple[Prefix, float]]] = {}
        for depth in range(DEPTH + 1):
            self.world.depth = depth
            batch = Batch(self.world, prefixes)
            edges = measure_acceptance(batch, verify_rejection)
            final = measure_final(batch, verify_rejection, edges)
            for row, (prefix, path) in enumerate(zip(batch.prefixes, batch.paths, strict=True)):
                found, reach = [], 1.0
                for accepted in range(depth + 1):
                    stands = float(edges[row, accepted]) if accepted < depth else 0.0
                    masses = reach * (1 - stands) * final[accepted, row]
                    found += [
                        ((*path[:accepted], x), mass) for x, mass in enumerate(masses.tolist())
                    ]
                    reach *= stands
                table[prefix, path] = [(tokens, mass) for tokens, mass in found if mass > 0]
        return table

    @cached_property
    def target_law(self) -> Floats:
        """[V] * (R * L): what the texts should have."""
        law: Floats = self.world.target_law().numpy()
        law = one = law.sum(tuple(range(self.length, law.ndim)))
        for _ in range(self.num_seqs - 1):
            law = np.multiply.outer(law, one)
        return law

    def worst_error(self, make_rule: Callable[[], Any]) -> float:
        """Largest error of a joint probability under a rule."""
        return float(np.abs(self.law(make_rule) - self.target_law).max())

    def law(self, make_rule: Callable[[], Any]) -> Floats:
        """[V] * (R * L): joint law of the texts under a rule."""
        self.depths = set()
        law: Floats = np.zeros([self.world.vocab_size] * (self.num_seqs * self.length))
        nodes = [
            _Node(
                rule=make_rule(),
                history=SequenceHistory(self.num_seqs, DEPTH),
                texts=((),) * self.num_seqs,
                mass=1.0,
            )
        ]
        while nodes:
            for texts, mass, child in self._round(nodes.pop()):
                if child is None:
                    law[tuple(itertools.chain(*texts))] += mass
                else:
                    nodes.append(child)
        return law

    def _round(self, node: _Node) -> Iterator[tuple[tuple[Prefix, ...], float, _Node | None]]:
        """All ends of one round; without a node where all texts are done."""
        slots = np.array([i for i, text in enumerate(node.texts) if len(text) < self.length])
        state = self._state(node, slots)
        asked = check_depths(node.rule.choose(state), state, node.rule)
        depths = np.minimum(asked, state.max_depths)
        prefixes = tuple(node.texts[slot] for slot in slots)
        blank = np.full((3, len(slots), DEPTH), np.nan)
        nothing = ((),) * len(slots)
        drafts = self._drafts(node.rule, state, prefixes, nothing, depths, depths, blank, 1.0)
        for drafting, paths, signals, weight in drafts:
            rule, lengths = drafting, np.array([len(path) for path in paths])
            kept = lengths
            if hasattr(rule, "trim") and lengths.any():
                rule, some = copy.deepcopy(rule), np.flatnonzero(lengths)
                shown = ProposalSignals(some, lengths[some], *signals[:, some])
                kept = lengths.copy()
                kept[some] = np.clip(rule.trim(state, shown), 0, lengths[some])
            self.depths.update(kept.tolist())
            fates = [
                self.verdicts[prefix, path[:depth]]
                for prefix, path, depth in zip(prefixes, paths, kept.tolist(), strict=True)
            ]
            for fate in itertools.product(*fates):
                texts = list(node.texts)
                for slot, (tokens, _) in zip(slots, fate, strict=True):
                    texts[slot] = (*texts[slot], *tokens)[: self.length]
                mass = node.mass * weight * math.prod(chance for _, chance in fate)
                child = None
                if any(len(text) < self.length for text in texts):
                    child = _Node(
                        rule=copy.deepcopy(rule),
                        history=copy.deepcopy(node.history),
                        texts=tuple(texts),
                        mass=mass,
                        num_rounds=node.num_rounds + 1,
                    )
                    self._observe(child, state, asked, paths, kept, signals, fate)
                yield tuple(texts), mass, child

    def _drafts(
        self,
        rule: Any,
        state: RoundState,
        prefixes: tuple[Prefix, ...],
        paths: tuple[Prefix, ...],
        planned: Ints,
        limits: Ints,
        signals: Floats,
        mass: float,
        step: int = 0,
    ) -> Iterator[tuple[Any, tuple[Prefix, ...], Floats, float]]:
        """All drafts, each with the rule that saw it come; signals are [3, A, K].

        `limits` are what the rule said after the last pass, at first what was planned.
        """
        alive = np.array(
            [i for i, path in enumerate(paths) if len(path) == step < limits[i]], np.int64
        )
        signals = signals.copy()
        for row in alive:
            signals[:, row, step] = self._signals(prefixes[row] + paths[row])
        if len(alive) and hasattr(rule, "keep_drafting"):
            shown = DraftSignals(alive, step, *signals[:, alive, : step + 1])
            limits = limits.copy()
            limits[alive] = np.minimum(as_depths(rule.keep_drafting(state, shown)), planned[alive])
            stays = limits[alive] > step
            signals[:, alive[~stays], step] = np.nan
            alive = alive[stays]
        if not len(alive):
            yield rule, paths, signals, mass
            return
        laws = [self.world.draft[prefixes[row] + paths[row]].tolist() for row in alive]
        for drawn in itertools.product(range(self.world.vocab_size), repeat=len(alive)):
            chance = math.prod(law[token] for law, token in zip(laws, drawn, strict=True))
            longer = list(paths)
            for row, token in zip(alive, drawn, strict=True):
                longer[row] = (*longer[row], token)
            seer = copy.deepcopy(rule) if hasattr(rule, "keep_drafting") else rule
            reach = mass * chance
            yield from self._drafts(
                seer, state, prefixes, tuple(longer), planned, limits, signals, reach, step + 1
            )

    def _signals(self, prefix: Prefix) -> Floats:
        law = np.sort(self.world.draft[prefix].numpy())[::-1]
        positive = law[law > 0]
        return np.array([law[0], -(positive * np.log(positive)).sum(), law[0] - law[1]])

    def _state(self, node: _Node, slots: Ints) -> RoundState:
        history, size = node.history, len(slots)
        generated = np.array([len(node.texts[slot]) for slot in slots])
        top1, entropy, margin = history.draft_signals[:, slots]
        return build_state(
            size,
            DEPTH,
            slots=slots,
            request_ids=slots + 100,
            positions=generated + 5,
            num_generated=generated,
            num_remaining=self.length + DEPTH - generated,
            **{name: getattr(history, name)[slots] for name in _HISTORY},
            match_length=np.zeros(size, np.int64),
            draft_top1=top1,
            draft_entropy=entropy,
            draft_margin=margin,
            round_index=node.num_rounds,
            max_num_seqs=self.num_seqs,
            drafter="draft-model",
            cost=self.cost,
        )

    def _observe(
        self,
        node: _Node,
        state: RoundState,
        asked: Ints,
        paths: tuple[Prefix, ...],
        kept: Ints,
        signals: Floats,
        fate: tuple[tuple[Prefix, float], ...],
    ) -> None:
        accepted = np.array([len(tokens) - 1 for tokens, _ in fate])
        committed = np.minimum(accepted + 1, self.length - state.num_generated)
        accepted = np.minimum(accepted, committed)
        shown = np.where(np.arange(DEPTH) > accepted[:, None], np.nan, signals)
        drew = kept > 0
        node.history.update(state.slots, kept, accepted)
        node.history.draft_signals[:, state.slots[drew]] = shown[:, drew]
        node.rule.observe(
            build_outcome(
                state,
                kept,
                accepted,
                depths=asked,
                num_proposed=np.array([len(path) for path in paths]),
                num_committed=committed,
                finished=state.num_generated + committed == self.length,
                draft_top1=shown[0],
                draft_entropy=shown[1],
                draft_margin=shown[2],
                verify_s=0.1 + 0.07 * sum(itertools.chain(*paths)),
            )
        )
