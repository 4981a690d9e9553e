"""What a pass costs on a machine: `CostModel`, measured, imported or modelled, kept in JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from .cost_checks import MAX_PASS_TOKENS, MAX_SECONDS, grid_of, number, steps_of, times_of
from .curve import Curve
from .files import read_bounded, write_atomic

if TYPE_CHECKING:  # both need CostModel itself
    from .depth import VerificationRule
    from .state import DrafterKind, RoundOutcome

FORMAT = "specdepth-cost-model"
FORMAT_VERSION = 1

_MAX_FILE_BYTES = 1 << 20
_LISTS = ("tokens", "verify_s", "prefill_s", "draft_sequences", "draft_s", "cuda_graph_sizes")

_SAMPLING = ("rejection_row_s", "coupled_row_s", "rejection_draw_s", "coupled_draw_s")

Scalar = int | float | np.integer[Any] | np.floating[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of the model passes of one target, drafter and machine. All times in seconds.

    Look-ups are linear between grid points and beyond the last one (see `Curve`).

    Raises:
        ValueError: a grid that is empty, unordered, or of another length than its times; a number
            out of range or not finite; a time less than half of that of a smaller pass.
    """

    name: str
    """Target, and the drafter where one was measured."""
    device: str = "cpu"
    dtype: str = "float32"
    measured: bool = False
    """False: modelled or made up. Reports say so."""

    tokens: tuple[int, ...]
    """Pass sizes in tokens, ascending, from 1 on."""
    verify_s: tuple[float, ...]
    """Target pass over so many tokens, logits for each, at short context."""
    prefill_s: tuple[float, ...] = ()
    """The same where one row needs logits; empty: as `verify_s`."""
    context_s: float = 0.0
    """For each context token that attention reads, summed over the sequences of the pass."""
    prefill_pair_s: float = 0.0
    """For each pair of a prompt token in the pass and a key that its attention looks at."""
    draft_sequences: tuple[int, ...] = ()
    """Batch sizes of a draft pass, ascending, from 1 on; empty: drafting is free."""
    draft_s: tuple[float, ...] = ()
    """Draft pass that adds one token to each of so many sequences."""
    draft_token_s: float = 0.0
    """For each token that the draft model has to catch up on."""
    rejection_row_s: float = 0.0
    """For each row of target logits that rejection sampling judges at a temperature above 0, beyond a
    greedy one; see `sampled`."""
    coupled_row_s: float = 0.0
    """The same under coupled verification."""
    rejection_draw_s: float = 0.0
    """For each token that a draft model draws from its law under rejection sampling, beyond a greedy one."""
    coupled_draw_s: float = 0.0
    """The same under coupled verification."""
    overhead_s: float = 0.0
    """Fixed cost of a round outside the passes: scheduling and bookkeeping."""
    cuda_graph_sizes: tuple[int, ...] = ()
    """Sizes of captured passes, ascending. A pass, target or draft, is padded to the next of them and
    costs what that one costs; larger passes are not padded. Empty: no padding."""

    weight_bytes: int | None = None
    """Bytes of target weights that a pass streams."""
    kv_bytes_per_token: int | None = None
    """Bytes of target KV a context token."""
    flops_per_token: float | None = None
    """Arithmetic of the target a pass token, without attention."""

    _verify: Curve = field(init=False, repr=False, compare=False)
    _prefill: Curve = field(init=False, repr=False, compare=False)
    _draft: Curve | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "tokens", grid_of("tokens", self.tokens))
        put(self, "verify_s", times_of("verify_s", self.verify_s, "tokens", self.tokens))
        if len(self.prefill_s):
            put(self, "prefill_s", times_of("prefill_s", self.prefill_s, "tokens", self.tokens))
        else:
            put(self, "prefill_s", self.verify_s)
        if len(self.draft_sequences) or len(self.draft_s):
            grid = grid_of("draft_sequences", self.draft_sequences)
            put(self, "draft_sequences", grid)
            put(self, "draft_s", times_of("draft_s", self.draft_s, "draft_sequences", grid))
        else:
            put(self, "draft_sequences", ())
            put(self, "draft_s", ())
        for name in ("context_s", "prefill_pair_s", "draft_token_s", "overhead_s", *_SAMPLING):
            put(self, name, number(name, getattr(self, name), MAX_SECONDS))
        for name in ("weight_bytes", "kv_bytes_per_token", "flops_per_token"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), 1e30)
        steps = steps_of("cuda_graph_sizes", self.cuda_graph_sizes)
        put(self, "cuda_graph_sizes", steps)
        put(self, "_verify", Curve(self.tokens, self.verify_s, steps))
        put(self, "_prefill", Curve(self.tokens, self.prefill_s, steps))
        draft = Curve(self.draft_sequences, self.draft_s, steps) if self.draft_s else None
        put(self, "_draft", draft)

    @classmethod
    def linear(
        cls,
        *,
        base_s: float = 0.05,
        token_s: float = 0.003,
        knee: int = 1,
        context_s: float = 0.0,
        draft_base_s: float = 0.0,
        draft_token_s: float = 0.0,
        overhead_s: float = 0.0,
        max_tokens: int = 1024,
        name: str = "linear",
    ) -> CostModel:
        """A made-up machine: `base_s` up to `knee` tokens, `token_s` for each one more.

        Args:
            base_s: seconds of the smallest pass.
            token_s: seconds a token beyond the knee.
            knee: pass size up to which tokens are free.
            context_s: seconds a context token.
            draft_base_s: seconds of a draft pass over no sequence; 0 with `draft_token_s` 0 means
                that drafting is free.
            draft_token_s: seconds that each sequence adds to a draft pass, also a catch-up token.
            overhead_s: fixed seconds a round.
            max_tokens: last grid point.
            name: of the model.
        """
        tokens = tuple(sorted({1, max(knee, 1), max(max_tokens, knee + 1)}))
        sequences = (1, 2, 1024) if draft_base_s or draft_token_s else ()
        return cls(
            name=name,
            tokens=tokens,
            verify_s=tuple(base_s + token_s * max(n - knee, 0) for n in tokens),
            context_s=context_s,
            draft_sequences=sequences,
            draft_s=tuple(draft_base_s + draft_token_s * n for n in sequences),
            draft_token_s=draft_token_s,
            overhead_s=overhead_s,
        )

    @classmethod
    def from_step_times(cls, path: str | os.PathLike[str]) -> CostModel:
        """Fit a model to the step times of another engine, a CSV file; see `step_times`.

        Raises:
            ValueError: a file that cannot be read or fitted; the sentence names line and column.
        """
        from .step_times import fit_step_times, read_step_times

        path = Path(path)
        return fit_step_times(read_step_times(path), name=path.stem)

    def sampled(self, rule: VerificationRule) -> CostModel:
        """These prices where all requests sample: what a verdict under `rule` takes is a row's, and a
        row is a token's, so it becomes part of `verify_s`, as draws become part of `draft_s`.

        The prices of sampling are 0 in the result, so that nothing is charged twice. Prompt tokens have
        no rows, and `prefill_s` stays.
        """
        if rule == "greedy" or not any(getattr(self, name) for name in _SAMPLING):
            return self
        row_s, draw_s = (getattr(self, f"{rule}_{name}") for name in ("row_s", "draw_s"))
        return replace(
            self,
            verify_s=tuple(t + n * row_s for n, t in zip(self.tokens, self.verify_s, strict=True)),
            draft_s=tuple(
                t + n * draw_s for n, t in zip(self.draft_sequences, self.draft_s, strict=True)
            ),
            rejection_row_s=0.0,
            coupled_row_s=0.0,
            rejection_draw_s=0.0,
            coupled_draw_s=0.0,
        )

    @property
    def drafter_is_free(self) -> bool:
        """Whether drafting costs nothing here (prompt lookup, or no draft model measured)."""
        return self._draft is None

    @overload
    def pass_s(
        self,
        num_pass_tokens: Scalar,
        num_prefill_tokens: Scalar = 0,
        num_context_tokens: Scalar = 0,
        num_prefill_pairs: Scalar = 0,
    ) -> float: ...
    @overload
    def pass_s(
        self,
        num_pass_tokens: NDArray[Any],
        num_prefill_tokens: Any = 0,
        num_context_tokens: Any = 0,
        num_prefill_pairs: Any = 0,
    ) -> NDArray[np.float64]: ...
    def pass_s(
        self,
        num_pass_tokens: Any,
        num_prefill_tokens: Any = 0,
        num_context_tokens: Any = 0,
        num_prefill_pairs: Any = 0,
    ) -> Any:
        """Seconds of a target pass.

        Args:
            num_pass_tokens: all its tokens, prefill included; 0 means no pass, 0 s.
            num_prefill_tokens: those of them that need no logits. A mixed pass is priced between
                `verify_s` and `prefill_s` by their share.
            num_context_tokens: sum of the context lengths that its attention reads.
            num_prefill_pairs: for each sequence with prompt tokens in the pass, these times the keys
                that they see, summed.

        Returns:
            A float for numbers, float64 of the broadcast shape for arrays.
        """
        if isinstance(num_pass_tokens, np.ndarray):
            seconds = self._verify.at_each(num_pass_tokens)
            if np.any(num_prefill_tokens):
                share = np.minimum(num_prefill_tokens / np.maximum(num_pass_tokens, 1), 1.0)
                seconds = seconds + share * (self._prefill.at_each(num_pass_tokens) - seconds)
            attention = (
                self.context_s * num_context_tokens + self.prefill_pair_s * num_prefill_pairs
            )
            return seconds + np.where(num_pass_tokens > 0, attention, 0)
        if num_pass_tokens <= 0:
            return 0.0
        one = self._verify.at(num_pass_tokens)
        if num_prefill_tokens:
            share = min(num_prefill_tokens / num_pass_tokens, 1.0)
            one += share * (self._prefill.at(num_pass_tokens) - one)
        one += self.context_s * num_context_tokens
        return float(one + self.prefill_pair_s * num_prefill_pairs)

    def passes_s(
        self,
        first: int,
        count: int,
        num_prefill_tokens: int = 0,
        num_context_tokens: int = 0,
    ) -> NDArray[np.float64]:
        """Seconds of target passes of `first`, `first` + 1, ... tokens, float64 [count].

        What `pass_s` says of each, sooner, but for `prefill_pair_s`: the same for all of them.

        Args:
            first: tokens of the smallest pass, 1 or more.
            count: passes.
            num_prefill_tokens: see `pass_s`.
            num_context_tokens: see `pass_s`.
        """
        seconds = self._verify.in_row(first, count)
        if num_prefill_tokens:
            share = np.minimum(num_prefill_tokens / np.arange(first, first + count), 1.0)
            seconds = seconds + share * (self._prefill.in_row(first, count) - seconds)
        return seconds + self.context_s * num_context_tokens

    @overload
    def draft_pass_s(self, num_sequences: Scalar) -> float: ...
    @overload
    def draft_pass_s(self, num_sequences: NDArray[Any]) -> NDArray[np.float64]: ...
    def draft_pass_s(self, num_sequences: Any) -> Any:
        """Seconds of one draft pass over `num_sequences`; 0 for none, or where drafting is free."""
        if isinstance(num_sequences, np.ndarray):
            if self._draft is None:
                return np.zeros(num_sequences.shape)
            return self._draft.at_each(num_sequences)
        return 0.0 if self._draft is None else float(self._draft.at(num_sequences))

    def draft_passes_s(self, count: int) -> NDArray[np.float64]:
        """Seconds of one draft pass over 0, 1, ... `count` sequences, float64 [count + 1].

        What `draft_pass_s` says of each, sooner; not to be written to.
        """
        return np.zeros(count + 1) if self._draft is None else self._draft.in_row(0, count + 1)

    def draft_round_s(
        self, draft_pass_sequences: tuple[int, ...], num_catch_up_tokens: int = 0
    ) -> float:
        """Seconds of drafting in a round.

        Args:
            draft_pass_sequences: sequences in each draft pass.
            num_catch_up_tokens: tokens that the draft model computed besides.
        """
        if self._draft is None:
            return 0.0
        at = self._draft.at
        return sum(at(n) for n in draft_pass_sequences) + self.draft_token_s * num_catch_up_tokens

    def outcome_pass_s(self, outcome: RoundOutcome) -> float:
        """Seconds that a round's target pass should have taken, from the work that it says it did."""
        return self.pass_s(
            outcome.num_pass_tokens,
            outcome.num_prefill_tokens,
            outcome.num_context_tokens,
            outcome.num_prefill_pairs,
        )

    def outcome_s(self, outcome: RoundOutcome) -> float:
        """The same of the whole round."""
        draft_s = self.draft_round_s(outcome.draft_pass_sequences, outcome.num_catch_up_tokens)
        return self.outcome_pass_s(outcome) + draft_s + self.overhead_s

    def round_s(
        self,
        depths: NDArray[Any],
        *,
        num_pending_tokens: int | None = None,
        num_prefill_tokens: int = 0,
        num_context_tokens: int = 0,
        num_catch_up_tokens: int | NDArray[Any] = 0,
        drafter: DrafterKind = "draft-model",
    ) -> NDArray[np.float64]:
        """Seconds of whole rounds, `overhead_s` included, one for each row of `depths`.

        The target pass goes by the sum of depths. Drafting runs in shrinking batches, so it goes by
        the deepest sequence: pass j has the sequences with depth above j. `prefill_pair_s`, which no
        depth changes, is left out.

        Args:
            depths: [..., R] depth of each decoding sequence.
            num_pending_tokens: tokens of these sequences before drafting; None: one each.
            num_prefill_tokens: prompt tokens of other sequences that ride in the pass.
            num_context_tokens: sum of context lengths in the pass.
            num_catch_up_tokens: tokens that the draft model has to catch up on, [...] or a number.
            drafter: draft passes are charged for "draft-model" only.

        Returns:
            float64 [...].
        """
        depths = np.asarray(depths)
        pending = depths.shape[-1] if num_pending_tokens is None else num_pending_tokens
        num_tokens = np.asarray(depths.sum(axis=-1) + (pending + num_prefill_tokens))
        seconds = self.pass_s(num_tokens, num_prefill_tokens, num_context_tokens)
        seconds = seconds + self.overhead_s
        if drafter == "draft-model" and self._draft is not None and depths.size:
            passes = np.arange(int(depths.max()))
            counts = (depths[..., None] > passes).sum(axis=-2)
            seconds = seconds + self._draft.at_each(counts).sum(axis=-1)
            seconds = seconds + self.draft_token_s * np.asarray(num_catch_up_tokens)
        return np.asarray(seconds)

    @overload
    def marginal_s(self, num_pass_tokens: Scalar, span: int = 1) -> float: ...
    @overload
    def marginal_s(self, num_pass_tokens: NDArray[Any], span: int = 1) -> NDArray[np.float64]: ...
    def marginal_s(self, num_pass_tokens: Any, span: int = 1) -> Any:
        """Price of one more token, dT/dn in seconds, as the mean over the next `span` tokens.

        May be negative on a staircase; a wider `span` looks past the step.
        """
        return (self.pass_s(num_pass_tokens + span) - self.pass_s(num_pass_tokens)) / span

    def knee_tokens(self) -> int:
        """Smallest pass, in tokens, that costs at least twice a one-token pass.

        Below it a pass is bound by streaming weights, above it by arithmetic. `MAX_PASS_TOKENS`
        when no smaller pass does (a flat curve).
        """
        return self._verify.first_at_least(2 * self._verify.at(1), MAX_PASS_TOKENS)

    def free_tokens(self, tolerance: float = 0.1) -> int:
        """Tokens that can join a one-token pass before it costs more than 1 + `tolerance` times."""
        limit = (1 + tolerance) * self._verify.at(1)
        return self._verify.first_at_least(math.nextafter(limit, math.inf), MAX_PASS_TOKENS) - 2

    def extrapolation(self, num_pass_tokens: int) -> str | None:
        """A sentence where a pass is larger than any that the prices rest on, else None."""
        last = self.tokens[-1]
        if num_pass_tokens <= last:
            return None
        ground = "measured" if self.measured else "modelled"
        return (
            f"The cost model {self.name} was {ground} up to {last} packed tokens; passes of up to "
            f"{num_pass_tokens} are extrapolated, {num_pass_tokens / last:.1f} times as far."
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, with format name and version."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {"format": FORMAT, "format_version": FORMAT_VERSION} | {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """Inverse of `to_dict`.

        Raises:
            ValueError: another format or version, unknown, missing or wrong fields.
        """
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise ValueError(f'not a cost model: the field "format" must be "{FORMAT}".')
        version = values.get("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            raise ValueError(
                f"cost model of format version {version!r}, this specdepth reads {FORMAT_VERSION}; "
                "profile again, or install the version that wrote it."
            )
        known = {f.name for f in fields(cls) if f.init}
        unknown = sorted(set(values) - known - {"format", "format_version"})
        missing = sorted({"name", "tokens", "verify_s"} - set(values))
        if unknown or missing:
            raise ValueError(f"cost model with unknown fields {unknown}, missing fields {missing}.")
        for key, kind in (("name", str), ("device", str), ("dtype", str), ("measured", bool)):
            if key in values and not isinstance(values[key], kind):
                raise ValueError(f"cost model: {key} must be a {kind.__name__}.")
        for key in _LISTS:
            if key in values and not isinstance(values[key], list | tuple):
                raise ValueError(f"cost model: {key} must be a list.")
        return cls(**{key: value for key, value in values.items() if key in known})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all."""
        write_atomic(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, oversized, damaged or foreign file; the sentence names it.
        """
        path = Path(path)
        try:
            data = read_bounded(path, _MAX_FILE_BYTES)
            return cls.from_dict(json.loads(data.decode("utf-8")))
        except OSError as error:
            raise ValueError(f"cannot read cost model {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            raise ValueError(f"cannot use cost model {path}: {error}") from error
