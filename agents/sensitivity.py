"""How the depth that a scheduler chooses moves with one signal alone, over states that really occurred.

Rounds of a replay are recorded, and the scheduler is asked again with one signal of them changed: the number
of running sequences, their recent acceptance, or the free blocks of the KV pool. What follows from the
signal by definition changes with it; everything else stays as it was.

Legend: R running sequences, K deepest depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.workload import Workload
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import UNIT_DEPTH
from specdepth.scheduler.state import Ints, RoundOutcome, RoundState

Signal = Literal["batch size", "acceptance", "free KV"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
LEVELS: dict[Signal, tuple[float, ...]] = {
    "batch size": (1, 2, 4, 8, 16, 32),
    "acceptance": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "free KV": (0, 1, 2, 4, 8, 16, 36),
}
"""Where each signal is put by default: sequences; accepted over drafted; free tokens a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Mean depth by the level of one signal."""

    signal: Signal
    levels: tuple[float, ...]
    depths: tuple[float, ...]
    """Mean over sequences that had something on offer, no deeper than their `max_depths`."""
    num_states: int
    """Recorded rounds behind each mean."""

    @property
    def span(self) -> float:
        """Deepest less shallowest mean."""
        return max(self.depths) - min(self.depths)


def record_states(
    decoder: ReplayDecoder, workload: Workload, scheduler: DepthScheduler, num_states: int = 200
) -> list[RoundState]:
    """States of rounds under `scheduler` in which a sequence had something on offer, evenly spread.

    Args:
        decoder: idle.
        workload: to serve to its end.
        scheduler: decides meanwhile, and learns if it does.
        num_states: at most so many.

    Raises:
        ValueError: no round had anything on offer.
    """
    watching = _Watching(scheduler)
    serve(decoder.engine, workload, watching)
    states = watching.states
    if not states:
        raise ValueError(
            "no sequence of this workload had anything on offer; nothing can be varied."
        )
    at = np.unique(np.linspace(0, len(states) - 1, num_states).round().astype(np.int64))
    return [states[index] for index in at]


def sensitivity(
    scheduler: DepthScheduler,
    states: Sequence[RoundState],
    signal: Signal,
    levels: Sequence[float] | None = None,
) -> Sensitivity:
    """Ask `scheduler` for depths of `states` with one signal at each level.

    A scheduler that learns while it runs goes by what it knows; it is not told what came of these depths.

    Args:
        scheduler: fits the states' drafter and K.
        states: as from `record_states`.
        signal: what to vary.
        levels: where to put it; `LEVELS` by default.

    Raises:
        ValueError: no state, no level, an unknown signal, or a level out of its range.
    """
    if signal not in SIGNALS:
        raise ValueError(f"signal must be one of {', '.join(SIGNALS)}, got {signal!r}.")
    levels = LEVELS[signal] if levels is None else levels
    if not len(states) or not len(levels):
        raise ValueError(
            f"sensitivity needs states and levels, got {len(states)} and {len(levels)}."
        )
    changed = _CHANGES[signal]
    return Sensitivity(
        signal=signal,
        levels=tuple(float(level) for level in levels),
        depths=tuple(
            _mean_depth(scheduler, [changed(state, level) for state in states]) for level in levels
        ),
        num_states=len(states),
    )


def with_batch_size(state: RoundState, num_running: float) -> RoundState:
    """Some of the sequences, or each more than once, in a pool and an engine that change in proportion.

    Raises:
        ValueError: below 1.
    """
    count, size = int(num_running), state.num_running
    if count < 1:
        raise ValueError(f"a batch has at least 1 sequence, got {num_running}.")
    # From round to round other sequences begin, or the oldest would stand for all.
    rows = (state.round_index + np.arange(count)) % size
    arrays = {
        field.name: getattr(state, field.name)[rows]
        for field in fields(state)
        if isinstance(getattr(state, field.name), np.ndarray)
    }
    others = state.num_context_tokens - int(state.positions.sum())
    scale = count / size
    return replace(
        state,
        **arrays | {"slots": np.arange(count)},
        num_running=count,
        num_context_tokens=others + int(arrays["positions"].sum()),
        num_free_blocks=round(scale * state.num_free_blocks),
        num_blocks=max(round(scale * state.num_blocks), 1),
        num_waiting=round(scale * state.num_waiting),
        max_num_seqs=max(round(scale * state.max_num_seqs), count),
    )


def with_acceptance(state: RoundState, rate: float) -> RoundState:
    """Sequences of which so large a share of drafted tokens was accepted, recently and in the last round.

    Those that never drafted are left as they are: nothing is known about them.

    Raises:
        ValueError: outside 0..1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"acceptance must be in 0..1, got {rate}.")
    known = state.num_drafted_rounds > 0
    # Of the last round that drafted; where later ones did not, only what was accepted is left of it.
    last_depth = np.maximum(state.last_depth, state.last_accepted)
    accepted = np.rint(rate * last_depth).astype(np.int64)
    streak = np.where(accepted == last_depth, np.maximum(state.full_streak, 1), 0)
    return replace(
        state,
        acceptance_ema=np.where(known, rate, state.acceptance_ema),
        acceptance_ema_slow=np.where(known, rate, state.acceptance_ema_slow),
        num_accepted_tokens=np.rint(rate * state.num_drafted_tokens).astype(np.int64),
        last_accepted=np.where(known, accepted, state.last_accepted),
        full_streak=np.where(known, streak, state.full_streak),
    )


def with_free_kv(state: RoundState, tokens_per_sequence: float) -> RoundState:
    """A pool with as many blocks in use, and so many free tokens for each running sequence, in whole blocks.

    Raises:
        ValueError: below 0.
    """
    if tokens_per_sequence < 0:
        raise ValueError(f"free KV must be 0 tokens or more, got {tokens_per_sequence}.")
    used = state.num_blocks - state.num_free_blocks
    free = round(tokens_per_sequence * state.num_running / state.block_size)
    return replace(
        state,
        num_free_blocks=free,
        num_blocks=used + free,
        kv_used_fraction=used / max(used + free, 1),
    )


class MemoryBlind:
    """A scheduler that is shown a pool with room for four rounds in which everybody drafts K tokens.

    Args:
        scheduler: decides.
    """

    def __init__(self, scheduler: DepthScheduler) -> None:
        self._scheduler = scheduler
        for name in ("keep_drafting", "trim"):
            if (hook := getattr(scheduler, name, None)) is not None:
                setattr(self, name, _without_pressure(hook))
        self.choose = _without_pressure(scheduler.choose)

    def __getattr__(self, name: str) -> Any:
        # The optional parts of a scheduler are there if its own are: lawful_under, reset.
        if name == "_scheduler":  # not set yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def observe(self, outcome: RoundOutcome) -> None:
        """Pass it on."""
        self._scheduler.observe(outcome)


def _without_pressure(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a scheduler, shown a pool with room."""

    def run(state: RoundState, *others: Any) -> Any:
        room = 4.0 * (UNIT_DEPTH + 1) + state.block_size
        return method(with_free_kv(state, room), *others)

    return run


class _Watching:
    """A scheduler whose states are kept."""

    def __init__(self, scheduler: DepthScheduler) -> None:
        self._scheduler = scheduler
        self.states: list[RoundState] = []

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def choose(self, state: RoundState) -> Ints:
        if state.max_depths.any():
            self.states.append(state)
        return self._scheduler.choose(state)

    def observe(self, outcome: RoundOutcome) -> None:
        self._scheduler.observe(outcome)


_CHANGES: dict[Signal, Callable[[RoundState, float], RoundState]] = {
    "batch size": with_batch_size,
    "acceptance": with_acceptance,
    "free KV": with_free_kv,
}


def _mean_depth(scheduler: DepthScheduler, states: Sequence[RoundState]) -> float:
    total = count = 0
    for state in states:
        offered = state.max_depths > 0
        depths = np.minimum(scheduler.choose(state), state.max_depths)
        total += int(depths[offered].sum())
        count += int(offered.sum())
    return total / max(count, 1)
