"""The demo's live comparison, and what replay says of the very same requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specdepth.decoder.config import EngineConfig, SamplingParams
from specdepth.decoder.metrics import EngineMetrics
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.workload import ClosedLoop, Workload, WorkloadRequest
from specdepth.scheduler.state import Ints

from .comparison import OFF, Comparison, LoadRuns
from .demo_ground import Ground
from .evaluate import evaluate
from .fitting import fit
from .results import ResultRow
from .session import find_prompts, fitting_prompts, make_policies, make_prompt_requests

if TYPE_CHECKING:
    from .demo import Options

NUM_BLOCKS = 3
"""Blocks of each load that there should be time for: more turns, less noise."""
SAME_WORK = 0.02
"""Share by which tokens may differ between live and replay: near ties in low precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveComparison:
    """What was measured, and what replay says of it."""

    found: Comparison
    replayed: Mapping[int, LoadRuns]
    """The same blocks in replay, by load; loads where it served other work are left out."""

    def rows(self) -> list[ResultRow]:
        """Replay's speedups as rows."""
        return [
            ResultRow(
                policy=name,
                load=load,
                metric="speedup_replayed",
                value=runs.ratio(name, OFF).value,
                unit="x",
            )
            for load, runs in self.replayed.items()
            for name in runs.policies
        ]


def compare_live(
    decoder: SpeculativeDecoder,
    options: Options,
    ground: Ground,
    names: Mapping[str, str],
    seconds: float,
    progress: Callable[[float, str], None],
) -> LiveComparison:
    """Decode held-out prompts of the trace under each policy in turn, then replay what was decoded.

    Args:
        decoder: idle, its prices measured.
        options: of the demo.
        ground: its trace holds the prompts' answers.
        names: schedulers by their label, "off" among them.
        seconds: wall time of decoding.
        progress: told the share done and what is going on.
    """
    loads = sorted(set(options.loads))
    places = {id_: row for row, id_ in enumerate(ground.trace.ids)}
    prompts = [one for one in find_prompts(options, "held-out") if one.id in places]
    prompts = fitting_prompts(decoder, prompts, options.max_new_tokens)
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens, seed=options.seed)
    requests = make_prompt_requests(decoder, prompts, sampling)
    rows = {
        request.prompt_token_ids: places[prompt.id]
        for request, prompt in zip(requests, prompts, strict=True)
    }
    policies = make_policies(decoder, list(names.values()))
    chosen = fit(
        requests,
        loads,
        seconds=seconds / NUM_BLOCKS,
        cost=decoder.engine.cost,
        num_runs=len(names),
    )
    found = evaluate(
        decoder,
        {label: policies[name] for label, name in names.items()},
        chosen.requests,
        loads,
        minutes=seconds / 60,
        progress=progress,
    )
    found.notes += chosen.notes
    served_rows = np.array([rows[request.prompt_token_ids] for request in chosen.requests])
    replay = _Replay(decoder, ground, names, chosen.requests, served_rows)
    replayed = {
        load: runs
        for load in found.constant_loads
        if (runs := replay.like(found, load)) is not None
    }
    return LiveComparison(found=found, replayed=replayed)


class _Replay:
    """Serves blocks of a live comparison again, in replay."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        ground: Ground,
        names: Mapping[str, str],
        requests: Sequence[WorkloadRequest],
        rows: Ints,
    ) -> None:
        config = EngineConfig(
            max_num_seqs=decoder.config.max_num_seqs,
            max_num_speculative_tokens=decoder.config.max_num_speculative_tokens,
        )
        self.decoder = ReplayDecoder(ground.trace, decoder.engine.cost, config)
        made = make_policies(decoder, list(names.values()))
        self.policies = {label: made[name] for label, name in names.items()}
        longest = max(request.sampling.max_new_tokens for request in requests)
        self.requests = self.decoder.requests(rows, longest)

    def like(self, found: Comparison, load: int) -> LoadRuns | None:
        """The blocks of `load` in replay; None if that was other work than was done live."""
        live = found.runs[load]
        # How `evaluate` cuts blocks where nothing has to be left out.
        (size,) = fit(
            self.requests, [load], seconds=math.inf, cost=self.decoder.engine.cost, num_runs=1
        ).sizes.values()
        blocks_a_pass = max(len(self.requests) // size, 1)
        runs = LoadRuns(tuple(self.policies))
        metrics = dict[str, EngineMetrics]()
        for number in range(live.num_blocks):
            repeat, place = divmod(number, blocks_a_pass)
            block = range(place * size, (place + 1) * size)
            workload = Workload(
                requests=tuple(self.requests[i] for i in block), process=ClosedLoop.constant(load)
            )
            served = {}
            for name, policy in self.policies.items():
                served[name] = serve(
                    self.decoder.engine, workload, policy, metrics=metrics.get(name)
                )
                metrics[name] = served[name].metrics
            runs.add(block, repeat, served)
        return runs if _same_work(live, runs) else None


def _same_work(live: LoadRuns, replayed: LoadRuns) -> bool:
    """Whether both served the same prompts to answers of the same length."""
    one, other = live.metrics[OFF], replayed.metrics[OFF]
    tokens = one.num_committed_tokens, other.num_committed_tokens
    return (
        one.num_prefill_tokens == other.num_prefill_tokens
        and abs(tokens[0] - tokens[1]) <= SAME_WORK * tokens[1]
    )
