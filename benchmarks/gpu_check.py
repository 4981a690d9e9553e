"""The whole package on one GPU, without weights and without a network, into one JSON file.

Run it by `gpu_check.sh`. Sections, each with its seconds: `equal_text`, the fallback attention in float32
against full forwards of the plain model; `varlen`, the flash kernel in bf16 and fp16 against the
fallback; `graphs`, passes from CUDA graphs against eager ones; `record`, a random Llama of a billion
parameters decodes; `knee`, its measured pass times; `depths`, fixed depths 0..8 at batches 1..64, with its
own text proposed back at the acceptance of prompt lookup on SmolLM2; `train`, a short training, export
and comparison with fixed depths. A section that a missing package or device rules out is skipped by
name; one that fails makes the exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _gpu_common import TINY, Check, Scale, Skip, free
from _gpu_correctness import equal_text, varlen
from _gpu_speed import depths, graphs, knee, record
from _gpu_train import train
from _measure import Printer, machine, versions

FORMAT = "specdepth-gpu-check"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    arguments = parser.parse_args(argv)
    if not arguments.tiny and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --tiny runs on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.tiny else "cuda")
    scale = TINY if arguments.tiny else Scale()
    if arguments.tiny:
        torch.set_num_threads(1)
    check = Check(
        scale=scale,
        device=device,
        out=arguments.out,
        deadline_s=time.perf_counter() + 60 * arguments.minutes,
        printer=Printer(),
        seed=arguments.seed,
        document={
            "format": FORMAT,
            "tiny": arguments.tiny,
            "seed": arguments.seed,
            "scale": asdict(scale),
            "device": device_facts(device),
            "versions": versions(),
            "sections": {},
        },
    )
    for section in (equal_text, varlen, graphs, record, knee, depths, train):
        _run(check, section)
    failed = [n for n, part in check.document["sections"].items() if part["status"] == "failed"]
    skipped = [n for n, part in check.document["sections"].items() if part["status"] == "skipped"]
    check.document["ok"] = not failed
    check.save()
    summary = {"ok": not failed, "failed": failed, "skipped": skipped, "file": str(check.out)}
    check.printer.result({"benchmark": "gpu_check", **summary, "seed": arguments.seed})
    return 1 if failed else 0


def device_facts(device: torch.device) -> dict[str, Any]:
    """What it runs on."""
    facts: dict[str, Any] = {"type": device.type, "host": machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts


def _run(check: Check, section: Callable[[Check], dict[str, Any]]) -> None:
    name = section.__name__
    check.printer.line(f"== {name}")
    start_s = time.perf_counter()
    part: dict[str, Any]
    try:
        if check.left_s <= 0:
            raise Skip("the time is over")
        part = {"status": "done"} | section(check)
    except Skip as reason:
        part = {"status": "skipped", "reason": str(reason)}
    except Exception as error:  # what failed is the result; the other sections are worth having
        traceback.print_exc()
        part = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    part["seconds"] = round(time.perf_counter() - start_s, 2)
    check.document["sections"][name] = part
    check.printer.line(f"{part['status']} in {part['seconds']} s {part.get('reason', '')}")
    check.save()
    free(check.device)


if __name__ == "__main__":
    sys.exit(main())
