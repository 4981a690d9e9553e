"""What the benchmarks share: paired timing in A B B A order, medians with intervals, and the last line.

Shared machines are noisy in wall time and drift over minutes. So each script times the CPU of its one
thread, alternates what it compares, and reports the median of ratios of neighbours; wall time stands
beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

# Read when numpy, torch and tokenizers are loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specdepth.agents.intervals import Interval

VERSIONED = ("torch", "transformers", "numpy", "specdepth")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of one side, in seconds."""

    cpu_s: float
    """CPU time of the calling thread."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Pairs:
    """Neighbouring runs of two sides. Arrays float64 [n], seconds."""

    a_cpu_s: NDArray[np.float64]
    b_cpu_s: NDArray[np.float64]
    a_wall_s: NDArray[np.float64]
    b_wall_s: NDArray[np.float64]

    @classmethod
    def of(cls, timings: Iterable[tuple[Timing, Timing]]) -> Pairs:
        """Collect pairs (a, b)."""
        rows = [(a.cpu_s, b.cpu_s, a.wall_s, b.wall_s) for a, b in timings]
        columns = np.array(rows, np.float64).reshape(-1, 4).T
        return cls(columns[0], columns[1], columns[2], columns[3])

    @classmethod
    def joined(cls, parts: Sequence[Pairs]) -> Pairs:
        """All pairs of several measurements."""
        names = ("a_cpu_s", "b_cpu_s", "a_wall_s", "b_wall_s")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.a_cpu_s)

    def ratio(self, seed: int = 0) -> Interval:
        """Median of a / b in CPU time, with its bootstrap interval."""
        return median_ratio(self.a_cpu_s, self.b_cpu_s, seed)

    def wall_ratio(self, seed: int = 0) -> Interval:
        """The same in wall time."""
        return median_ratio(self.a_wall_s, self.b_wall_s, seed)


def median_ratio(
    a: NDArray[np.float64] | Sequence[float],
    b: NDArray[np.float64] | Sequence[float],
    seed: int = 0,
) -> Interval:
    """Median of the paired ratios a / b, with its bootstrap interval."""
    from specdepth.agents.intervals import paired_ratio

    return paired_ratio(a, b, seed, statistic="median")


def timed(run: Callable[[], object]) -> Timing:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    return Timing(time.thread_time() - cpu, time.perf_counter() - wall)


def abba(count: int) -> Iterable[bool]:
    """`count` pairs in the order A B, B A, A B, ...: yields whether A goes first."""
    return (pair % 2 == 0 for pair in range(count))


def alternate(a: Callable[[], T], b: Callable[[], T], count: int) -> list[tuple[T, T]]:
    """Run `count` pairs, A B B A A B B A ..., and return the results as (a, b).

    Drift that is linear in time cancels over two pairs.
    """
    pairs = []
    for a_first in abba(count):
        first = a() if a_first else b()
        second = b() if a_first else a()
        pairs.append((first, second) if a_first else (second, first))
    return pairs


def time_pairs(
    a: Callable[[], object], b: Callable[[], object], count: int, warm_up: int = 2
) -> Pairs:
    """Time `count` alternating pairs of calls; the first `warm_up` calls of each are dropped."""
    for _ in range(warm_up):
        a()
        b()
    return Pairs.of(alternate(lambda: timed(a), lambda: timed(b), count))


def parse(
    doc: str | None,
    argv: Sequence[str] | None,
    *,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    has_target: bool = True,
) -> argparse.Namespace:
    """Parse what all benchmarks take, and set this process to one thread, offline.

    Args:
        doc: the script's docstring; its first paragraph is the help text.
        argv: arguments; None takes the command line.
        options: adds the script's own.
        has_target: whether a model runs; replay needs none.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json-only", action="store_true", help="print the JSON line alone")
    if has_target:
        parser.add_argument(
            "--target", default="default", help='model folder, hub name or "default"'
        )
        parser.add_argument(
            "--dtype",
            default="bfloat16",
            choices=["bfloat16", "float32"],
            help="number format of the models",
        )
    if options is not None:
        options(parser)
    arguments = parser.parse_args(argv)
    _one_thread()
    return arguments


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    try:
        from transformers.utils import logging
    except ImportError:
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


class Printer:
    """Prints a table for people, unless only the JSON line is wanted."""

    def __init__(self, json_only: bool = False) -> None:
        self._silent = json_only

    def line(self, text: str = "") -> None:
        """Print a line."""
        if not self._silent:
            print(text, flush=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print columns: the first to the left, the others to the right; floats with 4 digits."""
        cells = [list(header), *([_cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            first, *others = zip(row, widths, strict=True)
            self.line("  ".join([first[0].ljust(first[1]), *(t.rjust(w) for t, w in others)]))

    def result(self, values: Mapping[str, Any]) -> None:
        """Print the closing JSON line."""
        print(json.dumps(values, allow_nan=False), flush=True)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bounds(interval: Interval) -> list[float] | None:
    """An interval for the JSON line; None where a single pair says nothing."""
    low, high = interval.bounds
    return None if low is None or high is None else [round(low, 4), round(high, 4)]


def result_line(
    benchmark: str, arguments: argparse.Namespace, n: int, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The closing line: what was measured, how often, with what, on what.

    Args:
        benchmark: name of the script.
        arguments: its command line.
        n: pairs behind the figure.
        values: "ratio", or the keys that the script documents.
    """
    return {
        "benchmark": benchmark,
        **values,
        "n": n,
        "seed": arguments.seed,
        "quick": arguments.quick,
        **_models(arguments),
        "machine": machine(),
        "versions": versions(),
    }


def _models(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which target ran and in what format; nothing where none did."""
    if not hasattr(arguments, "target"):
        return {}
    return {"target": Path(arguments.target).name, "dtype": arguments.dtype}


def machine() -> dict[str, Any]:
    """Processor, its matrix instructions, cores, and what limits oneDNN to fewer of them."""
    name, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": name,
        "instructions": [flag for flag in wanted if flag in flags],
        "max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "cores": os.cpu_count(),
        "threads": 1,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            module = sys.modules.get(package)
            found[package] = getattr(module, "__version__", "absent")
    return found
