"""Recorded requests, drawn at random kind by kind: a `PromptPool` for replay."""

from __future__ import annotations

import numpy as np

from specdepth.decoder.prompts import Split
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.workload import Workload, WorkloadRequest

from .workload_config import WorkloadConfig


class RecordingPool:
    """The requests of a split of a trace, each as long as it was recorded.

    Args:
        decoder: over the trace; serves for any other decoder over the same trace with as large a pool.
        split: requests to draw from; None for all.
        looping: whether texts that fell into verbatim repetition take part.

    Raises:
        ValueError: no such requests, or one that the decoder's KV pool cannot hold.
    """

    def __init__(
        self, decoder: ReplayDecoder, *, split: Split | None = "train", looping: bool = True
    ) -> None:
        trace = decoder.trace
        self._rows = trace.rows(split, looping=None if looping else False)
        if not len(self._rows):
            wanted = "requests" if looping else "requests that do not loop"
            raise ValueError(
                f"the trace has no {wanted} in its split {split!r}; record more, or choose others."
            )
        config = decoder.config
        assert config.block_size is not None
        assert config.num_kv_blocks is not None
        longest = int((trace.num_prompt + trace.max_new_tokens)[self._rows].max())
        needed = -(-longest // config.block_size)
        if needed > config.num_kv_blocks:
            raise ValueError(
                f"the longest request of the trace needs {needed} KV blocks of {config.block_size} "
                f"tokens, the pool has {config.num_kv_blocks}; raise num_kv_blocks."
            )
        self._decoder = decoder
        self._limit: int | None = None
        self._by_kind = self._requests()

    def workload(self, config: WorkloadConfig, rng: np.random.Generator) -> Workload:
        """Draw a workload.

        Args:
            config: how many requests and when they come; a `max_new_tokens` cuts texts shorter.
            rng: draws kinds, requests and arrivals.

        Raises:
            ValueError: a temperature or nucleus other than the recorded one.
        """
        info = self._decoder.trace.info
        asked = (config.temperature, config.top_p)
        if asked not in ((0.0, 1.0), (info.temperature, info.top_p)):
            raise ValueError(
                f"the trace was recorded at temperature {info.temperature} and top_p {info.top_p}, the "
                f"workload asks for {asked[0]} and {asked[1]}; leave both out, or record a trace so."
            )
        if config.max_new_tokens != self._limit:
            self._limit = config.max_new_tokens
            self._by_kind = self._requests()
        requests = []
        for _ in range(config.num_requests):
            of_kind = self._by_kind[int(rng.integers(len(self._by_kind)))]
            requests.append(of_kind[int(rng.integers(len(of_kind)))])
        process = config.process(len(requests), rng)
        return Workload(requests=tuple(requests), process=process)

    def _requests(self) -> list[list[WorkloadRequest]]:
        by_kind: dict[str, list[WorkloadRequest]] = {}
        for request in self._decoder.requests(self._rows, self._limit):
            by_kind.setdefault(request.kind, []).append(request)
        return list(by_kind.values())
