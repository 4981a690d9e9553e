"""Speed against transformers' `generate`: the 16 mixed prompts, 96 new tokens each, prefill included.

Both sides decode greedily, on one thread, the same prompts to the same length: end tokens are ignored
by both, so the work is equal. Runs alternate, batch by batch or prompt by prompt. Speed is generated
tokens over CPU seconds; ratios are of total times, since each token counts the same.

Keys: `batch8`, our depth 0 at batch 8 over `generate` at batch 8, left-padded; `batch1_lookup`, our prompt
lookup at batch 1 and its best fixed depth (found on other prompts: `best_depth`) over `generate` with
`prompt_lookup_num_tokens=4`; `ratio`, the smaller of both; `equal_text_*`, the share of tokens before the
first difference, which bf16 rounding makes at near ties. To see a machine without AMX, set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16; the line says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import Pairs, Printer, Timing, abba, bounds, parse, result_line, timed
from _workload import load_decoder, load_plain, mixed_prompts, train_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

NUM_PROMPTS = 16
BATCH = 8
LOOKUP_TOKENS = 4
DEPTHS = (2, 3, 4, 5, 6, 8)

Text = list[list[int]]
Run = Callable[[list[list[int]]], Text]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_prompts = arguments.prompts or NUM_PROMPTS
    repeats = 1 if arguments.quick else 2
    decoder = load_decoder(arguments.target, max_num_seqs=BATCH)
    plain = load_plain(arguments.target)
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
    depth = _best_depth(printer, decoder, arguments)
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
    values["best_depth"] = depth
    printer.table(
        ("", "tok/s", "transformers", "ratio (CPU)", "95 %", "(wall)", "equal text"), rows
    )
    printer.result(result_line("versus_transformers", arguments, len(lookup.pairs), values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=None, help="only the first so many")
    parser.add_argument("--depth", type=int, default=None, help="do not search for the best depth")


def ours(decoder: SpeculativeDecoder, size: int, depth: int) -> Run:
    """Decode a batch with this package at a fixed depth."""
    from specdepth.decoder.config import SamplingParams

    sampling = SamplingParams(max_new_tokens=size, ignore_eos=True)

    def run(batch: list[list[int]]) -> Text:
        results = decoder.generate(batch, sampling=sampling, depth_scheduler=depth)
        return [result.token_ids for result in results]

    return run


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


class Comparison:
    """Two ways to decode the same batches, run in alternation.

    Args:
        ours: decodes a batch.
        theirs: decodes a batch.
        batches: each is decoded once by either side.
        seed: of the interval.
        their_cpu_s: tells what their last batch took where it ran in another process.
    """

    def __init__(
        self,
        ours: Run,
        theirs: Run,
        batches: list[list[list[int]]],
        seed: int,
        their_cpu_s: Callable[[], float] | None = None,
    ) -> None:
        timings, equal = [], []
        for side in (ours, theirs):
            side(batches[0][:1])
        self.num_tokens = 0
        for batch, we_first in zip(batches, abba(len(batches)), strict=True):
            sides = (ours, theirs) if we_first else (theirs, ours)
            done = [_timed_text(side, batch) for side in sides]
            (our_time, our_text), (their_time, their_text) = done if we_first else done[::-1]
            if list(map(len, our_text)) != list(map(len, their_text)):
                raise RuntimeError("The two sides generated different numbers of tokens.")
            if their_cpu_s is not None:
                their_time = replace(their_time, cpu_s=their_cpu_s())
            timings.append((our_time, their_time))
            equal += [_equal_share(*texts) for texts in zip(our_text, their_text, strict=True)]
            self.num_tokens += sum(map(len, our_text))
        self.pairs = Pairs.of(timings)
        self.equal_text = float(np.mean(equal))
        self._seed = seed

    @property
    def our_tok_s(self) -> float:
        """Generated tokens over CPU seconds."""
        return self.num_tokens / float(self.pairs.a_cpu_s.sum())

    @property
    def their_tok_s(self) -> float:
        """The same for the other side."""
        return self.num_tokens / float(self.pairs.b_cpu_s.sum())

    @property
    def speedup(self) -> float:
        """Our tokens a second over theirs."""
        return self.our_tok_s / self.their_tok_s

    @property
    def wall_speedup(self) -> float:
        """The same in wall time."""
        return float(self.pairs.b_wall_s.sum() / self.pairs.a_wall_s.sum())

    @property
    def bounds(self) -> list[float] | None:
        """Bootstrap interval of `speedup` over batches."""
        from specdepth.agents.intervals import paired_ratio

        return bounds(paired_ratio(self.pairs.b_cpu_s, self.pairs.a_cpu_s, self._seed))


def _timed_text(run: Run, batch: list[list[int]]) -> tuple[Timing, Text]:
    texts: list[Text] = []
    timing = timed(lambda: texts.append(run(batch)))
    return timing, texts[0]


def _equal_share(one: list[int], other: list[int]) -> float:
    same = [a == b for a, b in zip(one, other, strict=True)]
    return (same.index(False) if False in same else len(same)) / len(same)


def _best_depth(
    printer: Printer, decoder: SpeculativeDecoder, arguments: argparse.Namespace
) -> int:
    """The fixed depth that is fastest at batch 1 on training prompts."""
    if arguments.depth is not None:
        return int(arguments.depth)
    prompts = train_prompts(decoder, 6 if arguments.quick else 12, arguments.seed)
    size = min(arguments.new_tokens, 48)
    seconds = dict.fromkeys(DEPTHS, 0.0)
    for turn, prompt in enumerate(prompts):
        order = DEPTHS if turn % 2 == 0 else DEPTHS[::-1]
        for depth in order:
            run = ours(decoder, size, depth)
            seconds[depth] += timed(lambda run=run, prompt=prompt: run([prompt])).cpu_s  # type: ignore[misc]
    speeds = {depth: len(prompts) * size / seconds[depth] for depth in DEPTHS}
    printer.table(("fixed depth, batch 1", *map(str, DEPTHS)), [("tok/s", *speeds.values())])
    return max(speeds, key=lambda depth: speeds[depth])


if __name__ == "__main__":
    main()
