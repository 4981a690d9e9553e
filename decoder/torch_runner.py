"""Runs the models of a round: draft passes, one packed verification pass, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdepth.scheduler.depth import VerificationRule
from specdepth.scheduler.state import DrafterKind, Ints

from .attention import PassLayout
from .clock import Clock, PassWork
from .config import EngineConfig
from .draft_steps import ask_trim
from .drafters import Drafter, DraftModel, Proposal
from .eagle_drafter import EagleDrafter
from .kv_cache import BlockPool, consecutive_tables
from .models import PackedModel
from .packing import pack, prefill_pairs, tail_rows
from .paged_model import PagedModel
from .request import Request
from .runner import ModelRole, Offer, RoundPlan, RoundResult
from .sampling import argmax, gumbel_argmax, round_uniforms, token_probs
from .sequences import SequenceTable
from .signals import law_signals
from .verification import DraftProbs, Verification, verify_equal, verify_rejection


class TorchRunner:
    """A `ModelRunner` over real models.

    Args:
        target: allocated with the pool's blocks.
        drafter: makes proposals.
        sequences: arrays over slots, shared with the engine.
        pool: block tables, shared with the engine.
        config: the engine's.
        clock: the engine's.
    """

    def __init__(
        self,
        target: PackedModel,
        drafter: Drafter,
        sequences: SequenceTable,
        pool: BlockPool,
        config: EngineConfig,
        clock: Clock,
    ) -> None:
        self.target = target
        self.draft_source = drafter
        self.clock = clock
        self._seqs, self._pool, self._config = sequences, pool, config

    @property
    def drafter(self) -> DrafterKind:
        """What proposes tokens."""
        return self.draft_source.kind

    def start(self, slot: int, request: Request) -> None:
        """Tell the drafter."""
        self.draft_source.start(slot, request)

    def stop(self, slots: Ints) -> None:
        """Nothing to do: the arrays of a slot are reset when it is taken again."""

    def offer(self, slots: Ints, max_length: int) -> Offer:
        """Ask the drafter."""
        return self.draft_source.offer(slots, max_length)

    def settle(self, slots: Ints) -> None:
        """Tell the drafter."""
        self.draft_source.settle(slots)

    @torch.inference_mode()
    def run(self, plan: RoundPlan) -> RoundResult:
        """Draft, verify, and judge one round."""
        try:
            return self._run(plan)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                "The device ran out of memory in a pass; lower kv_cache_bytes, "
                "max_num_batched_tokens or max_num_seqs."
            ) from error

    def _run(self, plan: RoundPlan) -> RoundResult:
        started = self._now()
        proposal = self.draft_source.draft(plan)
        num_proposed = proposal.lengths
        if proposal.probs is not None and self.drafter != "draft-model":
            raise ValueError(
                f'A drafter of kind {self.drafter!r} gave laws of its tokens; only a "draft-model" '
                "may, since schedulers are held to stricter rules there."
            )
        if plan.trim is not None:
            self._trim(plan, proposal)
        drafted = self._now()
        logits, work = self._verify_pass(plan, proposal)
        verdict = self._judge(plan, proposal, logits, self._config.verification)
        num_accepted = verdict.num_accepted.cpu().numpy()
        last = np.cumsum(proposal.lengths + 1) - (proposal.lengths + 1) + num_accepted
        seen = law_signals(logits[torch.from_numpy(last).to(logits.device)])
        top1, entropy = seen.cpu().numpy()
        finished = self._now()
        return RoundResult(
            num_drafted=proposal.lengths,
            num_proposed=num_proposed,
            num_accepted=num_accepted,
            tokens=verdict.token_ids.cpu().numpy(),
            draft_top1=self._pad(proposal.top1),
            draft_entropy=self._pad(proposal.entropy),
            draft_margin=self._pad(proposal.margin),
            target_top1=top1,
            target_entropy=entropy,
            work=work,
            draft_s=drafted - started,
            verify_s=finished - drafted,
        )

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.clock.now()

    def _pad(self, signal: np.ndarray | None) -> np.ndarray | None:
        """Widen [R, deepest] to [R, K]."""
        if signal is None:
            return None
        missing = self._config.max_num_speculative_tokens - signal.shape[1]
        return np.pad(signal, ((0, 0), (0, missing)), constant_values=np.nan)

    def _trim(self, plan: RoundPlan, proposal: Proposal) -> None:
        unknown = np.full((len(plan.slots), self._config.max_num_speculative_tokens), np.nan)
        signals = [self._pad(s) for s in (proposal.top1, proposal.entropy, proposal.margin)]
        shown = np.stack([unknown if s is None else s for s in signals])
        proposal.lengths = ask_trim(plan, proposal.lengths, shown)

    def _verify_pass(self, plan: RoundPlan, proposal: Proposal) -> tuple[Tensor, PassWork]:
        """One target pass over pending tokens, drafts, and prefill chunks.

        Returns:
            Logits [sum(1 + k_i), V] of the decoding sequences, and what was computed.
        """
        seqs, slots, lengths = self._seqs, plan.slots, proposal.lengths
        pending = seqs.num_tokens[slots] - seqs.num_computed[slots]
        all_slots = np.concatenate([slots, plan.prefill_slots])
        spans = pack(
            seqs.num_computed[all_slots],
            np.concatenate([pending + lengths, plan.prefill_lengths]),
        )
        known = seqs.num_tokens[all_slots][spans.sequence]
        ahead = spans.positions - known
        ids = seqs.tokens[all_slots[spans.sequence], np.where(ahead < 0, spans.positions, 0)]
        packed = torch.from_numpy(ids).to(self.target.device)
        new = np.flatnonzero(ahead >= 0)
        if len(new):
            packed[new] = proposal.token_ids[spans.sequence[new], ahead[new]]
        rows = tail_rows(spans, 1 + lengths) if len(slots) else spans.ends[-1:] - 1
        layout = self.target.layout(self._pool.tables[all_slots], spans.starts, spans.lengths)
        positions = torch.from_numpy(spans.positions).to(self.target.device)
        logits = self.target.forward(packed, positions, layout, rows)
        self._hand_over(layout)
        num_decode = int((1 + lengths).sum())
        prompts = np.concatenate([pending - 1, plan.prefill_lengths])
        work = PassWork(
            num_pass_tokens=len(ids),
            num_prefill_tokens=len(ids) - num_decode,
            num_seqs=len(all_slots),
            num_logit_rows=len(rows),
            num_context_tokens=int((spans.starts + spans.lengths).sum()),
            num_prefill_pairs=prefill_pairs(spans.starts, prompts),
            draft_pass_sequences=proposal.pass_sequences,
            num_catch_up_tokens=proposal.num_catch_up_tokens,
        )
        return logits[:num_decode], work

    def _hand_over(self, layout: PassLayout) -> None:
        """Give the last pass's states to a drafter that reads them."""
        if isinstance(self.draft_source, EagleDrafter):
            assert self.target.states is not None
            self.draft_source.read_target(layout.write_index, self.target.states)

    def _judge(
        self, plan: RoundPlan, proposal: Proposal, logits: Tensor, rule: VerificationRule
    ) -> Verification:
        seqs, slots, device = self._seqs, plan.slots, logits.device
        host_depths = torch.from_numpy(proposal.lengths)
        depths = host_depths.to(device)
        width = self._config.max_num_speculative_tokens
        drafts = torch.nn.functional.pad(
            proposal.token_ids, (0, width - proposal.token_ids.shape[1])
        ).to(device)
        if not (seqs.temperature[slots] > 0).any():
            return verify_equal(argmax(logits), drafts, depths)
        repeats = host_depths + 1
        law = token_probs(
            logits,
            torch.from_numpy(seqs.temperature[slots]).repeat_interleave(repeats),
            torch.from_numpy(seqs.top_k[slots]).repeat_interleave(repeats),
            torch.from_numpy(seqs.top_p[slots]).repeat_interleave(repeats),
        )
        seed = torch.from_numpy(seqs.seed[slots]).to(device)
        position = torch.from_numpy(seqs.num_tokens[slots]).to(device)
        if rule == "coupled":
            row_of = torch.arange(len(slots)).repeat_interleave(repeats)
            offset = torch.arange(len(row_of)) - (repeats.cumsum(0) - repeats)[row_of]
            row_of, offset = row_of.to(device), offset.to(device)
            return verify_equal(
                gumbel_argmax(law, seed[row_of], position[row_of] + offset), drafts, depths
            )
        attempt = torch.from_numpy(seqs.attempt[slots]).to(device)
        accept, final = round_uniforms(seed, position, attempt, width)
        probs = proposal.probs
        if probs is not None and probs.rows.shape[1] < width:
            probs = type(probs)(
                probs.probs, torch.nn.functional.pad(probs.rows, (0, width - probs.rows.shape[1]))
            )
        return verify_rejection(law, drafts, probs, depths, accept, final)

    # ------------------------------------------------------------- profiling

    @property
    def max_num_seqs(self) -> int:
        """Sequences that fit into a pass."""
        return self._config.max_num_seqs

    @property
    def max_num_speculative_tokens(self) -> int:
        """K."""
        return self._config.max_num_speculative_tokens

    @property
    def max_pass_tokens(self) -> int:
        """Most tokens in a pass: the prefill budget, or every sequence at depth K."""
        deepest = self.max_num_seqs * (1 + self.max_num_speculative_tokens)
        return max(self._config.max_num_batched_tokens, deepest)

    @property
    def max_model_len(self) -> int:
        """Longest sequence."""
        return self._seqs.max_model_len

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._pool.block_size

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that fit into the pool."""
        return self._pool.num_blocks * self._pool.block_size

    @torch.inference_mode()
    def time_pass(
        self,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        num_logit_rows: int,
        model: ModelRole = "target",
    ) -> float:
        """Return the seconds of one packed pass over made-up sequences; overwrites the KV pool.

        Args:
            query_lengths: tokens that each sequence computes.
            context_lengths: keys that each sees, those tokens included.
            num_logit_rows: rows through the head.
            model: which model.

        Raises:
            ValueError: sequences that do not fit into the pool, or no such model.
            RuntimeError: sequences are running.
        """
        if self._seqs.active.any():
            raise RuntimeError(
                "time_pass overwrites the KV pool; finish or abort all requests first."
            )
        packed = self._model(model)
        lengths, contexts = np.array(query_lengths), np.array(context_lengths)
        blocks = -(-contexts // self._pool.block_size)
        if blocks.sum() > self._pool.num_blocks:
            raise ValueError(
                f"Contexts of {contexts.sum()} tokens do not fit into {self._pool.num_blocks} KV "
                f"blocks of {self._pool.block_size}."
            )
        tables = consecutive_tables(blocks)
        spans = pack(contexts - lengths, lengths)
        # Varied tokens: a repeated one would keep an embedding row in cache.
        ids = torch.from_numpy((spans.positions * 7919 + spans.sequence) % packed.vocab_size)
        rows = np.linspace(0, len(ids) - 1, num_logit_rows).astype(np.int64)
        started = self._now()
        layout = packed.layout(tables, spans.starts, spans.lengths)
        logits = packed.forward(
            ids.to(packed.device),
            torch.from_numpy(spans.positions).to(packed.device),
            layout,
            rows,
        )
        # What a round does with them, in the same share of rows.
        if model == "target":
            self._hand_over(layout)
        argmax(logits).cpu()
        law_signals(logits[: len(lengths)], with_margin=model == "draft").cpu()
        return self._now() - started

    @torch.inference_mode()
    def time_sampling(
        self, num_seqs: int, depth: int, rule: VerificationRule, model: ModelRole = "target"
    ) -> float:
        """Return the seconds that a round's verdict, or a draft pass's draws, take at temperature 0.7.

        Args:
            num_seqs: sequences.
            depth: tokens that each has drafted; a verdict is on one row more.
            rule: "greedy" is the same at temperature 0.
            model: "target" for the verdict, "draft" for the draws.

        Raises:
            RuntimeError: sequences are running.
        """
        if self._seqs.active.any():
            raise RuntimeError("time_sampling needs all slots; finish or abort all requests first.")
        slots, source = np.arange(num_seqs), self.draft_source
        # A slot's arrays are set anew when a request takes it.
        self._seqs.temperature[slots] = 0.0 if rule == "greedy" else 0.7
        self._seqs.top_k[slots], self._seqs.top_p[slots] = 0, 1.0
        generator = torch.Generator().manual_seed(0)

        def made_up(packed: PagedModel, num_rows: int) -> Tensor:
            # As spread as a language model's, since filters and draws look at what is likely.
            logits = 2.5 * torch.randn(num_rows, packed.vocab_size, generator=generator)
            return logits.to(packed.device, packed.dtype)

        laws, positions = None, np.arange(num_seqs)
        if isinstance(source, DraftModel):
            logits = made_up(source.model, num_seqs)
            started = self._now()
            _, laws = source.draw(logits, slots, positions, rule)
            if model == "draft":
                return self._now() - started
        logits = made_up(self.target, num_seqs * (1 + depth))
        proposal = Proposal(
            token_ids=torch.zeros(num_seqs, depth, dtype=torch.int64, device=logits.device),
            lengths=np.full(num_seqs, depth),
            probs=None
            if laws is None
            else DraftProbs(laws, torch.from_numpy(positions)[:, None].repeat(1, depth)),
        )
        plan = RoundPlan(
            slots=slots,
            rows=slots,
            depths=proposal.lengths,
            prefill_slots=slots[:0],
            prefill_lengths=slots[:0],
        )
        started = self._now()
        self._judge(plan, proposal, logits, rule)
        return self._now() - started

    def _model(self, model: ModelRole) -> PagedModel:
        if model == "target":
            return self.target
        if not isinstance(self.draft_source, DraftModel):
            raise ValueError(f"{self.drafter} has no draft model to time.")
        return self.draft_source.model
