"""Workloads by name and number: what an environment draws a new one from for each episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompts import Prompt, load_prompts, render
from specdepth.decoder.workload import (
    Arrivals,
    ClosedLoop,
    OpenLoop,
    Phase,
    Workload,
    WorkloadRequest,
)

if TYPE_CHECKING:
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

ArrivalKind = Literal["constant", "varying", "poisson", "bursty"]
PromptLike = Prompt | str | Sequence[int]

MAX_NEW_TOKENS = 64
"""Tokens a request generates at most, unless the workload or its recording says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Requests of an episode and when they come."""

    arrivals: ArrivalKind = "varying"
    """Closed loops: "constant" or "varying" concurrency; open loops: "poisson" or "bursty"."""
    num_requests: int = 45
    """Requests an episode."""
    concurrency: int = 8
    """Requests kept in the engine under "constant"."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Under "varying": phases in random order, each about as long as a request takes. A concurrency of
    c gets c requests, and what a busier phase before it left in the engine."""
    rate: float = 1.0
    """Arrivals a second: under "poisson" always, under "bursty" in the quiet."""
    burst_rate: float = 4.0
    """Arrivals a second in a burst."""
    mean_quiet_s: float = 10.0
    """Mean seconds between bursts."""
    mean_burst_s: float = 5.0
    """Mean seconds of a burst."""
    max_new_tokens: int | None = None
    """Tokens a request generates at most; None: 64, or where texts are recorded, as many as they
    have."""
    temperature: float = 0.0
    """0 is greedy. Recorded texts have their own, and their own `top_p`."""
    top_p: float = 1.0
    """Nucleus of sampled requests, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.arrivals not in get_args(ArrivalKind):
            raise ValueError(
                f"arrivals must be one of {', '.join(get_args(ArrivalKind))}, got {self.arrivals!r}."
            )
        if self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.num_requests}.")
        if not self.concurrencies:
            raise ValueError("concurrencies must name at least one concurrency.")
        for concurrency in (self.concurrency, *self.concurrencies):
            if concurrency < 1:
                raise ValueError(f"a concurrency must be at least 1, got {concurrency}.")
        self.sampling()

    @property
    def is_open_loop(self) -> bool:
        """Whether arrivals follow the time and not the engine."""
        return self.arrivals in ("poisson", "bursty")

    @property
    def typical_load(self) -> int:
        """Running sequences to expect; 1 for open loops, where it depends on the machine."""
        if self.arrivals == "constant":
            return self.concurrency
        if self.arrivals == "varying":
            return max(round(sum(self.concurrencies) / len(self.concurrencies)), 1)
        return 1

    def sampling(self) -> SamplingParams:
        """How requests are sampled, without their seeds.

        Raises:
            ValueError: numbers out of range.
        """
        limit = MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_new_tokens=limit)

    def process(self, num_requests: int, rng: np.random.Generator) -> Arrivals:
        """Draw arrivals for `num_requests`."""
        if self.arrivals == "constant":
            return ClosedLoop.constant(self.concurrency)
        if self.arrivals == "varying":
            return self._varying(num_requests, rng)
        if self.arrivals == "poisson":
            return OpenLoop.poisson(num_requests, self.rate, rng)
        return OpenLoop.bursty(
            num_requests,
            quiet_rate=self.rate,
            burst_rate=self.burst_rate,
            mean_quiet_s=self.mean_quiet_s,
            mean_burst_s=self.mean_burst_s,
            rng=rng,
        )

    def _varying(self, num_requests: int, rng: np.random.Generator) -> ClosedLoop:
        # What is in flight when concurrency falls finishes in the phases that follow: without a share
        # for it, a phase of one sequence would be over before there is only one.
        order = rng.permutation(np.array(self.concurrencies, np.int64))
        before = np.concatenate([order[:1], order[:-1]])
        until = np.cumsum(np.maximum(order, before))
        phases = [
            Phase(concurrency=concurrency, until=end / int(until[-1]))
            for concurrency, end in zip(order.tolist(), until.tolist(), strict=True)
        ]
        return ClosedLoop(phases=tuple(phases), num_requests=num_requests)


class PromptPool:
    """Prompts as token lists, drawn at random kind by kind.

    Args:
        decoder: whose tokenizer renders them.
        prompts: texts, token lists or `Prompt`s; None takes the shipped training prompts.

    Raises:
        ValueError: no prompts, an empty one, texts without a tokenizer, or token ids outside the
            vocabulary.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, prompts: Sequence[PromptLike] | None = None
    ) -> None:
        if prompts is None:
            if decoder.tokenizer is None:
                raise ValueError(
                    "The model folder has no tokenizer, so prompts must be given as token lists."
                )
            prompts = load_prompts("train")
        if isinstance(prompts, str) or not len(prompts):
            raise ValueError("prompts must be a sequence with at least one prompt.")
        by_kind: dict[str, list[tuple[int, ...]]] = {}
        for prompt in prompts:
            kind = prompt.kind if isinstance(prompt, Prompt) else ""
            by_kind.setdefault(kind, []).append(tuple(self._tokens(decoder, prompt)))
        if not all(tokens for kind in by_kind.values() for tokens in kind):
            raise ValueError("prompts must not be empty; at least one token is needed.")
        self._by_kind = by_kind
        self._kinds = tuple(by_kind)

    @staticmethod
    def _tokens(decoder: SpeculativeDecoder, prompt: PromptLike) -> list[int]:
        if not isinstance(prompt, Prompt):
            return decoder.encode(prompt)
        if decoder.tokenizer is None:
            raise ValueError(
                "The model folder has no tokenizer, so prompts must be given as token lists."
            )
        return render(decoder.tokenizer, prompt)

    def workload(
        self,
        config: WorkloadConfig,
        rng: np.random.Generator,
        sampling: SamplingParams | None = None,
    ) -> Workload:
        """Draw a workload.

        Args:
            config: how many requests and when they come.
            rng: draws kinds, prompts, seeds and arrivals.
            sampling: instead of what `config` says; each request gets its own seed if it has none.
        """
        sampling = sampling or config.sampling()
        requests = []
        for _ in range(config.num_requests):
            kind = self._kinds[int(rng.integers(len(self._kinds)))]
            tokens = self._by_kind[kind]
            seed = int(rng.integers(2**31)) if sampling.seed is None else sampling.seed
            requests.append(
                WorkloadRequest(
                    prompt_token_ids=tokens[int(rng.integers(len(tokens)))],
                    sampling=replace(sampling, seed=seed),
                    kind=kind,
                )
            )
        process = config.process(len(requests), rng)
        return Workload(requests=tuple(requests), process=process)
