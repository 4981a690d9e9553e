"""Makes a comparison fit into a time: how many requests in a block, which prompts, how long answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdepth.decoder.workload import WorkloadRequest
from specdepth.scheduler.cost import CostModel

from .comparison import MIN_REQUESTS

FAIR_NEW_TOKENS = 32
"""Answers are cut to this before long prompts are left out."""
MIN_NEW_TOKENS = 16
"""Answers are not cut below this."""
STEP = 0.8
"""Share that is kept of answers or prompts at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What can be done in the time, or if nothing can, the least that makes sense."""

    requests: list[WorkloadRequest]
    sizes: dict[int, int]
    """Requests in a block, by load."""
    notes: list[str]
    """What was cut, for readers."""


def fit(
    requests: Sequence[WorkloadRequest],
    loads: Sequence[int],
    *,
    seconds: float,
    cost: CostModel,
    num_runs: int,
) -> Fit:
    """Choose blocks so that one of each load takes no more than `seconds`.

    A block has half as many requests again as run at once, so that slots are refilled in it, and
    enough for an interval. What does not fit is cut in this order: the half again, long answers, long
    prompts, all answers.

    Args:
        requests: in order; each block of a load takes the next of them.
        loads: concurrent requests.
        seconds: time for everything; may be infinite.
        cost: predicts it.
        num_runs: times that a block is served, once for each policy.
    """
    kept = list(requests)
    longest = _longest_answer(kept)
    sizes = {load: min(max(load + load // 2, MIN_REQUESTS), len(kept)) for load in loads}

    def fits() -> bool:
        return num_runs * sum(_block_s(cost, kept, load, n) for load, n in sizes.items()) <= seconds

    if not fits():
        sizes = {load: min(max(load, MIN_REQUESTS), len(kept)) for load in loads}
    for least in (FAIR_NEW_TOKENS, MIN_NEW_TOKENS):
        while not fits() and (limit := _longest_answer(kept)) > least:
            kept = [_at_most(request, max(int(limit * STEP), least)) for request in kept]
        if least == FAIR_NEW_TOKENS:
            while not fits() and len(kept) > max(sizes.values()):
                kept = _shortest(kept, max(int(len(kept) * STEP), *sizes.values()))
    notes = []
    if _longest_answer(kept) < longest:
        notes.append(
            f"Answers were cut to {_longest_answer(kept)} instead of {longest} tokens to keep the "
            "time."
        )
    if len(kept) < len(requests):
        limit = max(len(request.prompt_token_ids) for request in kept)
        notes.append(
            f"Prompts of more than {limit} tokens were left out to keep the time, which favours kinds "
            "of work that speculate less."
        )
    return Fit(requests=kept, sizes=sizes, notes=notes)


def _block_s(cost: CostModel, requests: list[WorkloadRequest], load: int, size: int) -> float:
    """Seconds of a block at a depth of 1 of which half is accepted; wide batches lose a little."""
    # The mean over all requests: later blocks have others than the first.
    share = size / len(requests)
    prompts = share * sum(len(request.prompt_token_ids) for request in requests)
    answers = share * sum(request.sampling.max_new_tokens for request in requests)
    prefill_s = prompts * cost.pass_s(256, 256) / 256
    return float(prefill_s + answers / load * (cost.pass_s(2 * load) + cost.overhead_s) / 1.5)


def _longest_answer(requests: list[WorkloadRequest]) -> int:
    return max(request.sampling.max_new_tokens for request in requests)


def _at_most(request: WorkloadRequest, limit: int) -> WorkloadRequest:
    if request.sampling.max_new_tokens <= limit:
        return request
    return replace(request, sampling=replace(request.sampling, max_new_tokens=limit))


def _shortest(requests: list[WorkloadRequest], count: int) -> list[WorkloadRequest]:
    """The `count` requests with the shortest prompts, in the order given."""
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
    return [requests[i] for i in sorted(by_length[:count])]
