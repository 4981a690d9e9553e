"""Workloads: which requests there are and when they come.

A workload is a value; it runs nothing. Whoever drives an engine asks it before each round how many
requests are due, on whatever clock the engine runs:

    released = finished = 0
    start_s = clock.now()
    while finished < workload.num_requests:
        now_s = clock.now() - start_s
        due = workload.arrivals(
            now_s=now_s, num_running=running, num_waiting=waiting, num_finished=finished
        )
        for request in workload.requests[released : released + due]:
            engine.add_request(request.prompt_token_ids, request.sampling)
        released += due
        if the engine has nothing to do:
            wait until workload.next_arrival_s(now_s, num_finished=finished)
        else:
            one round; finished += requests that ended, aborted ones included

Arrival times need a clock that runs while the engine is idle: the wall, or a virtual one that the
driver advances; not a thread's CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .arrivals import Arrivals, ClosedLoop, OpenLoop, Phase
from .config import SamplingParams
from .prompts import Prompt, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Arrivals",
    "ClosedLoop",
    "OpenLoop",
    "Phase",
    "Workload",
    "WorkloadRequest",
    "make_requests",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request of a workload."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kind: str = ""
    """Kind of the prompt, for reports by kind."""
    recording: int | None = None
    """Row of the trace that a `ReplayRunner` replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and when they come."""

    requests: tuple[WorkloadRequest, ...]
    """In order of arrival."""
    process: Arrivals
    """When they come."""

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a workload needs at least one request.")
        self.process.check(len(self.requests))

    @property
    def num_requests(self) -> int:
        """Requests in all."""
        return len(self.requests)

    def arrivals(
        self, *, now_s: float, num_running: int, num_waiting: int, num_finished: int
    ) -> int:
        """Return how many requests to release now: the next so many of `requests`.

        Args:
            now_s: seconds since the workload's start.
            num_running: requests in the engine that decode or prefill.
            num_waiting: requests in the engine that are not admitted, or preempted.
            num_finished: requests that are done, aborted ones included.
        """
        due = self.process.due(
            now_s=now_s,
            num_running=num_running,
            num_waiting=num_waiting,
            num_finished=num_finished,
        )
        return min(due, self.num_requests - num_running - num_waiting - num_finished)

    def next_arrival_s(
        self, now_s: float, *, num_finished: int, num_running: int = 0, num_waiting: int = 0
    ) -> float | None:
        """Return until when an idle engine has to wait, in seconds since the start.

        At that time `arrivals` should be asked again; it may still be 0 (a pause may follow a pause).
        None: nothing comes by waiting, since all requests are released or they come as others finish.
        """
        released = num_finished + num_running + num_waiting
        if released >= self.num_requests:
            return None
        return self.process.next_s(now_s, released)


def make_requests(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams | None = None,
) -> tuple[WorkloadRequest, ...]:
    """Render prompts into requests.

    Args:
        prompts: in order of arrival.
        tokenizer: of the target.
        sampling: for all of them; greedy by default. Each request gets its own seed, which is this
            one's (0 if None) plus the request's index.
    """
    sampling = sampling or SamplingParams()
    seed = sampling.seed or 0
    return tuple(
        WorkloadRequest(
            prompt_token_ids=tuple(render(tokenizer, prompt)),
            sampling=replace(sampling, seed=seed + i),
            kind=prompt.kind,
        )
        for i, prompt in enumerate(prompts)
    )
