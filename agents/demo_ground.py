"""What the demo trains on: a trace of the models, and a greedy rule over a fitted survival model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompt_lookup import LookupConfig
from specdepth.decoder.prompts import Prompt
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.decoder.trace_files import load_trace, shipped_traces
from specdepth.scheduler.baselines.survival_names import shipped_survival_for
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.survival_model import SurvivalCard, save_survival

from .default_rules import fitting_rules
from .recording import DecodedPrompts
from .replay_workloads import check_loads
from .results import collect_versions
from .session import find_prompts, fitting_prompts
from .survival_fit import SurvivalFitConfig, fit_survival, inputs_for
from .survival_rows import collect_rows, exploring_behaviours

if TYPE_CHECKING:
    from .demo import Options

TRACE_FILE, SURVIVAL_FOLDER = "trace.npz", "survival"
FIT_STEPS = 600
"""Gradient steps of a survival model for a short trace."""
DECODING_SHARE = 0.7
"""Of the time for a trace; replaying and fitting take the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """A trace and what was made from its training split."""

    trace: Trace
    trace_name: str
    """Of a shipped trace, or its file."""
    survival: str
    """Name or folder of the survival model."""
    rules: tuple[str, ...]
    """Names of greedy rules over it, for `make_scheduler`; training starts at the first."""

    def label(self, name: str) -> str:
        """A scheduler's name without the folder of a model that was fitted here."""
        return name.replace(self.survival, "fitted") if "/" in self.survival else name


def shipped_ground(decoder: SpeculativeDecoder) -> Ground | None:
    """The greedy trace and the rule that are shipped for these models; None if there are none."""
    for name in shipped_traces():
        trace = load_trace(name)
        info = trace.info
        survival = shipped_survival_for(info.model_pair, info.drafter)
        rules = fitting_rules(info)
        fits = info.model_pair == decoder.model_pair and info.temperature == 0
        fits &= decoder.config.max_num_speculative_tokens <= info.max_num_speculative_tokens
        if fits and survival is not None and rules:
            return Ground(trace=trace, trace_name=name, survival=survival, rules=rules)
    return None


def record_ground(
    decoder: SpeculativeDecoder,
    options: Options,
    cost: CostModel,
    folder: Path,
    seconds: float,
    progress: Callable[[float, str], None],
) -> Ground:
    """Decode prompts of both halves for a while, and fit a survival model on the training half.

    Args:
        decoder: idle.
        options: of the demo.
        cost: prices of the machine.
        folder: gets the trace and the survival model.
        seconds: wall time, about; one batch is decoded at least.
        progress: told the share done and what is going on.

    Raises:
        ValueError: too few prompts for the loads, or nothing that the drafter proposes.
    """
    source = _source(decoder, options)
    deadline_s = time.monotonic() + DECODING_SHARE * seconds
    parts: list[Trace] = []

    def report(num_in_part: int) -> None:
        done = len(parts) * source.chunk_size + num_in_part
        progress(DECODING_SHARE * done / source.num_requests, f"{done} requests")

    for part, _ in source.record(0, report):
        parts.append(part)
        if time.monotonic() > deadline_s:
            break
    trace = Trace.concatenate(parts)
    trace.save(folder / TRACE_FILE)
    info, rows = trace.info, trace.rows("train")
    progress(DECODING_SHARE, "fitting survival")
    seen = collect_rows(
        trace, cost, rows, exploring_behaviours(options.seed, info.max_num_speculative_tokens)
    )
    settings = SurvivalFitConfig(num_steps=FIT_STEPS, seed=options.seed)
    fit = fit_survival(seen, inputs_for(info.drafter), settings)
    card = SurvivalCard(model_pair=info.model_pair, drafter=info.drafter)
    survival = str(save_survival(folder / SURVIVAL_FOLDER, fit.weights, card))
    return Ground(
        trace=trace,
        trace_name=str(folder / TRACE_FILE),
        survival=survival,
        rules=(f"greedy:{survival}",),
    )


def _source(decoder: SpeculativeDecoder, options: Options) -> DecodedPrompts:
    """Prompts of both halves in turn, so that each part of the recording has as many of either."""
    drafter = decoder.engine.runner.drafter
    lookup = LookupConfig()
    info = TraceInfo(
        model_pair=decoder.model_pair,
        drafter=drafter,
        max_num_speculative_tokens=decoder.config.max_num_speculative_tokens,
        reads_target=decoder.drafter_reads_target,
        lookup=asdict(lookup) if drafter == "prompt-lookup" else {},
        versions=collect_versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    halves: list[list[Prompt]] = []
    for split in ("train", "held-out"):
        prompts = find_prompts(options, split)
        halves.append(fitting_prompts(decoder, prompts, options.max_new_tokens))
        check_loads(sorted(set(options.loads)), len(halves[-1]))
    mixed = [prompt for prompt in chain(*zip_longest(*halves)) if prompt is not None]
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, seed=options.seed)
    return DecodedPrompts(decoder, mixed, sampling, info, lookup)
