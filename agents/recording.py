"""What `specdepth record` goes through: prompts that a decoder answers, or logged outputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.output_log import LogColumns, LoggedOutput, read_output_log, to_texts
from specdepth.decoder.prompt_lookup import LookupConfig
from specdepth.decoder.prompts import Prompt, render
from specdepth.decoder.trace import Trace, TraceInfo
from specdepth.decoder.trace_text import TextToRecord, record_lookup

from .trace_parts import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdepth.decoder.speculative_decoder import SpeculativeDecoder

LOG_CHUNK = 500
"""Logged requests in a part."""

Progress = Callable[[int], None]
"""Called with the number of requests of the part that are done."""


class Source(Protocol):
    """Requests to record, in parts that are the same each time."""

    num_requests: int
    chunk_size: int
    """Requests in a part."""

    def record(self, skip: int, progress: Progress) -> Iterator[tuple[Trace, list[Row]]]:
        """Record part after part, without the first `skip` parts; with prompts and outputs."""
        ...


class DecodedPrompts:
    """Prompts that the decoder's target answers.

    Parts are of whole batches, each decoded by itself, so that a recording that was interrupted
    equals one that was not, in low precision too.

    Args:
        decoder: idle.
        prompts: that fit it.
        sampling: of all; each has its own seed, this one's plus its place.
        info: of the trace.
        lookup: matches that count, with prompt lookup.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        info: TraceInfo,
        lookup: LookupConfig,
    ) -> None:
        self.decoder, self.prompts, self.sampling = decoder, prompts, sampling
        self.info, self.lookup = info, lookup
        self.num_requests = len(prompts)
        self.chunk_size = 2 * decoder.config.max_num_seqs

    def record(self, skip: int, progress: Progress) -> Iterator[tuple[Trace, list[Row]]]:
        """See `Source`."""
        from specdepth.decoder.tokenizers import decode
        from specdepth.decoder.trace_recorder import decode_texts

        tokenizer = self.decoder.tokenizer
        assert tokenizer is not None
        for start in range(skip * self.chunk_size, self.num_requests, self.chunk_size):
            chunk = self.prompts[start : start + self.chunk_size]
            texts = [
                TextToRecord(
                    id=prompt.id,
                    kind=prompt.kind,
                    split=prompt.split,
                    prompt_token_ids=render(tokenizer, prompt),
                    sampling=replace(self.sampling, seed=(self.sampling.seed or 0) + start + place),
                )
                for place, prompt in enumerate(chunk)
            ]
            answered = decode_texts(self.decoder, texts, progress)
            rows: list[Row] = [
                {"id": one.id, "prompt": one.text, "output": decode(tokenizer, text.token_ids)}
                for one, text in zip(chunk, answered, strict=True)
            ]
            yield run_drafter(answered, self.info, self.lookup, self.decoder), rows


class LoggedRequests:
    """Requests of a log; those without output are left out.

    Args:
        path: the log.
        columns: where prompt and output are.
        tokenizer: of the model that answered; None where all are token ids.
        sampling: how they were sampled, and where they are cut.
        info: of the trace.
        lookup: matches that count, with prompt lookup.
        num_requests: with output, as `log_size` counts.
        chat: see `to_texts`.
        decoder: whose draft model proposes; None for prompt lookup.
    """

    chunk_size = LOG_CHUNK

    def __init__(
        self,
        path: Path,
        columns: LogColumns,
        tokenizer: PreTrainedTokenizerBase | None,
        sampling: SamplingParams,
        info: TraceInfo,
        lookup: LookupConfig,
        *,
        num_requests: int,
        chat: bool = True,
        decoder: SpeculativeDecoder | None = None,
    ) -> None:
        self.path, self.columns, self.tokenizer = path, columns, tokenizer
        self.sampling, self.info, self.lookup = sampling, info, lookup
        self.chat, self.decoder = chat, decoder
        self.num_requests = num_requests

    def record(self, skip: int, progress: Progress) -> Iterator[tuple[Trace, list[Row]]]:
        """See `Source`."""
        outputs = islice(_with_output(self.path, self.columns), skip * self.chunk_size, None)
        while chunk := list(islice(outputs, self.chunk_size)):
            texts = to_texts(chunk, self.tokenizer, self.sampling, chat=self.chat)
            rows: list[Row] = [
                {"id": one.id, "prompt": one.prompt, "output": one.output} for one in chunk
            ]
            yield run_drafter(texts, self.info, self.lookup, self.decoder, progress), rows


def run_drafter(
    texts: Sequence[TextToRecord],
    info: TraceInfo,
    lookup: LookupConfig,
    decoder: SpeculativeDecoder | None,
    progress: Progress | None = None,
) -> Trace:
    """Record what the drafter that `info` names gets along `texts`."""
    if info.drafter == "prompt-lookup":
        return record_lookup(texts, info, lookup, progress)
    from specdepth.decoder.trace_recorder import record_proposals

    assert decoder is not None
    return record_proposals(decoder, texts, info, progress)


def log_size(path: Path, columns: LogColumns) -> tuple[int, int, bool]:
    """Read a log through, so that a bad line is found before any work is done.

    Returns:
        Requests with output, requests without, and whether any with output holds text.

    Raises:
        ValueError: a log that cannot be read, or has no output.
    """
    num_used, num_empty, has_text = 0, 0, False
    for one in read_output_log(path, columns):
        if one.output:
            num_used += 1
            has_text = has_text or one.needs_tokenizer
        else:
            num_empty += 1
    if not num_used:
        raise ValueError(f"output log {path} holds no request with output.")
    return num_used, num_empty, has_text


def _with_output(path: Path, columns: LogColumns) -> Iterator[LoggedOutput]:
    return (one for one in read_output_log(path, columns) if one.output)


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Of ids and texts, to know the same prompts again."""
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
