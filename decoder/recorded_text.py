"""A drafter that proposes recorded texts, corrupted so that acceptance follows a known law.

Benchmarks need it where no trained model is at hand: a target of any size decodes once, then its own
output is proposed back at the acceptance of a real pair. Every pass is real; only the proposals are
arranged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specdepth.scheduler.state import DrafterKind, Ints

from .drafters import NoDrafter, Proposal
from .kv_cache import BlockPool
from .models import PackedModel
from .request import Request
from .runner import Offer, RoundPlan
from .sequences import SequenceTable

RecordedPair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the text that the target gave it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupLaw:
    """Acceptance of prompt lookup as a Markov chain over the positions of a text, M match lengths.

    The state of a position is the match length m on offer there, 0 for none. The proposal's next token
    is right with probability `accept[m - 1]`; then the match grows by one token, up to M. Otherwise,
    and where there is no offer, the next state follows `restart[m]`. So the number of accepted tokens
    has the law accept[m], accept[m + 1], ..., and long runs last, as in copied passages.

    Raises:
        ValueError: sizes that do not fit together, or numbers that are no probabilities.
    """

    accept: tuple[float, ...]
    """[M] P(the proposed token is right) by match length 1..M."""
    restart: tuple[tuple[float, ...], ...]
    """[M + 1][M + 1] law of the match length at the position after a failure, by the length before it."""

    def __post_init__(self) -> None:
        size = len(self.accept) + 1
        if size < 2 or len(self.restart) != size or any(len(row) != size for row in self.restart):
            raise ValueError(
                f"restart must be {size} rows of {size} numbers for {size - 1} match lengths."
            )
        every = (*self.accept, *(p for row in self.restart for p in row))
        if not all(0 <= p <= 1 for p in every):
            raise ValueError("accept and restart hold probabilities, in 0..1.")
        if any(not math.isclose(sum(row), 1.0, abs_tol=1e-9) for row in self.restart):
            raise ValueError("each row of restart must sum to 1.")

    @classmethod
    def constant(cls, accept: float) -> LookupLaw:
        """A proposal at every position, each token right with probability `accept`."""
        return cls(accept=(accept,), restart=((0.0, 1.0), (0.0, 1.0)))


SMOLLM2_LOOKUP = LookupLaw(
    accept=(0.26, 0.55, 0.68, 0.87),
    restart=(
        (0.40, 0.60, 0.00, 0.00, 0.00),
        (0.41, 0.35, 0.24, 0.00, 0.00),
        (0.30, 0.37, 0.17, 0.16, 0.00),
        (0.31, 0.41, 0.10, 0.08, 0.10),
        (0.24, 0.27, 0.13, 0.08, 0.28),
    ),
)
"""Prompt lookup up to 4-grams on SmolLM2-135M-Instruct, greedy, bf16: counted at each of 7,673 positions
of its answers to 72 training prompts of six kinds. There 16 % of the positions had no offer, and 19, 10,
7 and 47 % a match of 1, 2, 3 and 4 or more."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """A text with its chain. Legend: L tokens."""

    tokens: Ints
    """[L]"""
    match: Ints
    """[L] match length on offer at each position."""
    failure: Ints
    """[L] first position from here on whose proposed token is wrong; L if there is none."""


class RecordedText(NoDrafter):
    """Proposes the recorded continuation of each request up to a token where it goes wrong.

    Where that is depends on (seed, prompt, position) alone, so it is the same for each depth, policy and
    batch, and again after preemption. Requests whose prompt was not recorded get no proposal; neither do
    positions beyond the record.

    Args:
        sequences: token table.
        texts: prompts with the texts that the target gives them; of equal prompts the last counts.
        vocab_size: wrong tokens are taken from it.
        device: where proposals go.
        law: of match lengths and acceptance.
        seed: of the chain.

    Raises:
        ValueError: a vocabulary of less than two tokens, which has no wrong one.
    """

    kind: DrafterKind = "recorded-text"

    def __init__(
        self,
        sequences: SequenceTable,
        texts: Iterable[RecordedPair],
        *,
        vocab_size: int,
        device: torch.device,
        law: LookupLaw = SMOLLM2_LOOKUP,
        seed: int = 0,
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, got {vocab_size}.")
        self._sequences, self._device, self._vocab_size = sequences, device, vocab_size
        self._recordings: dict[bytes, _Recording] = {}
        for prompt, text in texts:
            key = _prompt_key(prompt)
            self._recordings[key] = _record(np.asarray(text, np.int64), law, key, seed)
        width = 1 + max((len(r.tokens) for r in self._recordings.values()), default=0)
        shape = (sequences.num_slots, width)
        self._text: Ints = np.zeros(shape, np.int64)
        self._match: Ints = np.zeros(shape, np.int64)
        self._failure: Ints = np.zeros(shape, np.int64)
        self._length: Ints = np.zeros(sequences.num_slots, np.int64)
        self._offered: Ints = np.zeros((sequences.num_slots, 0), np.int64)

    @classmethod
    def factory(
        cls,
        texts: Iterable[RecordedPair],
        *,
        law: LookupLaw = SMOLLM2_LOOKUP,
        seed: int = 0,
    ) -> Callable[[SequenceTable, BlockPool, PackedModel], RecordedText]:
        """Return what `SpeculativeDecoder.from_pretrained` takes as `draft`; see the class."""
        pairs = list(texts)

        def build(sequences: SequenceTable, pool: BlockPool, target: PackedModel) -> RecordedText:
            return cls(
                sequences,
                pairs,
                vocab_size=target.vocab_size,
                device=target.device,
                law=law,
                seed=seed,
            )

        return build

    def start(self, slot: int, request: Request) -> None:
        """Find the recording of the request's prompt."""
        recording = self._recordings.get(_prompt_key(request.prompt_token_ids))
        length = 0 if recording is None else len(recording.tokens)
        self._length[slot] = length
        self._match[slot] = 0
        if recording is not None:
            self._text[slot, :length] = recording.tokens
            self._match[slot, :length] = recording.match
            self._failure[slot, :length] = recording.failure

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """What is left of each recording, up to `max_length` tokens, at positions with a match."""
        seqs = self._sequences
        at = np.minimum(seqs.num_tokens[slots] - seqs.num_prompt[slots], self._length[slots])
        match = self._match[slots, at]
        length = np.where(match > 0, np.minimum(self._length[slots] - at, max_length), 0)
        if self._offered.shape[1] != max_length:
            self._offered = np.zeros((seqs.num_slots, max_length), np.int64)
        columns = at[:, None] + np.arange(max_length)
        inside = np.minimum(columns, self._text.shape[1] - 1)
        tokens = self._text[slots[:, None], inside]
        wrong = columns == self._failure[slots, at][:, None]
        self._offered[slots] = np.where(wrong, (tokens + 1) % self._vocab_size, tokens)
        return replace(
            Offer.without_match(length, max_length),
            match_length=match,
            num_matches=(match > 0).astype(np.int64),
            match_agreement=(match > 0).astype(np.float64),
        )

    def draft(self, plan: RoundPlan) -> Proposal:
        """The first `plan.depths` tokens of what was offered."""
        width = int(plan.depths.max(initial=0))
        tokens = torch.from_numpy(self._offered[plan.slots, :width]).to(self._device)
        return Proposal(token_ids=tokens, lengths=plan.depths)


def _prompt_key(prompt: Sequence[int] | Ints) -> bytes:
    tokens = np.asarray(prompt, np.int64).astype("<i8")
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()


def _record(tokens: Ints, law: LookupLaw, key: bytes, seed: int) -> _Recording:
    """Run the chain over a text; position t uses the t-th pair of draws whatever the text's length."""
    rng = np.random.default_rng([seed % 2**64, int.from_bytes(key, "big")])
    draws = rng.random((len(tokens), 2))
    edges = np.cumsum(law.restart, axis=1)[:, :-1]
    longest = len(law.accept)
    match: Ints = np.zeros(len(tokens), np.int64)
    failure: Ints = np.full(len(tokens), len(tokens), np.int64)
    before, right = 0, False
    for position, (place, luck) in enumerate(draws):
        if right:
            state = min(before + 1, longest)
        else:
            state = int(np.searchsorted(edges[before], place, side="right"))
        match[position] = before = state
        right = state > 0 and luck < law.accept[state - 1]
        if not right:
            failure[position] = position
    # From the back: where the next failure is.
    failure = np.minimum.accumulate(failure[::-1])[::-1]
    return _Recording(tokens, match, failure)
