"""Tiny random models, target-only decoding by full forwards, and what drives the engine in tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.eagle_files import LoadedEagle
from specdepth.decoder.sampling import gumbel_argmax, token_probs
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.baselines.lawful import EVERY_RULE
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

torch.set_num_threads(1)

VOCAB = 97
"""95 printable characters and two special tokens, see `char_tokenizer`."""


def tiny_llama(
    seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any
) -> PreTrainedModel:
    """A Llama of two layers whose laws are far from uniform, so that greedy text varies."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**(settings | options)))
    loaded: PreTrainedModel = model.to(dtype).eval()
    return loaded


def bigram_model(logits: Sequence[Sequence[float]]) -> PreTrainedModel:
    """A Llama with exactly these logits of the next token (columns) after each token (rows)."""
    size = len(logits)
    model = tiny_llama(
        vocab_size=size,
        hidden_size=4 * -(-size // 4),
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=0.0,
    )
    hidden = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()  # nothing is added to the embedding
        embedding: Any = model.get_input_embeddings().weight
        embedding.copy_(torch.eye(size, hidden))
        head: Any = model.get_output_embeddings().weight
        head.zero_()
        # The norm scales a unit vector by sqrt(hidden).
        head[:, :size] = torch.tensor(logits, dtype=torch.float64).T / hidden**0.5
    return model


def noisy_copy(model: PreTrainedModel, scale: float, seed: int = 1) -> PreTrainedModel:
    """The same model with weight noise of `scale` times each weight's own spread."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() > 1:
                parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return copied


def from_config(config: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of any architecture."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def char_tokenizer(extra: Sequence[str] = ("<end>", "<more>")) -> PreTrainedTokenizerFast:
    """Token i is the character 32 + i; then come `extra` special tokens."""
    chars = [chr(code) for code in range(32, 127)]
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(chars)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(extra))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def build_decoder(
    target: PreTrainedModel,
    draft: PreTrainedModel | LoadedEagle | str = "prompt-lookup",
    **options: Any,
) -> SpeculativeDecoder:
    """A float64 decoder over copies of the models, with small blocks and few slots."""
    settings: dict[str, Any] = {
        "dtype": torch.float64,
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_kv_blocks": 200,
    }
    drafter = draft if isinstance(draft, str) else copy.deepcopy(draft)
    return SpeculativeDecoder.from_pretrained(
        copy.deepcopy(target), drafter, **(settings | options)
    )


def end_tokens(model: PreTrainedModel) -> set[int]:
    """End tokens that a model names."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    return set() if named is None else {named} if isinstance(named, int) else set(named)


@torch.no_grad()
def next_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [V] after `tokens`, by a full forward without cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0, -1]


def next_law(
    model: PreTrainedModel, tokens: Sequence[int], sampling: SamplingParams
) -> torch.Tensor:
    """Probabilities [1, V] of the next token as `sampling` shapes them."""
    return token_probs(
        next_logits(model, tokens)[None],
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
    )


def target_only_text(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams | None = None,
) -> list[int]:
    """Decoding by full forwards, the definition of the right answer: greedy, or with the Gumbel noise
    that (seed, position) gives.
    """
    sampling = sampling or SamplingParams()
    ends, tokens = end_tokens(model), list(prompt)
    for _ in range(count):
        if sampling.temperature == 0:
            drawn = int(next_logits(model, tokens).argmax())
        else:
            law = next_law(model, tokens, sampling)
            seed = (sampling.seed or 0) % 2**64
            seed = seed - 2**64 if seed >= 2**63 else seed
            drawn = int(gumbel_argmax(law, torch.tensor([seed]), torch.tensor([len(tokens)])))
        tokens.append(drawn)
        if drawn in ends and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :]


def greedy_text(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Target-only greedy decoding."""
    return target_only_text(model, prompt, count)


class Watched:
    """A scheduler that keeps what it was shown and told; depths from `decide`, or one depth."""

    lawful_under = EVERY_RULE

    def __init__(self, decide: Callable[[RoundState], Any] | int = 0) -> None:
        self.decide = decide
        self.states: list[RoundState] = []
        self.outcomes: list[RoundOutcome] = []

    def choose(self, state: RoundState) -> Ints:
        self.states.append(state)
        if callable(self.decide):
            depths: Ints = self.decide(state)
            return depths
        return np.full(state.num_running, self.decide, np.int64)

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


def ragged(seed: int) -> Callable[[RoundState], Ints]:
    """Random depths that differ between sequences and rounds."""
    rng = np.random.default_rng(seed)

    def decide(state: RoundState) -> Ints:
        return rng.integers(0, state.max_num_speculative_tokens + 1, state.num_running)

    return decide


def repetitive_prompts(seed: int = 0, vocab_size: int = VOCAB) -> list[list[int]]:
    """Prompts of 1 to 45 tokens; the longer ones repeat themselves, so that prompt lookup finds much."""
    rng = np.random.default_rng(seed)
    prompts = []
    for length, period in ((1, 1), (6, 3), (45, 7), (17, 5), (30, 4), (9, 9), (24, 6), (2, 2)):
        phrase = rng.integers(0, vocab_size, period)
        prompts.append(np.resize(phrase, length).tolist())
    return prompts
