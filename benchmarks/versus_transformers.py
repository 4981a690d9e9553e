"""Speed against transformers' `generate`: the 16 mixed prompts, 96 new tokens each, prefill included.

Both sides decode greedily, on one thread, the same prompts to the same length: end tokens are ignored
by both, so the work is equal. Runs alternate, batch by batch or prompt by prompt. Speed is generated
tokens over CPU seconds; ratios are of total times, since each token counts the same.

Keys: `batch8`, our depth 0 at batch 8 over `generate` at batch 8, left-padded; `batch1_lookup`, our prompt
lookup at batch 1 and its best fixed depth (found on other prompts: `best_depth`) over `generate` with
`prompt_lookup_num_tokens=4`; `ratio`, the smaller of both; `equal_text_*`, the share of tokens before the
first difference, which bf16 rounding makes at near ties. On a CPU without instructions for bf16 transformers
emulate it; --transformers-dtype float32 is the fair opponent there. To see a machine without AMX, set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; the line says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from _comparison import Comparison, Run, Text, best_depth, ours
from _measure import Printer, parse, result_line
from _workload import load_decoder, load_plain, mixed_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_PROMPTS = 16
BATCH = 8
LOOKUP_TOKENS = 4
DEPTHS = (2, 3, 4, 5, 6, 8)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_prompts = arguments.prompts or NUM_PROMPTS
    repeats = 1 if arguments.quick else 2
    decoder = load_decoder(arguments.target, max_num_seqs=BATCH, dtype=arguments.dtype)
    their_dtype = arguments.transformers_dtype or arguments.dtype
    plain = load_plain(arguments.target, their_dtype)
    _never_end(plain)
    prompts = mixed_prompts(decoder, NUM_PROMPTS, arguments.seed)[:num_prompts]
    printer.line(
        f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, {arguments.new_tokens} new each."
    )
    size = arguments.new_tokens
    batches = [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)]
    batch8 = Comparison(
        ours(decoder, size, 0), generate(plain, size), batches * repeats, arguments.seed
    )
    depth = arguments.depth
    if depth is None:
        depth = best_depth(printer, decoder, DEPTHS, arguments)
    lookup = Comparison(
        ours(decoder, size, depth),
        generate(plain, size, prompt_lookup_num_tokens=LOOKUP_TOKENS),
        [[prompt] for prompt in prompts] * repeats,
        arguments.seed,
    )
    values: dict[str, Any] = {"ratio": round(min(batch8.speedup, lookup.speedup), 4)}
    rows = []
    for key, one in (("batch8", batch8), ("batch1_lookup", lookup)):
        values |= {
            key: round(one.speedup, 4),
            f"{key}_interval": one.bounds,
            f"{key}_wall": round(one.wall_speedup, 4),
            f"{key}_tok_s": round(one.our_tok_s, 2),
            f"{key}_transformers_tok_s": round(one.their_tok_s, 2),
            f"equal_text_{key}": round(one.equal_text, 4),
        }
        speeds = (one.our_tok_s, one.their_tok_s, one.speedup, one.bounds, one.wall_speedup)
        rows.append((key, *speeds, one.equal_text))
    values |= {"best_depth": depth, "transformers_dtype": their_dtype}
    printer.table(
        ("", "tok/s", "transformers", "ratio (CPU)", "95 %", "(wall)", "equal text"), rows
    )
    printer.result(result_line("versus_transformers", arguments, len(lookup.pairs), values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=None, help="only the first so many")
    parser.add_argument("--depth", type=int, default=None, help="do not search for the best depth")
    parser.add_argument(
        "--transformers-dtype",
        choices=["bfloat16", "float32"],
        help="number format of transformers, where it is faster in another than ours",
    )


def generate(plain: PreTrainedModel, size: int, **options: Any) -> Run:
    """Decode a batch with transformers, left-padded."""
    import torch

    def run(batch: list[list[int]]) -> Text:
        longest = max(map(len, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = plain.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=size,
                pad_token_id=0,
                **options,
            )
        texts: Text = out[:, longest:].tolist()
        return texts

    return run


def _never_end(plain: PreTrainedModel) -> None:
    """Let `generate` go on to its limit, as `ignore_eos` does on our side."""
    settings = plain.generation_config
    assert settings is not None
    settings.eos_token_id = None


if __name__ == "__main__":
    main()
