"""How a trace was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from specdepth.scheduler.state import DrafterKind

from .trace_format import check as _check


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
    reads_target: bool = False
    """Whether the draft model reads the target's states (EAGLE), and so cannot draft before the prompt is
    computed."""
    lookup: Mapping[str, Any] = field(default_factory=dict)
    """Settings of prompt lookup."""
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    """ISO 8601, UTC."""

    def __post_init__(self) -> None:
        # Types too: most of these come out of files.
        for name in ("model_pair", "created"):
            value = getattr(self, name)
            _check(isinstance(value, str), f"{name} of a trace is a text, got {value!r}")
        known = self.drafter in get_args(DrafterKind) and self.drafter != "none"
        _check(known, f"a trace needs a drafter, got {self.drafter!r}")
        top = self.max_num_speculative_tokens
        _check(_is_whole(top, 1, 255), f"a trace records depths up to 1..255, got {top!r}")
        for name, choices in (
            ("verification", ("greedy", "coupled")),
            ("source", ("decoder", "outputs")),
        ):
            value = getattr(self, name)
            _check(value in choices, f"{name} of a trace is one of {choices}, got {value!r}")
        _check(_is_number(self.temperature, 0, 1e6), f"temperature {self.temperature!r} is below 0")
        _check(_is_whole(self.top_k, 0, 1 << 31), f"top_k must be 0 or more, got {self.top_k!r}")
        in_range = _is_number(self.top_p, 0, 1) and self.top_p > 0
        _check(in_range, f"top_p must be in (0, 1], got {self.top_p!r}")
        _check(
            self.verification == "coupled" or self.temperature == 0,
            f"a trace of sampled text (temperature {self.temperature}) is coupled, not greedy",
        )
        _check(isinstance(self.reads_target, bool), f"reads_target is {self.reads_target!r}")
        for name in ("lookup", "versions"):
            value = getattr(self, name)
            _check(isinstance(value, Mapping), f"{name} of a trace is a mapping, got {value!r}")

    def depth_limit(self, asked: int | None = None) -> int:
        """K of a replay: what is asked for, else as deep as the trace was recorded."""
        return self.max_num_speculative_tokens if asked is None else asked


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most
