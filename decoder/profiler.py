"""Measures what passes cost on this machine, and writes it as a `CostModel`.

Passes go through the runner's own packed path (`PassTimer.time_pass`), so what is priced is what
rounds will pay, attention groups and CUDA graphs included.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import VerificationRule
from specdepth.scheduler.state import DrafterKind

from .roofline import ModelSize
from .runner import ModelRole

logger = logging.getLogger(__name__)

PASS_TOKENS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 49, 64, 65),
    *(96, 128, 192, 256, 384, 512),
)
"""Default grid of packed tokens; dense where kernels change (a 17th row is a second tile on AMX), up to the
default prefill budget."""
DRAFT_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CATCH_UP_TOKENS = (4, 16)
"""Tokens beyond one a sequence from which the price of catching up is fitted."""
CONTEXT_SEQUENCES = (1, 4, 16)
"""Batch sizes at which the price of context is measured."""
PROMPT_TOKENS = 256
"""Prefill passes are made up of prompts of about this length."""
CHUNK_TOKENS = (64, 256)
"""Prompt chunks at which the price of a prompt token's look at a key is measured."""
MIN_REPEATS, MAX_REPEATS = 3, 25
PROBE_EVERY = 6
"""Passes between two probes. A probe streams the output head through the caches, which a round never finds in
that state: with one before each pass, rounds of one sequence came out 6 % too dear (float32)."""
SAMPLED_SEQUENCES, SAMPLED_DEPTH, SAMPLED_REPEATS = 8, 3, 9
"""The verdict from which the price of a sampled row is measured."""


class PassTimer(Protocol):
    """Runs one pass over made-up sequences and times it. `TorchRunner` is one."""

    @property
    def drafter(self) -> DrafterKind:
        """What proposes tokens."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """S, sequences that fit into a pass."""
        ...

    @property
    def max_num_speculative_tokens(self) -> int:
        """K."""
        ...

    @property
    def max_pass_tokens(self) -> int:
        """Tokens that fit into a pass."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        ...

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that fit into the KV pool."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a KV block; no two sequences share one."""
        ...

    def time_pass(
        self,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        num_logit_rows: int,
        model: ModelRole = "target",
    ) -> float:
        """Return the seconds of one packed pass on the runner's clock, the device synchronised.

        Args:
            query_lengths: tokens that each sequence computes.
            context_lengths: keys that each sees, those tokens included.
            num_logit_rows: rows of the pass that go through the head.
            model: which of the two models runs.
        """
        ...

    def time_sampling(
        self, num_seqs: int, depth: int, rule: VerificationRule, model: ModelRole = "target"
    ) -> float:
        """Return the seconds of a verdict on sequences of `depth` drafts, or of a draft pass's draws.

        Args:
            num_seqs: sequences.
            depth: tokens that each has drafted.
            rule: "greedy" is that at temperature 0, the others sample.
            model: "target" for the verdict, "draft" for the draws.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Cell:
    """One pass shape to be timed."""

    model: ModelRole
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    num_logit_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)

    @property
    def num_pairs(self) -> int:
        return sum(q * c for q, c in zip(self.queries, self.contexts, strict=True))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Cells by what they measure."""

    verify: dict[int, _Cell]
    prefill: dict[int, _Cell]
    context: list[tuple[_Cell, _Cell]]
    """The same pass at short and at long context."""
    chunks: list[tuple[_Cell, _Cell]]
    """A prompt's first tokens, and as many after a long context."""
    draft: dict[int, _Cell]
    catch_up: list[tuple[_Cell, _Cell]]
    """The same sequences with one token each and with more."""

    def cells(self) -> list[_Cell]:
        """Each cell once, cheap ones first."""
        pairs = [cell for pair in (*self.context, *self.chunks, *self.catch_up) for cell in pair]
        every = [*self.verify.values(), *self.prefill.values(), *self.draft.values(), *pairs]
        return sorted(dict.fromkeys(every), key=lambda c: (c.num_tokens, sum(c.contexts)))


def profile(
    timer: PassTimer,
    *,
    name: str,
    device: str = "cpu",
    dtype: str = "float32",
    size: ModelSize | None = None,
    overhead_s: float = 0.0,
    tokens: Sequence[int] = PASS_TOKENS,
    contexts: tuple[int, int] = (128, 1024),
    time_budget_s: float = 50.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Measure a cost model.

    All pass shapes are timed in turn, in a new random order each sweep, so that a noisy moment hits
    no single size; a size's price is the median over sweeps. With a `probe` a few passes at a time are
    measured against the probes before and after them: a machine whose speed drifts gives the prices of
    one speed, that of the median probe. The first run of each shape is dropped. Staircases are kept: a
    pass of 8 tokens may cost more than one of 16. What physics makes non-negative is clipped at 0: the
    price of context and of catching up.

    A pass of n tokens is split over as many sequences as the middle of its widest (depth 0) and its
    deepest (depth K) form has, since `CostModel` prices tokens, whoever they belong to. As in real
    rounds, depths and contexts differ between its sequences: the CPU's attention takes them in groups of
    similar ones, and passes of equal sequences came out some 10 % cheaper than mixed ones.

    Args:
        timer: runs the passes.
        name: of the cost model: the target, and the drafter if it was measured.
        device: where it runs, for the record.
        dtype: of the weights, for the record.
        size: bytes and arithmetic of the target, for reports.
        overhead_s: fixed seconds of a round outside passes; see `round_overhead_s`.
        tokens: pass sizes to measure; those beyond `timer.max_pass_tokens` are left out.
        contexts: a short and a long context length in tokens; cut to what the timer can hold.
        time_budget_s: wall time to spend; large passes are given up if even `MIN_REPEATS` sweeps
            do not fit, so a slow model gets a shorter grid, which `CostModel` extends linearly.
        seed: of the order of passes, and of depths and contexts within them.
        progress: called with the share of the budget that is done, 0..1.
        probe: seconds of a fixed piece of work; see `SpeedProbe`.
        clock: wall time in seconds, for the budget only.

    Returns:
        The measured model, its `verify_s` with the price of the context taken out.

    Raises:
        ValueError: no pass size to measure, or times that `CostModel` refuses (too noisy).
    """
    if not time_budget_s > 0:
        raise ValueError(f"time_budget_s must be above 0, got {time_budget_s}.")
    plan = _plan(timer, tokens, contexts, seed)
    report = progress or (lambda share: None)
    times, middle = _measure(timer, plan, time_budget_s, seed, report, probe, clock)
    measured = [n for n in sorted(plan.verify) if {plan.verify[n], plan.prefill[n]} <= times.keys()]
    context_s = _slope(times, plan.context, lambda cell: sum(cell.contexts))
    bare = {cell: seconds - context_s * sum(cell.contexts) for cell, seconds in times.items()}
    pair_s = _slope(bare, plan.chunks, lambda cell: cell.num_pairs)
    # What the few tokens of a decoding sequence look at is part of `verify_s`.
    bare |= {
        cell: bare[cell] - pair_s * cell.num_pairs
        for cell in {*plan.prefill.values()} & bare.keys()
    }
    prices = {}
    for kind, cells in (("verify", plan.verify), ("prefill", plan.prefill)):
        # Half of a pass at least is not attention, whatever a noisy fit says.
        prices[kind] = tuple(max(bare[cells[n]], times[cells[n]] / 2) for n in measured)
    draft = [s for s in sorted(plan.draft) if plan.draft[s] in times]
    report(1.0)
    return CostModel(
        name=name,
        device=device,
        dtype=dtype,
        measured=True,
        tokens=tuple(measured),
        verify_s=prices["verify"],
        prefill_s=prices["prefill"],
        context_s=context_s,
        prefill_pair_s=pair_s,
        draft_sequences=tuple(draft),
        draft_s=tuple(times[plan.draft[s]] for s in draft),
        draft_token_s=_slope(times, plan.catch_up, lambda cell: cell.num_tokens),
        **_sampling_prices(timer, probe or (lambda: 1.0), middle),
        overhead_s=overhead_s,
        weight_bytes=size.weight_bytes if size else None,
        kv_bytes_per_token=size.kv_bytes_per_token if size else None,
        flops_per_token=size.flops_per_token if size else None,
    )


def round_overhead_s(schedule_s: float, other_s: float, num_rounds: int) -> float:
    """Mean seconds of a round outside its passes, from `EngineMetrics` of real rounds."""
    return (schedule_s + other_s) / max(num_rounds, 1)


def _split(num_tokens: int, num_parts: int) -> tuple[int, ...]:
    """`num_tokens` over `num_parts` sequences as evenly as it goes."""
    each, more = divmod(num_tokens, num_parts)
    return (each + 1,) * more + (each,) * (num_parts - more)


def _ragged(num_tokens: int, num_parts: int, deepest: int, rng: np.random.Generator) -> list[int]:
    """`num_tokens` over `num_parts` sequences, 1 to `deepest` each, at random."""
    deepest = max(deepest, -(-num_tokens // num_parts))
    parts = rng.integers(1, deepest + 1, num_parts)
    while missing := num_tokens - int(parts.sum()):
        movable = np.flatnonzero(parts < deepest if missing > 0 else parts > 1)
        parts[rng.choice(movable)] += 1 if missing > 0 else -1
    return [int(part) for part in parts]


def _plan(timer: PassTimer, tokens: Sequence[int], contexts: tuple[int, int], seed: int) -> _Plan:
    sizes = sorted({int(n) for n in tokens if 1 <= n <= timer.max_pass_tokens} | {1})
    num_slots, deepest = timer.max_num_seqs, timer.max_num_speculative_tokens + 1
    rng = np.random.default_rng(seed)

    def room(num_sequences: int) -> int:
        blocks = timer.max_kv_tokens // timer.block_size // num_sequences
        return min(timer.max_model_len, blocks * timer.block_size)

    def cell(model: ModelRole, queries: tuple[int, ...], context: int, rows: int) -> _Cell:
        length = max(min(context, room(len(queries))), max(queries))
        return _Cell(model, queries, (length,) * len(queries), rows)

    def mixed_cell(num_tokens: int, num_sequences: int) -> _Cell:
        queries = _ragged(num_tokens, num_sequences, min(deepest, room(num_sequences)), rng)
        top = min(2 * contexts[0], room(num_sequences))
        lengths = rng.integers(min(contexts[0] // 2, top), top + 1, num_sequences)
        longest = np.maximum(lengths, queries)
        return _Cell("target", tuple(queries), tuple(longest.tolist()), num_tokens)

    def fits(queries: tuple[int, ...]) -> bool:
        return max(queries) <= room(len(queries)) and sum(queries) <= timer.max_pass_tokens

    verify, prefill = {}, {}
    for n in sizes:
        widest, narrowest = min(n, num_slots), min(math.ceil(n / deepest), num_slots)
        middle = (widest + narrowest + 1) // 2
        prompts = _split(n, min(-(-n // PROMPT_TOKENS), num_slots))
        if fits(_split(n, middle)) and fits(prompts):
            verify[n] = mixed_cell(n, middle)
            prefill[n] = cell("target", prompts, max(prompts), 1)
    if 1 not in verify:
        raise ValueError(
            f"nothing to profile: a pass of 1 token does not fit (max_pass_tokens "
            f"{timer.max_pass_tokens}, max_model_len {timer.max_model_len}, KV pool of "
            f"{timer.max_kv_tokens} tokens)."
        )
    batches = [s for s in CONTEXT_SEQUENCES if s <= num_slots and fits((1,) * s)]
    context = []
    for s in batches:
        long = cell("target", (1,) * s, contexts[1], s)
        # Where little room cuts the long context, the short one shrinks with it.
        short = min(contexts[0], long.contexts[0] // 4)
        context.append((cell("target", (1,) * s, short, s), long))
    chunks = []
    for n in CHUNK_TOKENS:
        first = cell("target", (n,), n, 1)
        later = cell("target", (n,), n + contexts[1], 1)
        if fits((n,)):
            chunks.append((first, later))
    draft: dict[int, _Cell] = {}
    catch_up: list[tuple[_Cell, _Cell]] = []
    if timer.drafter == "draft-model":
        slots = [s for s in {*DRAFT_SEQUENCES, num_slots} if s <= num_slots and fits((1,) * s)]
        draft = {s: cell("draft", (1,) * s, contexts[0], s) for s in slots}
        for s in batches:
            more = [(1 + c,) * s for c in CATCH_UP_TOKENS if fits((1 + c,) * s)]
            base = cell("draft", (1,) * s, contexts[0], s)
            catch_up += [(base, cell("draft", queries, contexts[0], s)) for queries in more]
    return _Plan(verify, prefill, context, chunks, draft, catch_up)


def _measure(
    timer: PassTimer,
    plan: _Plan,
    budget_s: float,
    seed: int,
    progress: Callable[[float], None],
    probe: Callable[[], float] | None,
    clock: Callable[[], float],
) -> tuple[dict[_Cell, float], float]:
    """Median seconds of each cell, and of the probe; large cells that do not fit the budget are absent."""
    start = clock()
    speed = probe or (lambda: 1.0)

    def once(cell: _Cell) -> float:
        seconds = timer.time_pass(cell.queries, cell.contexts, cell.num_logit_rows, cell.model)
        progress(min((clock() - start) / budget_s, 1.0))
        return seconds

    # The warm-up goes from small to large, and tells what a sweep will take in wall time.
    wall: dict[_Cell, float] = {}
    for cell in plan.cells():
        if clock() - start > budget_s / 4 and cell.num_tokens > 2:
            logger.warning(
                "profiling stopped at passes of %d tokens: time budget.", cell.num_tokens
            )
            break
        before = clock()
        once(cell)
        wall[cell] = clock() - before
    cells = list(wall)
    while (clock() - start) + MIN_REPEATS * sum(wall[c] for c in cells) > budget_s:
        largest = max(cell.num_tokens for cell in cells)
        if largest <= 2:
            break
        cells = [cell for cell in cells if cell.num_tokens < largest]
    samples: dict[_Cell, list[float]] = {cell: [] for cell in cells}
    probes = [speed()]
    rng = np.random.default_rng(seed)
    sweep_s = 0.0
    for repeat in range(MAX_REPEATS):
        before = clock()
        if repeat >= MIN_REPEATS and before - start + sweep_s > budget_s:
            break
        order = rng.permutation(len(cells)).tolist()
        for at in range(0, len(order), PROBE_EVERY):
            if probe is not None:
                once(cells[0])  # brings back what the probe pushed out of the caches
            taken = [(cells[i], once(cells[i])) for i in order[at : at + PROBE_EVERY]]
            probes.append(speed())
            for cell, seconds in taken:
                samples[cell].append(2 * seconds / (probes[-2] + probes[-1]))
        sweep_s = clock() - before
    logger.info("profiled %d pass shapes, %d repeats.", len(cells), len(samples[cells[0]]))
    middle = float(np.median(probes))
    return {cell: middle * float(np.median(each)) for cell, each in samples.items()}, middle


def _sampling_prices(
    timer: PassTimer, speed: Callable[[], float], probe_s: float
) -> dict[str, Any]:
    """Seconds a row or draw, of each rule, that sampling takes beyond greedy; keys of `CostModel`."""
    found = {}
    seqs = min(SAMPLED_SEQUENCES, timer.max_num_seqs)
    depth = min(SAMPLED_DEPTH, timer.max_num_speculative_tokens)
    parts: list[tuple[str, ModelRole, int]] = [("row_s", "target", seqs * (1 + depth))]
    if timer.drafter == "draft-model":
        parts.append(("draw_s", "draft", seqs))
    rules: tuple[VerificationRule, ...] = ("greedy", "rejection", "coupled")
    for name, model, count in parts:
        each: dict[str, list[float]] = {rule: [] for rule in rules}
        for repeat in range(1 + SAMPLED_REPEATS):
            for rule in rules:
                seconds = timer.time_sampling(seqs, depth, rule, model) / speed()
                if repeat:
                    each[rule].append(probe_s * seconds)
        greedy, *sampled = (float(np.median(each[rule])) for rule in rules)
        for rule, seconds in zip(rules[1:], sampled, strict=True):
            found[f"{rule}_{name}"] = max(seconds - greedy, 0.0) / count
    return found


def _slope(
    times: dict[_Cell, float],
    pairs: list[tuple[_Cell, _Cell]],
    extent: Callable[[_Cell], int],
) -> float:
    """Least-squares seconds a unit of `extent` between the cells of each pair; at least 0."""
    rise = run = 0.0
    for low, high in pairs:
        step = extent(high) - extent(low)
        if step > 0 and low in times and high in times:
            rise += step * (times[high] - times[low])
            run += step * step
    return max(rise / run, 0.0) if run else 0.0
