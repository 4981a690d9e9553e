"""What proposes tokens: prompt lookup, a draft model, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from specdepth.scheduler.depth import VerificationRule
from specdepth.scheduler.state import DrafterKind, Floats, Ints

from .attention import PassLayout
from .draft_steps import DraftCache, ask_keep_drafting
from .kv_cache import BlockPool
from .packing import pack, tail_rows
from .paged_model import PagedModel
from .prompt_lookup import LookupConfig, find_matches
from .request import Request
from .runner import Offer, RoundPlan
from .sampling import Stream, argmax, gumbel_argmax, sample, token_probs, uniform
from .sequences import SequenceTable
from .signals import law_signals
from .verification import DraftProbs

__all__ = ["DraftModel", "DraftOptions", "Drafter", "NoDrafter", "PromptLookup", "Proposal"]


@dataclass(slots=True, kw_only=True)
class Proposal:
    """Drafted tokens of one round. Legend: R sequences of the plan, K columns."""

    token_ids: Tensor
    """[R, K] int64 on the device; arbitrary from `lengths` on."""
    lengths: Ints
    """[R]"""
    probs: DraftProbs | None = None
    """Laws that they were drawn from; None for point masses and where the rule needs none."""
    top1: Floats | None = None
    """[R, K] signals, NaN where nothing was drafted; None without a model."""
    entropy: Floats | None = None
    margin: Floats | None = None
    pass_sequences: tuple[int, ...] = ()
    num_catch_up_tokens: int = 0


class Drafter(Protocol):
    """Makes proposals."""

    kind: DrafterKind

    def start(self, slot: int, request: Request) -> None:
        """A request took `slot`."""
        ...

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Say what there is to propose, before depths are chosen."""
        ...

    def draft(self, plan: RoundPlan) -> Proposal:
        """Propose `plan.depths` tokens, or fewer."""
        ...

    def settle(self, slots: Ints) -> None:
        """The round's tokens have been committed for `slots`."""
        ...


class NoDrafter:
    """Never proposes: the target alone."""

    kind: DrafterKind = "none"

    def start(self, slot: int, request: Request) -> None:
        """Nothing to do."""

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Nothing on offer."""
        return Offer.without_match(np.zeros(len(slots), np.int64), max_length)

    def draft(self, plan: RoundPlan) -> Proposal:
        """An empty proposal."""
        return Proposal(
            token_ids=torch.zeros(len(plan.slots), 0, dtype=torch.int64),
            lengths=np.zeros(len(plan.slots), np.int64),
        )

    def settle(self, slots: Ints) -> None:
        """Nothing to do."""


class PromptLookup(NoDrafter):
    """Continues the longest, most recent earlier match of the last few tokens; costs no pass.

    [Saxena 2023, prompt lookup decoding; He et al. 2024, REST, for the idea of retrieval.]
    """

    kind: DrafterKind = "prompt-lookup"

    def __init__(
        self, sequences: SequenceTable, device: torch.device, config: LookupConfig | None = None
    ) -> None:
        self._sequences, self._device = sequences, device
        self.config = config or LookupConfig()
        self._tokens: Ints = np.zeros((sequences.num_slots, 0), np.int64)

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Search all `slots` at once and keep what was found for `draft`."""
        found = find_matches(self._sequences, slots, max_length, self.config)
        if self._tokens.shape[1] != max_length:
            self._tokens = np.zeros((self._sequences.num_slots, max_length), np.int64)
        self._tokens[slots] = found.token_ids
        return Offer(
            length=found.lengths,
            match_length=found.match_lengths,
            num_matches=found.num_matches,
            match_agreement=found.match_agreement,
            agreement=found.agreement,
            match_tokens=found.match_tokens,
            match_distance=found.match_distance,
            match_in_output=found.match_in_output,
        )

    def draft(self, plan: RoundPlan) -> Proposal:
        """The first `plan.depths` tokens of what `offer` found."""
        width = int(plan.depths.max(initial=0))
        tokens = torch.from_numpy(self._tokens[plan.slots, :width]).to(self._device)
        return Proposal(token_ids=tokens, lengths=plan.depths)


class DraftOptions(TypedDict):
    """What a draft model is told of its target and engine."""

    target_vocab_size: int
    """V. Tokens that the model cannot name have probability 0 in its laws."""
    coupled: bool
    """Draw with the noise that the target will use."""
    max_pass_tokens: int
    """Bound on tokens in a catch-up pass."""


class DraftModel:
    """A smaller causal LM with its own KV in the shared pool.

    Its cache is kept lazily; see `DraftCache`.

    Args:
        model: allocated with the pool's blocks.
        sequences: shared arrays over slots.
        pool: shared block tables.
        **options: see `DraftOptions`.
    """

    kind: DrafterKind = "draft-model"
    reads_target = False
    """Whether it needs the target's states; see `EagleDrafter`."""

    def __init__(
        self,
        model: PagedModel,
        sequences: SequenceTable,
        pool: BlockPool,
        **options: Unpack[DraftOptions],
    ) -> None:
        self.model = model
        self._seqs, self._pool = sequences, pool
        self._vocab_size = options["target_vocab_size"]
        self._coupled = options["coupled"]
        self._cache = DraftCache(
            sequences, options["max_pass_tokens"], reads_target=self.reads_target
        )
        self._names: Tensor | None = None
        """[V'] the target's id of each token of the model, where they differ."""

    def start(self, slot: int, request: Request) -> None:
        """Nothing to do: the cache is filled when the sequence drafts."""

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """As many tokens as asked for, about which nothing is known yet."""
        length = np.where(self._cache.can_draft(slots), max_length, 0)
        return Offer.without_match(length, max_length)

    def draft(self, plan: RoundPlan) -> Proposal:
        """Draft in shrinking batches: pass j runs over the sequences that want token j."""
        seqs, slots, device = self._seqs, plan.slots, self.model.device
        size, top = len(slots), int(plan.depths.max(initial=0))
        tokens = torch.zeros(size, top, dtype=torch.int64, device=device)
        lengths = np.zeros(size, np.int64)
        signals = np.full((3, size, top), np.nan)
        law_rows = torch.zeros(size, top, dtype=torch.int64, device=device)
        laws: list[Tensor] = []
        shown: list[tuple[Ints, Tensor]] = []
        num_laws, num_catch_up, passes = 0, 0, []
        depths = plan.depths.copy()
        alive = np.flatnonzero(depths > 0)
        self._cache.begin(slots)
        rule: VerificationRule = "coupled" if self._coupled else "rejection"
        if not (seqs.temperature[slots] > 0).any():
            rule = "greedy"
        for step in range(top):
            alive = alive[depths[alive] > step]
            if not len(alive):
                break
            at = slots[alive]
            positions = seqs.num_tokens[at] + step  # of the token to be drawn
            logits, num_tokens, num_passes = self._pass(alive, at, positions, tokens[alive], step)
            num_catch_up += num_tokens - len(at)
            passes += [len(at)] * num_passes
            shown.append((alive, law_signals(logits, with_margin=True)))
            if plan.keep_drafting is not None:
                signals[:, alive, step] = shown[-1][1].cpu().numpy()
                depths[alive] = ask_keep_drafting(plan, alive, step, signals)
                stays = depths[alive] > step
                signals[:, alive[~stays], step] = np.nan
                alive, at, positions = alive[stays], at[stays], positions[stays]
                if not len(alive):
                    break
                if len(alive) < len(logits):
                    logits = logits[torch.from_numpy(np.flatnonzero(stays)).to(device)]
            drawn, law = self.draw(logits, at, positions, rule)
            if law is not None:
                laws.append(law)
                law_rows[alive, step] = num_laws + torch.arange(len(alive), device=device)
                num_laws += len(alive)
            tokens[alive, step] = drawn
            lengths[alive] = step + 1
        if plan.keep_drafting is None and shown:
            rows = np.concatenate([alive for alive, _ in shown])
            steps = np.repeat(np.arange(len(shown)), [len(alive) for alive, _ in shown])
            signals[:, rows, steps] = torch.cat([part for _, part in shown], 1).cpu().numpy()
        return Proposal(
            token_ids=tokens,
            lengths=lengths,
            probs=DraftProbs(torch.cat(laws), law_rows) if laws else None,
            top1=signals[0],
            entropy=signals[1],
            margin=signals[2],
            pass_sequences=tuple(passes),
            num_catch_up_tokens=num_catch_up,
        )

    def settle(self, slots: Ints) -> None:
        """Keep the KV of what stands."""
        self._cache.settle(slots)

    def _pass(
        self, alive: Ints, at: Ints, positions: Ints, drafted: Tensor, step: int
    ) -> tuple[Tensor, int, int]:
        """Feed each sequence all tokens up to `positions` that its draft cache lacks.

        Args:
            alive: [D] rows of the plan.
            at: [D] their slots.
            positions: [D] of the tokens to be drawn.
            drafted: [D, K] what was drawn so far.
            step: how much of it.

        Returns:
            Logits [D, V] for the tokens at `positions`, tokens computed, and passes taken.
        """
        num_tokens, num_passes, shift = 0, 0, int(self.reads_target)
        for one in self._cache.passes(at, positions):
            among = at[one.rows]
            spans = pack(one.starts, one.lengths)
            ids = self._tokens(
                among, spans.sequence, spans.positions + shift, drafted[one.rows], step
            )
            layout = self.model.layout(self._pool.tables[among], spans.starts, spans.lengths)
            last = (
                tail_rows(spans, np.ones(len(at), np.int64)) if one.is_last else spans.ends[-1:] - 1
            )
            places = torch.from_numpy(spans.positions).to(ids.device)
            logits = self._forward(ids, places, layout, last, alive[one.rows], step)
            num_tokens += len(spans.positions)
            num_passes += 1
        return logits, num_tokens, num_passes

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: PassLayout,
        logit_rows: Ints,
        rows: Ints,
        step: int,
    ) -> Tensor:
        """One pass over rows of the plan; see `PackedModel.forward`."""
        return self.model.forward(ids, positions, layout, logit_rows)

    def _tokens(
        self, at: Ints, sequence: Ints, positions: Ints, drafted: Tensor, step: int
    ) -> Tensor:
        """Token ids of a packed row: committed ones from the table, drafted ones from the device."""
        lengths = self._seqs.num_tokens[at]
        ahead = positions - lengths[sequence]
        ids = self._seqs.tokens[at[sequence], np.where(ahead < 0, positions, 0)]
        packed = torch.from_numpy(ids).to(self.model.device)
        if step:
            new = np.flatnonzero(ahead >= 0)
            packed[new] = drafted[sequence[new], ahead[new]]
        return packed

    def _law(self, logits: Tensor, at: Ints) -> Tensor:
        seqs = self._seqs
        law = token_probs(
            logits,
            torch.from_numpy(seqs.temperature[at]),
            torch.from_numpy(seqs.top_k[at]),
            torch.from_numpy(seqs.top_p[at]),
        )
        if self._names is not None:
            return law.new_zeros(len(law), self._vocab_size).index_copy_(1, self._names, law)
        short = self._vocab_size - law.shape[1]
        return torch.nn.functional.pad(law, (0, short)) if short > 0 else law

    def draw(
        self, logits: Tensor, at: Ints, positions: Ints, rule: VerificationRule
    ) -> tuple[Tensor, Tensor | None]:
        """Draw a token from each row of `logits` [D, V'].

        Args:
            logits: of the model.
            at: [D] slots.
            positions: [D] of the tokens.
            rule: how the round is verified; "greedy" where none of its sequences samples, and "coupled"
                draws with the noise that the target will use.

        Returns:
            int64 [D] of the target's ids, and under "rejection" the laws [D, V] that they were drawn
            from.
        """
        seqs, device = self._seqs, logits.device
        if rule == "greedy":
            drawn = argmax(logits)
            return drawn if self._names is None else self._names[drawn], None
        law = self._law(logits, at)
        seed = torch.from_numpy(seqs.seed[at]).to(device)
        position = torch.from_numpy(positions).to(device)
        if rule == "coupled":
            return gumbel_argmax(law, seed, position), None
        attempt = torch.from_numpy(seqs.attempt[at]).to(device)
        return sample(law, uniform(seed, position, attempt, Stream.DRAFT)), law
