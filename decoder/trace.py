"""Traces: for each position of recorded texts, what a drafter would have proposed and got accepted.

Under greedy and coupled verification the text does not depend on depths, so the run at a position is the
agreement of the proposal there with the recorded text, whatever was drafted before. A trace holds no
text: counts and signals only.

Legend: N requests, M output positions of all of them, K deepest depth recorded.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.files import read_bounded, write_atomic
from specdepth.scheduler.state import Bools, DrafterKind, Floats, Ints

from .prompts import Split

FORMAT = "specdepth-trace"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 << 20
MAX_ARRAY_BYTES = 4 << 30
"""Bound on what a file may unpack to."""

_COUNTS: Mapping[str, type[np.unsignedinteger[Any]]] = {
    "accepted": np.uint8,
    "proposal_length": np.uint8,
    "match_length": np.uint8,
    "num_matches": np.uint16,
    "num_agreeing": np.uint16,
}
_SIGNALS = ("target_top1", "target_entropy")
_DRAFT_SIGNALS = ("draft_top1", "draft_entropy", "draft_margin")
_PER_REQUEST = ("num_prompt", "num_tokens", "max_new_tokens")
_FLAGS = ("held_out", "stopped", "looping")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """How a trace was made."""

    model_pair: str
    """Names of target and drafter, as in `SpeculativeDecoder.model_pair`."""
    drafter: DrafterKind
    max_num_speculative_tokens: int
    """K: replay can go as deep."""
    verification: Literal["greedy", "coupled"] = "greedy"
    source: Literal["decoder", "outputs"] = "decoder"
    """Texts of the real target, or somebody's log of them."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    lookup: Mapping[str, Any] = field(default_factory=dict)
    """Settings of prompt lookup."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    """ISO 8601, UTC."""

    def __post_init__(self) -> None:
        if self.drafter not in get_args(DrafterKind) or self.drafter == "none":
            raise ValueError(f"a trace needs a drafter, got {self.drafter!r}.")
        if not 1 <= self.max_num_speculative_tokens <= 255:
            raise ValueError(
                f"a trace records depths up to 1..255, got {self.max_num_speculative_tokens}."
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Recorded outcomes. Position p of a request is the state after p generated tokens.

    Raises:
        ValueError: arrays of wrong lengths, or runs that cannot be.
    """

    info: TraceInfo
    ids: tuple[str, ...]
    """[N] names of the prompts."""
    kinds: tuple[str, ...]
    """[N]"""
    held_out: Bools
    """[N] policies learn on the others."""
    num_prompt: Ints
    """[N] prompt tokens."""
    num_tokens: Ints
    """[N] generated tokens, the end token included; at least 1."""
    max_new_tokens: Ints
    """[N] limit that the request had."""
    stopped: Bools
    """[N] whether the text ended by itself."""
    looping: Bools
    """[N] whether it fell into verbatim repetition, which flatters prompt lookup."""

    accepted: Ints
    """[M] leading tokens of the proposal here that the text goes on with."""
    proposal_length: Ints
    """[M] tokens that the drafter would propose, up to K."""
    match_length: Ints
    """[M] see `RoundState.match_length`; 0 with a draft model."""
    num_matches: Ints
    """[M] places of that n-gram, at most 65535."""
    num_agreeing: Ints
    """[M] places that go on with the first proposed token."""
    target_top1: Floats
    """[M] target's largest probability (temperature 1) where this token was taken; NaN unknown."""
    target_entropy: Floats
    """[M]"""
    draft_top1: Floats | None = None
    """[M, K] what a draft model shows at each position of a draft from here; None without one."""
    draft_entropy: Floats | None = None
    draft_margin: Floats | None = None
    starts: Ints = field(init=False)
    """[N] first position of each request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.cumsum(self.num_tokens) - self.num_tokens)
        num, top = len(self.ids), self.info.max_num_speculative_tokens
        for name in (*_PER_REQUEST, *_FLAGS):
            _check(getattr(self, name).shape == (num,), f"{name} is not [{num}]")
        _check(len(self.kinds) == num, f"kinds is not [{num}]")
        _check(num > 0, "it is empty")
        _check(bool((self.num_tokens > 0).all()), "a request has no tokens")
        _check(bool((self.num_prompt > 0).all()), "a prompt is empty")
        _check(bool((self.num_tokens <= self.max_new_tokens).all()), "a text passes its limit")
        size = int(self.num_tokens.sum())
        for name in (*_COUNTS, *_SIGNALS):
            _check(getattr(self, name).shape == (size,), f"{name} is not [{size}]")
        for name in _DRAFT_SIGNALS:
            signal = getattr(self, name)
            known = signal is not None
            _check(
                known == (self.info.drafter == "draft-model"), f"{name} does not fit the drafter"
            )
            _check(not known or signal.shape == (size, top), f"{name} is not [{size}, {top}]")
        left = np.repeat(self.starts + self.num_tokens, self.num_tokens) - np.arange(size)
        most = np.minimum(self.proposal_length, left)
        _check(bool((self.accepted >= 0).all()), "a run is negative")
        _check(bool((self.accepted <= most).all()), "a run is longer than its proposal or its text")
        _check(bool((self.proposal_length <= top).all()), f"a proposal is longer than {top}")
        _check(bool((self.num_agreeing <= self.num_matches).all()), "more matches agree than exist")

    @property
    def num_requests(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def num_positions(self) -> int:
        """M."""
        return len(self.accepted)

    @property
    def match_agreement(self) -> Floats:
        """[M] share of matching places that agree; 0 without a match."""
        return self.num_agreeing / np.maximum(self.num_matches, 1)

    def rows(
        self,
        split: Split | None = None,
        *,
        kinds: Collection[str] | None = None,
        looping: bool | None = None,
    ) -> Ints:
        """Indices of requests: of a split, of some kinds, that loop (True) or do not (False)."""
        chosen = np.ones(self.num_requests, np.bool_)
        if split is not None:
            chosen &= self.held_out == (split == "held-out")
        if kinds is not None:
            chosen &= np.isin(np.array(self.kinds), list(kinds))
        if looping is not None:
            chosen &= self.looping == looping
        return np.flatnonzero(chosen)

    def select(self, rows: Ints) -> Trace:
        """A trace of these requests alone, in this order."""
        lengths = self.num_tokens[rows]
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(self.starts[rows], lengths) + offsets
        changed: dict[str, Any] = {
            "ids": tuple(self.ids[row] for row in rows),
            "kinds": tuple(self.kinds[row] for row in rows),
        }
        for name in (*_PER_REQUEST, *_FLAGS):
            changed[name] = getattr(self, name)[rows]
        for name in (*_COUNTS, *_SIGNALS, *_DRAFT_SIGNALS):
            values = getattr(self, name)
            changed[name] = None if values is None else values[at]
        return replace(self, **changed)

    @classmethod
    def concatenate(cls, parts: Collection[Trace]) -> Trace:
        """Put traces of one kind together.

        Raises:
            ValueError: none, or traces that were made differently.
        """
        _check(len(parts) > 0, "there is nothing to put together")
        first = next(iter(parts))
        made = [replace(part.info, created="", versions={}) for part in parts]
        _check(all(info == made[0] for info in made), "its parts were recorded differently")
        joined: dict[str, Any] = {
            "ids": sum((part.ids for part in parts), ()),
            "kinds": sum((part.kinds for part in parts), ()),
        }
        for name in (*_PER_REQUEST, *_FLAGS, *_COUNTS, *_SIGNALS, *_DRAFT_SIGNALS):
            values = [getattr(part, name) for part in parts]
            joined[name] = None if values[0] is None else np.concatenate(values)
        return cls(info=first.info, **joined)

    # -------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed .npz to `path`, whole or not at all; signals in half precision."""
        names = sorted(set(self.kinds))
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "info": asdict(self.info),
            "ids": self.ids,
            "kinds": names,
        }
        arrays: dict[str, NDArray[Any]] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "kind": np.array([names.index(kind) for kind in self.kinds], np.uint8),
        }
        for name in (*_PER_REQUEST, *_FLAGS):
            values = getattr(self, name)
            arrays[name] = values if name in _FLAGS else values.astype(np.uint32)
        for name, kind in _COUNTS.items():
            arrays[name] = np.minimum(getattr(self, name), np.iinfo(kind).max).astype(kind)
        for name in (*_SIGNALS, *_DRAFT_SIGNALS):
            if (signal := getattr(self, name)) is not None:
                arrays[name] = signal.astype(np.float16)
        buffer = BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        write_atomic(Path(path), buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, oversized, truncated, damaged or foreign file; the sentence names it.
        """
        path = Path(path)
        try:
            data = BytesIO(read_bounded(path, MAX_FILE_BYTES))
            with zipfile.ZipFile(data) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            _check(unpacked <= MAX_ARRAY_BYTES, f"it unpacks to {unpacked} bytes")
            with np.load(data, allow_pickle=False) as arrays:
                return cls._from_arrays(dict(arrays.items()))
        except OSError as error:
            raise ValueError(f"cannot read trace {path}: {error.strerror or error}.") from error
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise ValueError(
                f"cannot use trace {path}: it is truncated or no trace ({error}); record it again."
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"cannot use trace {path}: {error}") from error

    @classmethod
    def _from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Trace:
        missing = {"header", "kind", *_PER_REQUEST, *_FLAGS, *_COUNTS, *_SIGNALS} - set(arrays)
        _check(not missing, f"it lacks {', '.join(sorted(missing))}")
        header = json.loads(arrays["header"].astype(np.uint8).tobytes().decode())
        is_ours = isinstance(header, dict) and header.get("format") == FORMAT
        _check(is_ours, f'the field "format" must be "{FORMAT}"')
        version = header.get("format_version")
        _check(
            version == FORMAT_VERSION,
            f"format version {version!r}, this specdepth reads {FORMAT_VERSION}; record it again",
        )
        known = {one.name for one in fields(TraceInfo)}
        _check(set(header["info"]) <= known, "unknown fields in its info")
        for name, values in arrays.items():
            _check(values.dtype.kind in "uifb", f"{name} holds no numbers")
        kind = arrays["kind"].astype(np.int64)
        _check(bool((kind < len(header["kinds"])).all()), "unknown kinds")
        loaded: dict[str, Any] = {name: arrays[name].astype(np.bool_) for name in _FLAGS}
        for name in (*_PER_REQUEST, *_COUNTS):
            loaded[name] = arrays[name].astype(np.int64)
        for name in (*_SIGNALS, *_DRAFT_SIGNALS):
            loaded[name] = arrays[name].astype(np.float64) if name in arrays else None
        return cls(
            info=TraceInfo(**header["info"]),
            ids=tuple(map(str, header["ids"])),
            kinds=tuple(str(header["kinds"][index]) for index in kind),
            **loaded,
        )


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what}.")
