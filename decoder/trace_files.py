"""Traces by name: those that come with specdepth, and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specdepth.checkpoints import shipped_names, shipped_path
from specdepth.scheduler.state import DrafterKind

from .trace import Trace

DEFAULT_TRACE = "smollm2-prompt-lookup-greedy"
"""What the name "default" stands for."""
_SUFFIX = ".npz"


def shipped_traces() -> tuple[str, ...]:
    """Names of the traces that come with specdepth."""
    return shipped_names("traces", _SUFFIX)


def load_trace(name_or_path: str | os.PathLike[str]) -> Trace:
    """Load a trace.

    Args:
        name_or_path: file that `specdepth record` wrote, or the name of a shipped trace, or "default"
            (a file of that name wins).

    Raises:
        ValueError: neither such a file nor such a name; a damaged file, or one of another format.
    """
    path = Path(name_or_path)
    if path.is_file():
        return Trace.load(path)
    name = os.fspath(name_or_path)
    wanted, known = DEFAULT_TRACE if name == "default" else name, shipped_traces()
    if wanted not in known:
        raise ValueError(
            f"no trace {name!r}: expected a file that specdepth record wrote, or one of these names: "
            f"{', '.join(('default', *known))}."
        )
    with shipped_path("traces", wanted, _SUFFIX) as shipped:
        return Trace.load(shipped)


def load_traces(names: Sequence[str]) -> dict[str, Trace]:
    """Load several traces, by the names that tell them apart: of files without folder and suffix.

    Args:
        names: each as `load_trace` takes it.

    Raises:
        ValueError: two of the same name; and see `load_trace`.
    """
    short = [Path(name).stem if Path(name).suffix == _SUFFIX else name for name in names]
    if len(set(short)) < len(short):
        raise ValueError(f"traces are told apart by file name, got {', '.join(short)}.")
    return {one: load_trace(name) for one, name in zip(short, names, strict=True)}


def check_trace(
    trace: Trace,
    *,
    model_pair: str | None = None,
    drafter: DrafterKind | None = None,
    max_num_speculative_tokens: int | None = None,
    num_requests: int | None = None,
) -> None:
    """Refuse a trace that does not fit what it is to be used for; None asks for nothing.

    Args:
        trace: loaded.
        model_pair: names of target and drafter.
        drafter: what proposes.
        max_num_speculative_tokens: deepest depth needed.
        num_requests: requests needed, as by a load.

    Raises:
        ValueError: the first of them that does not fit.
    """
    info = trace.info
    if drafter is not None and info.drafter != drafter:
        raise ValueError(
            f"the trace was recorded with the drafter {info.drafter}, {drafter} is asked for; record "
            "one with it (specdepth record --draft)."
        )
    if model_pair is not None and info.model_pair != model_pair:
        raise ValueError(
            f"the trace is of {info.model_pair}, {model_pair} is asked for; record one of that pair "
            "(specdepth record --target --draft)."
        )
    top = info.max_num_speculative_tokens
    if max_num_speculative_tokens is not None and max_num_speculative_tokens > top:
        raise ValueError(
            f"max_num_speculative_tokens={max_num_speculative_tokens}, but the trace was recorded up "
            f"to {top}; lower it or record deeper."
        )
    if num_requests is not None and num_requests > trace.num_requests:
        raise ValueError(
            f"{num_requests} requests are asked for, the trace has {trace.num_requests}; lower the "
            "load or record more."
        )
