"""Traces: for each position of recorded texts, what a drafter would have proposed and got accepted.

Under greedy and coupled verification the text does not depend on depths, so the run at a position is the
agreement of the proposal there with the recorded text, whatever was drafted before. A trace holds no
text: counts and signals only.

Legend: N requests, M output positions of all of them, K deepest depth recorded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.state import Bools, Floats, Ints

from .prompts import Split
from .trace_format import MAX_ARRAY_BYTES, naming, read_arrays, write_arrays
from .trace_format import check as _check
from .trace_info import TraceInfo as TraceInfo

MAX_REQUEST_TOKENS = 1 << 22
"""Bound on prompt and answer of one request, so that a bad file cannot ask for any table."""

_COUNTS: Mapping[str, type[np.unsignedinteger[Any]]] = {
    "accepted": np.uint8,
    "proposal_length": np.uint8,
    "match_length": np.uint8,
    "num_matches": np.uint32,
    "num_agreeing": np.uint32,
    "match_tokens": np.uint8,
    "match_distance": np.uint32,
}
_SHOWN = (*_COUNTS, "match_in_output", "agreement")
"""Of each position, what is no signal of a model."""
_SIGNALS = ("target_top1", "target_entropy")
_DRAFT_SIGNALS = ("draft_top1", "draft_entropy", "draft_margin")
_SHARES = ("target_top1", "draft_top1", "draft_margin")
_PER_REQUEST = ("num_prompt", "num_tokens", "max_new_tokens")
_FLAGS = ("held_out", "stopped", "looping")
_LATER_FIELDS = {"reads_target"}
"""Of `TraceInfo`: files made before them stand for the defaults."""
_LATER_ARRAYS = ("match_tokens", "match_distance", "match_in_output", "agreement")
"""Files made before them stand for 0, which is right for all drafters but prompt lookup."""
_ROUNDING = 1e-6
"""How far a probability may be out of 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Recorded outcomes. Position p of a request is the state after p generated tokens.

    Raises:
        ValueError: arrays of wrong lengths, or numbers that cannot be.
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
    match_tokens: Ints
    """[M] see `RoundState.match_tokens`; this and the next three are 0 but with prompt lookup."""
    match_distance: Ints
    """[M]"""
    match_in_output: Bools
    """[M]"""
    agreement: NDArray[np.uint8]
    """[M, K] see `RoundState.agreement`, in steps of 1 / `AGREEMENT_STEPS`."""
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
        num, top = len(self.ids), self.info.max_num_speculative_tokens
        _check(num > 0, "a trace needs at least one request")
        _check(len(self.kinds) == num, f"kinds is not [{num}]")
        for name in (*_PER_REQUEST, *_FLAGS):
            _check(getattr(self, name).shape == (num,), f"{name} is not [{num}]")
        _check(bool((self.num_tokens > 0).all()), "a request has no tokens")
        _check(bool((self.num_prompt > 0).all()), "a prompt is empty")
        _check(bool((self.num_tokens <= self.max_new_tokens).all()), "a text passes its limit")
        longest = int((self.num_prompt + self.max_new_tokens).max())
        _check(
            longest <= MAX_REQUEST_TOKENS,
            f"a request may have {longest} tokens, the most is {MAX_REQUEST_TOKENS}",
        )
        object.__setattr__(self, "starts", np.cumsum(self.num_tokens) - self.num_tokens)
        size = int(self.num_tokens.sum())
        for name, kind in _COUNTS.items():
            values = getattr(self, name)
            _check(values.shape == (size,), f"{name} is not [{size}]")
            in_range = (values >= 0) & (values <= np.iinfo(kind).max)
            _check(bool(in_range.all()), f"{name} is out of range")
        _check(self.match_in_output.shape == (size,), f"match_in_output is not [{size}]")
        shown = self.agreement
        fits = shown.shape == (size, top) and shown.dtype == np.uint8
        _check(fits, f"agreement is not bytes [{size}, {top}]")
        _check(bool((shown[:, 1:] <= shown[:, :-1]).all()), "agreement rises with depth")
        for name in (*_SIGNALS, *_DRAFT_SIGNALS):
            self._check_signal(name, size)
        left = np.repeat(self.starts + self.num_tokens, self.num_tokens) - np.arange(size)
        most = np.minimum(self.proposal_length, left)
        _check(bool((self.accepted <= most).all()), "a run is longer than its proposal or its text")
        _check(bool((self.proposal_length <= top).all()), f"a proposal is longer than {top}")
        _check(bool((self.num_agreeing <= self.num_matches).all()), "more matches agree than exist")

    def _check_signal(self, name: str, size: int) -> None:
        """Shape and range; NaN stands for unknown."""
        signal, shape = getattr(self, name), [size]
        if name in _DRAFT_SIGNALS:
            shape.append(self.info.max_num_speculative_tokens)
            has_model = self.info.drafter == "draft-model"
            _check((signal is not None) == has_model, f"{name} does not fit the drafter")
            if not has_model:
                return
        _check(signal.shape == tuple(shape), f"{name} is not {shape}")
        most = 1 + _ROUNDING if name in _SHARES else np.finfo(np.float16).max
        # Written so that NaN passes.
        wrong = (signal < -_ROUNDING) | (signal > most)
        _check(not wrong.any(), f"{name} is out of range")

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
        """Indices of requests: of a split, of some kinds, that loop (True) or do not (False).

        Raises:
            ValueError: an unknown split or kind.
        """
        chosen = np.ones(self.num_requests, np.bool_)
        if split is not None:
            names = get_args(Split)
            _check(split in names, f"unknown split {split!r}, expected one of {names}")
            chosen &= self.held_out == (split == "held-out")
        if kinds is not None:
            recorded = sorted(set(self.kinds))
            for kind in kinds:
                _check(kind in recorded, f"no kind {kind!r} in the trace; there are {recorded}")
            chosen &= np.isin(np.array(self.kinds), list(kinds))
        if looping is not None:
            chosen &= self.looping == looping
        return np.flatnonzero(chosen)

    def select(self, rows: Ints) -> Trace:
        """A trace of these requests alone, in this order; at least one."""
        lengths = self.num_tokens[rows]
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(self.starts[rows], lengths) + offsets
        changed: dict[str, Any] = {
            "ids": tuple(self.ids[row] for row in rows),
            "kinds": tuple(self.kinds[row] for row in rows),
        }
        for name in (*_PER_REQUEST, *_FLAGS):
            changed[name] = getattr(self, name)[rows]
        for name in (*_SHOWN, *_SIGNALS, *_DRAFT_SIGNALS):
            values = getattr(self, name)
            changed[name] = None if values is None else values[at]
        return replace(self, **changed)

    @classmethod
    def concatenate(cls, parts: Collection[Trace]) -> Trace:
        """Put traces of one kind together.

        Raises:
            ValueError: none, or traces that were made differently.
        """
        _check(len(parts) > 0, "there are no traces to put together")
        first = next(iter(parts))
        made = [replace(part.info, created="", versions={}) for part in parts]
        _check(
            all(info == made[0] for info in made),
            "the traces to put together were recorded differently",
        )
        joined: dict[str, Any] = {
            "ids": tuple(name for part in parts for name in part.ids),
            "kinds": tuple(name for part in parts for name in part.kinds),
        }
        for name in (*_PER_REQUEST, *_FLAGS, *_SHOWN, *_SIGNALS, *_DRAFT_SIGNALS):
            values = [getattr(part, name) for part in parts]
            joined[name] = None if values[0] is None else np.concatenate(values)
        return cls(info=first.info, **joined)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed .npz to `path`, whole or not at all; signals in half precision.

        Raises:
            OSError: it cannot be written.
        """
        names = sorted(set(self.kinds))
        numbers = {name: number for number, name in enumerate(names)}
        header = {"info": asdict(self.info), "ids": self.ids, "kinds": names}
        arrays: dict[str, NDArray[Any]] = {
            "kind": np.array([numbers[kind] for kind in self.kinds], np.uint32)
        }
        for name in _PER_REQUEST:
            arrays[name] = getattr(self, name).astype(np.uint32)
        for name in (*_FLAGS, "match_in_output", "agreement"):
            arrays[name] = getattr(self, name)
        for name, kind in _COUNTS.items():
            arrays[name] = getattr(self, name).astype(kind)
        for name in (*_SIGNALS, *_DRAFT_SIGNALS):
            if (signal := getattr(self, name)) is not None:
                arrays[name] = signal.astype(np.float16)
        write_arrays(Path(path), header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, oversized, truncated, damaged or foreign file; the sentence names it.
        """
        with naming(Path(path)):
            header, arrays = read_arrays(Path(path))
            return cls._from_file(header, arrays)

    @classmethod
    def _from_file(cls, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Trace:
        needed = {"kind", *_PER_REQUEST, *_FLAGS, *_SHOWN, *_SIGNALS}
        missing = sorted(needed - set(arrays) - set(_LATER_ARRAYS))
        _check(not missing, f"it lacks {', '.join(missing)}")
        foreign = sorted(set(arrays) - needed - set(_DRAFT_SIGNALS))
        _check(not foreign, f"it holds the unknown {', '.join(foreign)}")
        info, ids, kinds = (header.get(name) for name in ("info", "ids", "kinds"))
        for name, value in (("ids", ids), ("kinds", kinds)):
            texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
            _check(texts, f"{name} in its header is no list of texts")
        assert ids is not None
        assert kinds is not None
        known = {one.name for one in fields(TraceInfo)}
        _check(isinstance(info, dict), "its header has no info")
        assert info is not None
        fits = known - _LATER_FIELDS <= set(info) <= known
        _check(fits, "its info lacks fields or has unknown ones")
        made = TraceInfo(**info)
        arrays = {**arrays, **_later_arrays(made, arrays)}
        kind = _whole("kind", arrays["kind"])
        in_range = kind.shape == (len(ids),) and bool(((kind >= 0) & (kind < len(kinds))).all())
        _check(in_range, "its kinds do not fit its requests")
        loaded: dict[str, Any] = {
            name: arrays[name].astype(np.bool_) for name in (*_FLAGS, "match_in_output")
        }
        loaded["agreement"] = arrays["agreement"]
        for name in (*_PER_REQUEST, *_COUNTS):
            loaded[name] = _whole(name, arrays[name])
        for name in (*_SIGNALS, *_DRAFT_SIGNALS):
            loaded[name] = arrays[name].astype(np.float64) if name in arrays else None
        return cls(
            info=made,
            ids=tuple(ids),
            kinds=tuple(kinds[number] for number in kind),
            **loaded,
        )


def _later_arrays(info: TraceInfo, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Zeros for what a file is too old to hold, unless prompt lookup would have shown something."""
    absent = [name for name in _LATER_ARRAYS if name not in arrays]
    _check(
        not absent or info.drafter != "prompt-lookup",
        f"it lacks {', '.join(absent)}; record it again",
    )
    size, top = arrays["accepted"].size, info.max_num_speculative_tokens
    _check(size * top <= MAX_ARRAY_BYTES, f"it has {size} positions of depth {top}, too many")
    shapes = {"agreement": (size, top)}
    return {name: np.zeros(shapes.get(name, size), np.uint8) for name in absent}


def _whole(name: str, values: NDArray[Any]) -> Ints:
    """Counts as int64, which must hold them."""
    fits = values.dtype.kind in "ui" and (values <= np.iinfo(np.int64).max).all()
    _check(bool(fits), f"{name} holds no counts")
    return values.astype(np.int64)
