"""Sections of `gpu_check.py` that time the large model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from _gpu_common import Check, Skip, free, random_prompts
from _random_llama import walk, walking_llama

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder


PROFILE_ATTEMPTS = 3


def _make(check: Check, draft: Any, **options: Any) -> SpeculativeDecoder:
    """A decoder over the large model."""
    from specdepth.decoder.clock import ThreadClock, WallClock
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

    scale = check.scale
    return SpeculativeDecoder.from_pretrained(
        check.model,
        draft,
        dtype=check.dtype,
        device=check.device,
        max_num_speculative_tokens=scale.max_num_speculative_tokens,
        max_num_seqs=max(scale.batches),
        max_model_len=2048 if check.device.type == "cuda" else 256,
        kv_cache_bytes=scale.kv_cache_bytes,
        clock=WallClock() if check.device.type == "cuda" else ThreadClock(),
        **options,
    )


def graphs(check: Check) -> dict[str, Any]:
    """Seconds of the same passes, replayed from CUDA graphs and launched one by one."""
    scale = check.scale
    check.model, follows = walking_llama(
        hidden=scale.hidden,
        layers=scale.layers,
        vocab=scale.vocab,
        dtype=check.dtype,
        device=check.device,
        seed=check.seed,
    )
    prompts = random_prompts(
        scale.num_train_prompts + scale.num_held_out_prompts,
        scale.prompt_tokens,
        scale.vocab,
        check.seed,
    )
    check.texts = [(prompt, walk(follows, prompt, scale.new_tokens)) for prompt in prompts]
    sizes = [n for n in scale.pass_tokens if n <= 512]
    times: dict[str, list[float]] = {}
    in_use = False
    modes = {"eager": False, "graphs": True} if check.device.type == "cuda" else {"eager": False}
    for name, use_graphs in modes.items():
        decoder = _make(check, "none", cuda_graphs=use_graphs)
        times[name] = [_pass_s(decoder, size, max(scale.batches)) for size in sizes]
        in_use = getattr(decoder.target, "_graphs", None) is not None
        del decoder
        free(check.device)
    rows = [(str(n), *(1e3 * times[mode][i] for mode in modes)) for i, n in enumerate(sizes)]
    check.printer.table(("tokens", *(f"{mode} ms" for mode in modes)), rows)
    result: dict[str, Any] = {"in_use": in_use, "tokens": sizes} | {
        f"{mode}_s": t for mode, t in times.items()
    }
    if "graphs" in times:
        result["speedup"] = [e / g for e, g in zip(times["eager"], times["graphs"], strict=True)]
    return result


def _pass_s(decoder: SpeculativeDecoder, num_tokens: int, max_num_seqs: int) -> float:
    """Median seconds of a pass of so many tokens over as many sequences as there can be."""
    num_seqs = min(num_tokens, max_num_seqs)
    queries = [len(part) for part in np.array_split(np.arange(num_tokens), num_seqs)]
    contexts = [128 + query for query in queries]
    runs = [decoder.runner.time_pass(queries, contexts, num_tokens) for _ in range(13)]
    return float(np.median(runs[3:]))


def record(check: Check) -> dict[str, Any]:
    """Decode all prompts at depth 0; the text is known beforehand, whatever the kernels."""
    if check.model is None:
        raise Skip("there is no large model")
    from specdepth.decoder.recorded_text import RecordedText

    decoder = _make(check, "none")
    prompts = [prompt for prompt, _ in check.texts]
    decoder.generate(prompts[:2], 4, depth_scheduler=0)
    out = decoder.generate(prompts, check.scale.new_tokens, depth_scheduler=0)
    wrong = sum(r.token_ids != text for r, (_, text) in zip(out, check.texts, strict=True))
    if wrong:
        raise AssertionError(f"{wrong} of {len(prompts)} texts are not what the model must say")
    del decoder
    free(check.device)
    check.decoder = _make(check, RecordedText.factory(check.texts, seed=check.seed))
    return {
        "parameters": sum(p.numel() for p in check.model.parameters()),
        "texts": len(prompts),
        "throughput_tok_s": out.metrics.throughput_tok_s,
        "time_shares": out.metrics.time_shares,
    }


def knee(check: Check) -> dict[str, Any]:
    """Measured pass times, which tell schedulers the price of depth."""
    decoder = check.need_decoder()
    from specdepth.decoder.profiler import profile

    for attempt in range(PROFILE_ATTEMPTS):
        try:
            cost = profile(
                decoder.runner,
                name="random-llama",
                device=str(check.document["device"].get("name", check.device.type)),
                dtype=check.scale.dtype,
                size=decoder.target.size,
                tokens=check.scale.pass_tokens,
                time_budget_s=min(check.scale.profile_s, max(check.left_s, 1.0)),
                seed=check.seed + attempt,
            )
            break
        except ValueError as noisy:  # times that no machine has
            if attempt == PROFILE_ATTEMPTS - 1:
                raise
            check.printer.line(f"measuring again: {noisy}")
    decoder.engine.cost = cost
    check.printer.table(
        ("tokens", "pass ms"),
        [(str(n), 1e3 * s) for n, s in zip(cost.tokens, cost.verify_s, strict=True)],
    )
    result = {"knee_tokens": cost.knee_tokens(), "free_tokens": cost.free_tokens()}
    check.printer.line(f"{result}")
    return result | {"cost_model": cost.to_dict()}


def depths(check: Check) -> dict[str, Any]:
    """Throughput of each fixed depth at each batch size; every text is compared."""
    decoder = check.need_decoder()
    scale = check.scale
    every = range(scale.max_num_speculative_tokens + 1)
    rates: dict[tuple[int, int], list[float]] = {}
    lengths: dict[int, float] = {}
    wrong = repeats = 0
    for repeat in range(scale.repeats):
        if repeat >= 2 and check.left_s < 60 * (scale.train_minutes + scale.evaluate_minutes):
            break
        for batch in scale.batches:
            chosen = check.texts[:batch]
            for depth in every if repeat % 2 == 0 else reversed(every):
                out = decoder.generate(
                    [prompt for prompt, _ in chosen], scale.new_tokens, depth_scheduler=depth
                )
                wrong += sum(r.token_ids != text for r, (_, text) in zip(out, chosen, strict=True))
                lengths[depth] = out.metrics.acceptance_length  # of the largest batch
                if repeat:
                    rates.setdefault((batch, depth), []).append(out.metrics.throughput_tok_s)
        repeats += 1
    rows = [
        {"batch": batch, "depth": depth, "throughput_tok_s": float(np.mean(found))}
        for (batch, depth), found in rates.items()
    ]
    rows.sort(key=lambda row: (row["batch"], row["depth"]))
    best = {}
    for batch in scale.batches:
        speeds = [r["throughput_tok_s"] for r in rows if r["batch"] == batch]
        best[batch] = {
            "depth": int(np.argmax(speeds)),
            "speedup_over_off": max(speeds) / speeds[0],
            "deepest_over_off": speeds[-1] / speeds[0],
        }
    check.printer.table(
        ("batch", "best depth", "over off", f"depth {every[-1]} over off"),
        [(str(batch), *one.values()) for batch, one in best.items()],
    )
    if wrong:
        raise AssertionError(f"{wrong} texts depend on the depth")
    return {
        "rows": rows,
        "best": best,
        "acceptance_length": lengths,
        "repeats": repeats - 1,
        "different_texts": 0,
    }
