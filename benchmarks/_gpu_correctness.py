"""Sections of `gpu_check.py` that compare tokens and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from _gpu_common import Check, random_prompts
from _random_llama import random_llama

if TYPE_CHECKING:
    from specdepth.decoder.models import PackedModel

TIE = 3e-4
"""Logit gap below which two float32 computations may prefer different tokens."""
RELATIVE_ERROR = {torch.bfloat16: 0.03, torch.float16: 0.006}
"""Largest relative L2 difference of logits between two attention kernels: eight times the rounding of a
value (2^-8, 2^-11)."""


def equal_text(check: Check) -> dict[str, Any]:
    """Fallback attention in float32: the text of each depth against full forwards of the plain model."""
    from specdepth.decoder.recorded_text import RecordedText
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.baselines.random_depth import RandomDepth

    scale, vocab = check.scale, 512
    options: dict[str, Any] = {
        "hidden": scale.small_hidden,
        "layers": 4,
        "vocab": vocab,
        "dtype": torch.float32,
        "device": check.device,
        "initializer_range": 0.1,
    }
    lengths = (5, 40, 17, 64, 3, 29)
    prompts = [random_prompts(1, n, vocab, check.seed + n)[0] for n in lengths]
    plain = random_llama(**options)
    expected = [_greedy(plain, prompt, scale.check_tokens) for prompt in prompts]
    recorded = [(p, text) for p, (text, _) in zip(prompts, expected, strict=True)]
    top = scale.max_num_speculative_tokens
    differences, near_ties, compared = 0, 0, 0
    schedulers: list[int | RandomDepth] = [*scale.check_depths, RandomDepth(check.seed)]
    for draft in ("prompt-lookup", RecordedText.factory(recorded, seed=check.seed)):
        decoder = SpeculativeDecoder.from_pretrained(
            random_llama(**options),
            draft,
            dtype=torch.float32,
            device=check.device,
            max_num_speculative_tokens=top,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            kv_cache_bytes=min(scale.kv_cache_bytes, 2**28),
        )
        for scheduler in schedulers:
            out = decoder.generate(prompts, scale.check_tokens, depth_scheduler=scheduler)
            for result, (text, gaps) in zip(out, expected, strict=True):
                compared += 1
                if result.token_ids == text:
                    continue
                pairs = zip(result.token_ids, text, strict=True)
                at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
                near_ties += gaps[at] < TIE
                differences += gaps[at] >= TIE
    if differences:
        raise AssertionError(
            f"{differences} of {compared} texts differ where no near tie explains it"
        )
    return {"texts": compared, "near_ties": near_ties, "differences": 0}


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], length: int) -> tuple[list[int], list[float]]:
    """Text by full forwards, and the gap between the two largest logits at each of its tokens."""
    tokens, gaps = list(prompt), []
    for _ in range(length):
        ids = torch.tensor([tokens], device=model.device)
        best = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], gaps


def varlen(check: Check) -> dict[str, Any]:
    """Logits of ragged passes: flash kernel against fallback, and both against float32."""
    from specdepth.decoder.loading import dtype_name
    from specdepth.decoder.models import PackedModel

    on_gpu = check.device.type == "cuda"
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        options: dict[str, Any] = {
            "hidden": check.scale.small_hidden,
            "layers": 4,
            "vocab": 512,
            "dtype": dtype,
            "device": check.device,
        }
        exact = random_llama(**options)
        torch.nn.Module.to(exact, dtype=torch.float32)
        reference = _ragged_logits(PackedModel(exact, backend="sdpa"), check.seed)
        rounded = PackedModel(random_llama(**options), backend="sdpa")
        fallback = _ragged_logits(rounded, check.seed)
        errors = {"fallback_to_float32": _relative(fallback, reference)}
        chosen = PackedModel(random_llama(**options))
        if on_gpu:
            if chosen.backend == "sdpa":
                raise AssertionError(f"{dtype}: no varlen kernel reproduces the model")
            flash = _ragged_logits(chosen, check.seed)
            errors["varlen_to_float32"] = _relative(flash, reference)
            errors["varlen_to_fallback"] = _relative(flash, fallback)
        name = dtype_name(dtype)
        found[name] = {"backend": chosen.backend, "relative_errors": errors}
        if not max(errors.values()) <= RELATIVE_ERROR[dtype]:
            raise AssertionError(f"{dtype}: relative errors of logits {errors}")
    if not on_gpu:
        found["note"] = "no CUDA device: the fallback alone was compared with float32"
    return found


@torch.inference_mode()
def _ragged_logits(packed: PackedModel, seed: int) -> torch.Tensor:
    """Logits of three passes over four sequences: prompts in chunks, then ragged rounds."""
    block_size, spans = 256, ((40, 300, 7, 129), (1, 9, 3, 1), (5, 1, 9, 2))
    packed.allocate(8, block_size)
    tables = np.arange(8, dtype=np.int32).reshape(4, 2)
    starts, rows = np.zeros(4, np.int64), []
    rng = np.random.default_rng(seed)
    for lengths in map(np.array, spans):
        ids = torch.from_numpy(rng.integers(0, packed.vocab_size, lengths.sum()))
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        )
        logits = packed.forward(
            ids.to(packed.device),
            torch.from_numpy(positions).to(packed.device),
            packed.layout(tables, starts, lengths),
            np.arange(lengths.sum()),
        )
        rows.append(logits.double().cpu())
        starts = starts + lengths
    return torch.cat(rows)


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
