"""What `specdepth advise` starts from: traces or a log, pass times, and estimators of survival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdepth.decoder.output_log import LogColumns
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace, shipped_traces
from specdepth.scheduler.baselines.survival_names import make_survival, shipped_survival_for
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost, shipped_costs

from . import record_command
from .advice_drafters import drafter_name
from .advice_search import Drafting
from .console import Console
from .evaluate_in_replay import DEFAULT_COST
from .recording import log_size

if TYPE_CHECKING:
    from .advise_command import Options

DEFAULT = "default"
NO_COMPARISON = "none"
TRACE_FILE = "trace.npz"
SHIPPED_PAIR = ("smollm2-eagle3-greedy", "cpu-smollm2-eagle3-bf16")
"""Trace and pass times of the shipped draft model, on the requests of the default trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafting:
    """A drafter, with the names that it was asked for by."""

    drafting: Drafting
    trace: str
    """File or shipped name; a log's trace is `TRACE_FILE` in the folder of the results."""
    survival: str | None
    """For `make_survival`; None: counts of the trace, which cannot be named."""


def load_drafters(options: Options, folder: Path, console: Console) -> dict[str, NamedDrafting]:
    """Load the drafter of the options and those to compare it with, by name; the former is first.

    Args:
        options: of the command.
        folder: of the results; a log's trace is written there.
        console: told about recording.

    Raises:
        ValueError: options that exclude each other, or files that cannot be used.
    """
    pairs = _pairs(options)
    cost = _cost(options)
    trace = _trace(options, folder, console)
    name = options.trace if options.from_outputs is None else TRACE_FILE
    loaded = [_named(options, name, trace, cost, options.survival)]
    for other, other_cost in pairs:
        loaded.append(_named(options, other, load_trace(other), load_cost(other_cost)))
    found: dict[str, NamedDrafting] = {}
    names = [drafter_name(one.drafting.trace.info) for one in loaded]
    for label, one in zip(names, loaded, strict=True):
        label = label if names.count(label) == 1 else f"{label} ({one.trace})"
        if label in found:
            raise ValueError(
                f"--compare: {label} is there twice; name traces of different drafters."
            )
        found[label] = one
    return found


def _named(
    options: Options, name: str, trace: Trace, cost: CostModel, survival: str | None = None
) -> NamedDrafting:
    info = trace.info
    survival = survival or shipped_survival_for(info.model_pair, info.drafter)
    estimator = None
    if survival is not None:
        estimator = make_survival(survival, drafter=info.drafter)
    drafting = Drafting(trace=trace, cost=cost, survival=estimator)
    return NamedDrafting(drafting=drafting, trace=name, survival=survival)


def _pairs(options: Options) -> Sequence[tuple[str, str]]:
    """Trace and cost of each drafter to compare with."""
    words = [word.strip() for text in options.compare for word in text.split(",") if word.strip()]
    if words == [NO_COMPARISON]:
        return ()
    pairs = [(trace, cost) for trace, _, cost in (word.rpartition("=") for word in words)]
    for word, (trace, cost) in zip(words, pairs, strict=True):
        if not trace or not cost:
            raise ValueError(
                f"--compare takes TRACE=COST, the trace of another drafter and its pass times, got "
                f"{word!r}."
            )
    asked = (options.trace, options.from_outputs, options.cost, options.cost_from)
    if not words and asked == (DEFAULT, None, None, None):
        shipped = SHIPPED_PAIR[0] in shipped_traces() and SHIPPED_PAIR[1] in shipped_costs()
        return (SHIPPED_PAIR,) if shipped else ()
    return pairs


def _cost(options: Options) -> CostModel:
    if options.cost_from is not None:
        if options.cost is not None:
            raise ValueError("--cost and --cost-from exclude each other; name one of them.")
        return CostModel.from_step_times(options.cost_from)
    if options.cost is not None:
        return load_cost(options.cost)
    shipped = options.from_outputs is None and options.trace in (DEFAULT, *shipped_traces())
    if not shipped:
        raise ValueError(
            "advice needs the pass times of the machine that serves these requests: --cost-from "
            "times.csv, or --cost with a file or a shipped name."
        )
    return load_cost(DEFAULT_COST)


def _trace(options: Options, folder: Path, console: Console) -> Trace:
    if options.from_outputs is None:
        return load_trace(options.trace)
    if options.trace != DEFAULT:
        raise ValueError("--trace and --from-outputs exclude each other; name one of them.")
    return _logged(options, options.from_outputs, folder, console)


def _logged(options: Options, log: Path, folder: Path, console: Console) -> Trace:
    """Record the log, as `specdepth record` does, into the folder."""
    columns = LogColumns(prompt=options.prompt_column, output=options.output_column)
    _, _, has_text = log_size(log, columns)
    if has_text and options.tokenizer is None:
        raise ValueError(
            f"output log {log} holds text; name the tokenizer of the model that answered with "
            "--tokenizer, or log token ids."
        )
    path = folder / TRACE_FILE
    record_options = record_command.Options(
        from_outputs=log,
        prompt_column=options.prompt_column,
        output_column=options.output_column,
        tokenizer=options.tokenizer,
        temperature=options.temperature,
        max_num_speculative_tokens=options.max_num_speculative_tokens
        or max(options.depths, default=1),
        seed=options.seed,
        threads=options.threads,
        out=path,
    )
    # What it prints is not this command's result.
    aside = Console(quiet=options.quiet, stdout=console.stderr, stderr=console.stderr)
    record_command.run(record_options, aside)
    return load_trace(path)
