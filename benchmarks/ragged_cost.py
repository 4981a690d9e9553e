"""Does the cost of a round follow the sum of depths? One sequence of eight at depth 8 against all eight.

Real rounds of the engine over eight sequences of some 150 tokens of context; proposals are always
wrong, so each round commits one token a sequence and contexts stay alike. Time is the round's
verification: pass and verdict.

Keys: `ratio`, one at depth 8 and seven at 0 (16 tokens) over all at depth 8 (72 tokens); `packing`, all
at depth 8 over one plain transformers forward of 72 tokens in one row; `floor`, the bare stack of
linear layers at 16 over 72 tokens, which no engine gets below. On a processor with AMX all are
measured a second time without it (`ratio_avx512`, ...), since its bf16 matrix unit makes passes of up to
a hundred tokens nearly flat in cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _measure import (
    Pairs,
    Printer,
    Timing,
    alternate,
    bounds,
    machine,
    parse,
    result_line,
    time_pairs,
    timed,
)
from _workload import MAX_NUM_SPECULATIVE_TOKENS, load_decoder, load_plain, round_at, start, windows

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

NUM_SEQS = 8
CONTEXT = 150
WITHOUT_AMX = "AVX512_CORE_BF16"
KEYS = ("ratio", "packing", "floor")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and end with the JSON line."""
    arguments = parse(__doc__, argv, options=_options)
    printer = Printer(arguments.json_only)
    num_pairs = 6 if arguments.quick else 40
    decoder = _decoder(arguments, num_pairs)
    sizes = _sizes()
    pairs = {
        "ratio": _ragged(decoder, num_pairs, arguments.seed),
        "packing": _packing(decoder, arguments, num_pairs),
        "floor": _floor(decoder, num_pairs),
    }
    values: dict[str, Any] = {}
    rows = []
    meaning = {
        "ratio": f"{sizes[0]} tokens (one deep) / {sizes[1]} (all deep)",
        "packing": f"all deep / plain forward of {sizes[1]}",
        "floor": f"linear layers alone, {sizes[0]} / {sizes[1]}",
    }
    for key, one in pairs.items():
        figure = one.ratio(arguments.seed)
        values |= {
            key: round(figure.value, 4),
            f"{key}_interval": bounds(figure),
            f"{key}_wall": round(one.wall_ratio(arguments.seed).value, 4),
        }
        rows.append((key, meaning[key], *_milliseconds(one), figure.value, values[f"{key}_wall"]))
    printer.table(("", "", "a ms", "b ms", "a / b (CPU)", "(wall)"), rows)
    _explain(printer, decoder, sizes)
    if not arguments.as_is and "amx_bf16" in machine()["instructions"]:
        values |= _without_amx(printer, arguments)
    printer.result(result_line("ragged_cost", arguments, num_pairs, values))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as-is", action="store_true", help="do not measure again without AMX instructions"
    )


def _sizes() -> tuple[int, int]:
    deep = MAX_NUM_SPECULATIVE_TOKENS
    return NUM_SEQS + deep, NUM_SEQS * (1 + deep)


def _decoder(arguments: argparse.Namespace, num_pairs: int) -> SpeculativeDecoder:
    """Eight sequences in the middle of their texts, proposals on offer that are always wrong."""
    from specdepth.decoder.recorded_text import LookupLaw, RecordedText

    num_rounds, seed = 6 * num_pairs + 64, arguments.seed
    decoder = load_decoder(arguments.target, "none", max_num_seqs=NUM_SEQS, dtype=arguments.dtype)
    # Half of the measured rounds lie before CONTEXT tokens, half behind.
    prompts = windows(decoder, NUM_SEQS, max(CONTEXT - 2 * num_pairs, 16), seed)
    rng = np.random.default_rng(seed)
    vocab_size = decoder.target.vocab_size
    recordings = [(prompt, rng.integers(0, vocab_size, num_rounds).tolist()) for prompt in prompts]
    drafter = RecordedText.factory(recordings, law=LookupLaw.constant(0.0), seed=seed)
    engine = decoder.engine
    decoder.runner.draft_source = drafter(engine.seqs, engine.pool, decoder.target)
    start(decoder.engine, prompts, num_rounds)
    return decoder


def _round(decoder: SpeculativeDecoder, depths: list[int]) -> Callable[[], Timing]:
    """A round at `depths`: CPU time of its verification, wall time of the whole."""

    def run() -> Timing:
        outcomes = []
        whole = timed(lambda: outcomes.append(round_at(decoder.engine, np.array(depths))))
        assert outcomes[0].num_drafted.tolist() == depths
        return Timing(outcomes[0].verify_s, whole.wall_s)

    return run


def _ragged(decoder: SpeculativeDecoder, num_pairs: int, seed: int) -> Pairs:
    deep = MAX_NUM_SPECULATIVE_TOKENS
    place = seed % NUM_SEQS
    one = _round(decoder, [deep if i == place else 0 for i in range(NUM_SEQS)])
    every = _round(decoder, [deep] * NUM_SEQS)
    for run in (one, every):
        run()
    return Pairs.of(alternate(one, every, num_pairs))


def _packing(decoder: SpeculativeDecoder, arguments: argparse.Namespace, num_pairs: int) -> Pairs:
    import torch

    plain = load_plain(arguments.target, arguments.dtype)
    _, size = _sizes()
    ids = torch.tensor(windows(decoder, 1, size, arguments.seed))

    @torch.inference_mode()
    def forward() -> None:
        plain(input_ids=ids, use_cache=False).logits.argmax(-1)

    every = _round(decoder, [MAX_NUM_SPECULATIVE_TOKENS] * NUM_SEQS)
    for run in (every, forward):
        run()
    return Pairs.of(alternate(every, lambda: timed(forward), num_pairs))


def _floor(decoder: SpeculativeDecoder, num_pairs: int) -> Pairs:
    """The model's linear layers alone, at the sizes of the two rounds."""
    import torch

    layers = linear_layers(decoder)

    def stack(size: int) -> Callable[[], None]:
        inputs = {n: torch.randn(size, n, dtype=decoder.target.dtype) for n, _ in layers}

        @torch.inference_mode()
        def run() -> None:
            for num_inputs, layer in layers:
                layer(inputs[num_inputs])

        return run

    return time_pairs(stack(_sizes()[0]), stack(_sizes()[1]), num_pairs)


def linear_layers(decoder: SpeculativeDecoder) -> list[tuple[int, Any]]:
    """The multiplications of a pass with their input widths, as the decoder runs them."""
    import torch

    from specdepth.decoder.prepack import JointPart, PackedLinear

    found: list[tuple[int, Any]] = []
    joints: set[int] = set()
    for module in decoder.target.model.modules():
        if isinstance(module, JointPart) and id(module._joint) not in joints:
            joints.add(id(module._joint))
            found.append((module.in_features, module._joint.packed))
        elif isinstance(module, PackedLinear | torch.nn.Linear):
            found.append((module.in_features, module))
    return found


def _milliseconds(pairs: Pairs) -> tuple[float, float]:
    return 1e3 * float(np.median(pairs.a_cpu_s)), 1e3 * float(np.median(pairs.b_cpu_s))


def _explain(printer: Printer, decoder: SpeculativeDecoder, sizes: tuple[int, int]) -> None:
    few, many = sizes
    gflop = decoder.target.size.flops_per_token / 1e9
    printer.line(
        f"Arithmetic: {few} tokens are {few * gflop:.3g} GFLOP and {many} are {many * gflop:.3g}, over the "
        f"same {decoder.target.size.weight_bytes / 1e6:.4g} MB of weights. Bound by arithmetic the ratio is "
        f"{few / many:.2f}, bound by streaming weights it is 1."
    )


def _without_amx(printer: Printer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this script again with oneDNN kept from AMX; its figures by key."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as-is", "--json-only"]
    command += ["--target", arguments.target, "--dtype", arguments.dtype]
    command += ["--seed", str(arguments.seed)]
    command += ["--quick"] if arguments.quick else []
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": WITHOUT_AMX}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    other = json.loads(run.stdout.splitlines()[-1])
    values = {f"{key}_avx512": other[key] for key in KEYS}
    values |= {f"{key}_avx512_interval": other[f"{key}_interval"] for key in KEYS}
    printer.line(
        f"This processor has AMX. Without it ({WITHOUT_AMX}): "
        + ", ".join(f"{key} {other[key]:.3f}" for key in KEYS)
        + "."
    )
    return values


if __name__ == "__main__":
    main()
