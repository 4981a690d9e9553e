"""How far a cost model is off: predicted against measured time of live rounds of mixed shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdepth.scheduler.baselines import RandomDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.state import Bools, Floats, Ints

from .config import SamplingParams
from .engine import Engine

LOADS = (1, 2, 4, 8, 16, 32)
MEDIAN_BAR, P95_BAR = 0.05, 0.15
"""Errors that a cost model should stay below on a quiet machine."""
PROBE_EVERY = 8
"""Counted rounds between two probes; the round after a probe, which finds other things in the caches than its
own, does not count."""
BLOCK_ROUNDS = 16
"""Counted rounds at one load before the next one's turn, so that a drift of the machine meets all loads."""
FILL_ROUNDS = 200
"""Most rounds that are waited for until the sequences of a block all decode."""
NEW_TOKENS = 48
PROBE_REACH = 2
"""Rounds before and after whose probes count for a round."""
LONG_SHARE = 0.25
"""Of the requests: these get several prompts one after the other, for longer contexts."""


@dataclass(frozen=True, slots=True)
class CostError:
    """Rounds that were predicted and measured. Arrays [n]."""

    predicted_s: Floats
    measured_s: Floats
    num_running: Ints
    """Decoding sequences."""
    num_prefill_tokens: Ints
    probe_s: Floats | None = None
    """What a fixed piece of work took soon after each round; see `SpeedProbe`."""

    def __len__(self) -> int:
        return len(self.measured_s)

    @property
    def errors(self) -> Floats:
        """|predicted / measured - 1| of each round."""
        return np.abs(self.predicted_s / self.measured_s - 1)

    @property
    def median(self) -> float:
        """Of `errors`."""
        return float(np.median(self.errors))

    @property
    def p95(self) -> float:
        """95th percentile of `errors`."""
        return float(np.quantile(self.errors, 0.95))

    @property
    def bias(self) -> float:
        """Median of predicted / measured - 1; below 0 the model is too cheap."""
        return float(np.median(self.predicted_s / self.measured_s - 1))

    @property
    def is_within_bars(self) -> bool:
        """Whether both figures are within the bars."""
        return self.median <= MEDIAN_BAR and self.p95 <= P95_BAR

    def where(self, chosen: Bools) -> CostError:
        """The rounds that the mask `chosen` [n] picks."""
        return CostError(
            self.predicted_s[chosen],
            self.measured_s[chosen],
            self.num_running[chosen],
            self.num_prefill_tokens[chosen],
            None if self.probe_s is None else self.probe_s[chosen],
        )

    def at_speed(self, probe_s: float) -> CostError:
        """The same rounds as on a machine where the probe takes `probe_s` seconds.

        Each measured time is divided by the median of the probes of the rounds around it. What the
        cost model gets wrong stays; that the machine was faster or slower than during the profile
        goes. Without probes nothing changes.
        """
        if self.probe_s is None:
            return self
        reach = np.pad(self.probe_s, PROBE_REACH, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(reach, 2 * PROBE_REACH + 1)
        slowness = np.median(windows, axis=1) / probe_s
        return replace(self, measured_s=self.measured_s / slowness)


def measure_cost_error(
    engine: Engine,
    cost: CostModel,
    prompts: Sequence[Sequence[int]],
    *,
    seconds: float,
    loads: Sequence[int] = LOADS,
    seed: int = 0,
    repeats: int = 1,
    progress: Callable[[float], None] | None = None,
    probe: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostError:
    """Run live rounds of random depths at each load, prompts joining as others end, and compare.

    With `repeats` the same rounds run several times and count with their median time, which is what they
    would take on a quieter machine. Rounds that did not come out alike, where text depends on
    rounding, are left out.

    Args:
        engine: idle; it is left so, with its scheduler replaced.
        cost: what predicts.
        prompts: token lists that the profile did not see.
        seconds: wall time; each load gets one block of rounds at least.
        loads: concurrent requests; those beyond what the engine holds are left out.
        seed: of prompts and depths.
        repeats: times that each round is measured.
        progress: called with the share of the time that is over, 0..1.
        probe: called after every few rounds; its seconds go into the result.
        clock: wall time in seconds, for the budget only.

    Raises:
        ValueError: no prompt, or no repeats.
        RuntimeError: the engine is busy, or no round came out alike.
    """
    if not prompts:
        raise ValueError("the check of a cost model needs prompts; give some.")
    if engine.has_work:
        raise RuntimeError("The engine has requests of its own; step them to their end first.")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    chosen = [load for load in loads if load <= engine.config.max_num_seqs]
    report, time_probe = progress or (lambda share: None), probe or (lambda: math.nan)
    rows: list[_Row] = []
    start, num_sweeps = clock(), 0
    try:
        while not num_sweeps or clock() - start < seconds:
            sweeps: list[list[_Row]] = []
            for _ in range(repeats):
                rng = np.random.default_rng((seed, num_sweeps))
                engine.set_scheduler(RandomDepth(int(rng.integers(2**31))))
                sweeps.append([])
                # Upwards, so that the sequences of one load are part of the next.
                for load in sorted(chosen):
                    sweeps[-1] += _block(engine, cost, prompts, load, rng, time_probe)
                    report(min((clock() - start) / seconds, 1.0))
                engine.abort_all()
            rows += _medians(sweeps)
            num_sweeps += 1
    finally:
        engine.abort_all()
        engine.take_finished()
    if not rows:
        raise RuntimeError(f"No round came out alike in {repeats} repeats; measure each once.")
    columns = np.array(rows, np.float64).T
    return CostError(
        columns[0],
        columns[1],
        columns[2].astype(np.int64),
        columns[3].astype(np.int64),
        None if probe is None else columns[4],
    )


_Row = tuple[float, float, int, int, float]
"""Predicted and measured seconds, sequences, prefill tokens, probe."""


def _medians(sweeps: list[list[_Row]]) -> list[_Row]:
    """Rounds that all sweeps predict alike, with the medians of what was measured."""
    rows: list[_Row] = []
    for same in zip(*sweeps, strict=False):
        if len({row[0] for row in same}) == 1:
            predicted_s, _, size, prefill, _ = same[0]
            seconds, probes = (float(np.median([row[at] for row in same])) for at in (1, 4))
            rows.append((predicted_s, seconds, size, prefill, probes))
    return rows


def _block(
    engine: Engine,
    cost: CostModel,
    prompts: Sequence[Sequence[int]],
    load: int,
    rng: np.random.Generator,
    probe: Callable[[], float],
) -> list[_Row]:
    """Rounds at one load, once all decode."""
    rows: list[_Row] = []
    since_probe: list[tuple[float, float, int, int]] = []
    is_full = counts = False
    for number in range(FILL_ROUNDS + 2 * BLOCK_ROUNDS):
        while engine.num_running + engine.num_waiting < load:
            # Ends are spread out, so that prompts join rounds of others.
            new = int(rng.integers(NEW_TOKENS // 4, NEW_TOKENS + 1))
            sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
            engine.add_request(_prompt(engine, prompts, new, rng), sampling)
        outcome = engine.step()
        assert outcome is not None
        engine.take_finished()
        if counts:
            predicted_s, seconds = cost.outcome_s(outcome), outcome.elapsed_s
            size, prefill = len(outcome.slots), outcome.num_prefill_tokens
            since_probe.append((predicted_s, seconds, size, prefill))
        is_full = is_full or len(outcome.slots) == load or number >= FILL_ROUNDS
        counts = is_full
        if len(since_probe) == PROBE_EVERY:
            taken_s = sorted(probe() for _ in range(3))[1]  # a slow one would spoil eight rounds
            rows += [(*row, taken_s) for row in since_probe]
            since_probe, counts = [], False
        if len(rows) >= BLOCK_ROUNDS:
            break
    return rows


def _prompt(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, rng: np.random.Generator
) -> list[int]:
    count = int(rng.integers(2, 5)) if rng.random() < LONG_SHARE else 1
    joined = [t for index in rng.integers(0, len(prompts), count) for t in prompts[index]]
    pool_tokens = engine.pool.num_blocks * engine.pool.block_size
    room = min(engine.seqs.max_model_len, pool_tokens) - new_tokens
    return joined[: max(room, 1)]
