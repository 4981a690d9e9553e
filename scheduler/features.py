"""`RoundState` as numbers for a policy: named, bounded, and the same in training and deployment.

Columns are in the order of `FEATURES`. Values are clipped to their bounds; an unknown value (NaN,
or a count of -1) is written as 0, and where a policy should know, a `*_known` column says so. None
depends on a token that a draft model drew in this round. What prompt lookup shows of its proposal
follows from the committed text alone, so it says nothing of a random draw. So a policy that reads
only this table is lossless under every verification rule.

Legend: R running sequences, F features, K deepest depth.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .state import Floats, RoundState


class Feature(NamedTuple):
    """One column. `low` <= 0 <= `high`."""

    name: str
    unit: str
    low: float
    high: float
    meaning: str


def _one(name: str, unit: str, meaning: str, low: float = 0.0, high: float = 1.0) -> Feature:
    return Feature(name, unit, low, high, meaning)


UNIT_DEPTH = 8
"""Depths are counted in so many tokens, whatever K is: one policy then reads engines of any K."""
_TOKENS = f"of {UNIT_DEPTH} tokens"
_FAR = 4.0
"""Deeper depths are all one."""
_LINEAR = (
    _one("acceptance", "fraction", "moving average of accepted / drafted; 0.5 before any"),
    _one("acceptance_slow", "fraction", "the same over about four times as many rounds"),
    _one("match_agreement", "fraction", "places of the matched n-gram that go on as proposed"),
    _one("match_in_output", "flag", "the proposal starts among the generated tokens"),
    _one("last_depth", _TOKENS, "tokens drafted in the previous round", high=_FAR),
    _one("last_accepted", _TOKENS, "tokens accepted in the last round that drafted", high=_FAR),
    _one("proposal_length", _TOKENS, "tokens on offer now, 8 at most: more would tell of K"),
    _one("max_depth", _TOKENS, "deepest depth that can be honoured now", high=_FAR),
    _one("remaining_near", _TOKENS, "tokens until the request's limit, while near", high=_FAR),
    _one("full_streak", "of 4 rounds", "consecutive rounds with everything accepted, 4 at most"),
    _one("last_match", "of 4 tokens", "length of the n-gram matched in the previous round"),
)
_LOG = (
    _one("drafted_tokens", "log2 of 4096", "tokens of the sequence verified so far"),
    _one("drafted_rounds", "log2 of 256", "rounds behind `acceptance`"),
    _one("rounds_since_draft", "log2 of 32", "rounds since the sequence last drafted"),
    _one("num_matches", "log2 of 64", "earlier places of the matched n-gram"),
    _one(
        "match_tokens", "log2 of 16", "tokens that match at the place that is continued, 16 at most"
    ),
    _one("match_distance", "log2 of 4096", "tokens from that place to the end of the text"),
    _one("draft_lag", "log2 of 1024", "tokens that the draft model has to catch up on"),
    _one("context", "log2 of 131072", "context length in tokens"),
    _one("generated", "log2 of 8192", "tokens generated so far"),
    _one("remaining", "log2 of 8192", "tokens until the request's limit"),
)
_LOG_BASES = (4096, 256, 32, 64, 16, 4096, 1024, 131072, 8192, 8192)
_MATCH = (
    _one("match_1", "flag", "the proposal comes from an n-gram of 1"),
    _one("match_2", "flag", "the proposal comes from an n-gram of 2"),
    _one("match_3", "flag", "the proposal comes from an n-gram of 3"),
    _one("match_4_up", "flag", "the proposal comes from an n-gram of 4 or more"),
)
AGREEMENT_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of the columns `agreement_*`."""
_AGREEMENT = tuple(
    _one(
        f"agreement_{depth}",
        "fraction",
        f"weighted earlier places that go on like the first {depth} proposed tokens, or all K if fewer",
    )
    for depth in AGREEMENT_DEPTHS
)
_TARGET = (
    _one("target_known", "flag", "the next two are known"),
    _one("target_top1", "probability", "target's largest probability at the last token"),
    _one("target_entropy", "of 5 nats", "target's entropy there"),
)
_DRAFT = (
    _one("draft_known", "flag", "the drafter showed its confidence last round"),
    _one("draft_top1_first", "probability", "its largest probability at the first position"),
    _one("draft_top1_mean", "probability", "the same, mean over positions"),
    _one("draft_top1_min", "probability", "the same, lowest of the positions"),
    _one("draft_entropy_mean", "of 5 nats", "its entropy, mean over positions"),
    _one("draft_margin_mean", "probability", "largest less second largest, mean over positions"),
)
_LOAD_STARTS = (1, 2, 3, 5, 9, 17, 33)
_LOAD = (
    _one("load_1", "flag", "1 sequence runs"),
    _one("load_2", "flag", "2 sequences run"),
    _one("load_3_4", "flag", "3 or 4 run"),
    _one("load_5_8", "flag", "5 to 8 run"),
    _one("load_9_16", "flag", "9 to 16 run"),
    _one("load_17_32", "flag", "17 to 32 run"),
    _one("load_33_up", "flag", "33 or more run"),
)
_ROUND = (
    _one("running", "log2 of 256", "sequences that decode"),
    _one("running_share", "of slots", "the same"),
    _one("waiting_share", "of slots", "requests that wait"),
    _one("kv_used", "fraction", "KV blocks in use"),
    _one("kv_room", "of 4 rounds", "free KV for rounds in which all sequences draft 8 tokens"),
    _one("pass_tokens", "log2 of 4096", "tokens in the pass if nobody drafts"),
    _one("prefill_share", "fraction", "share of prompt tokens in them"),
    _one(
        "verify_price",
        "survival",
        "time that one more token for each sequence adds to the pass, relative to the pass: the "
        "chance of acceptance from which that token pays for itself",
        low=-1.0,
        high=2.0,
    ),
    _one(
        "verify_price_deep",
        "survival",
        "the same, per token, if each sequence drafts 8 tokens",
        low=-1.0,
        high=2.0,
    ),
    _one("draft_price", "of the pass", "time of one draft pass over all sequences", high=2.0),
    _one("batch_acceptance", "fraction", "mean `acceptance` of the running sequences"),
    _one("batch_offer_share", "fraction", "share of them with a proposal"),
    _one("batch_last_depth", _TOKENS, "mean `last_depth`", high=_FAR),
)

FEATURES: tuple[Feature, ...] = (
    *(*_LINEAR, *_LOG, *_MATCH, *_AGREEMENT),
    *(*_TARGET, *_DRAFT, *_LOAD, *_ROUND),
)
"""All columns in order."""
FEATURE_NAMES: tuple[str, ...] = tuple(feature.name for feature in FEATURES)
NUM_FEATURES = len(FEATURES)
"""F."""
LOW: NDArray[np.float32] = np.array([feature.low for feature in FEATURES], np.float32)
HIGH: NDArray[np.float32] = np.array([feature.high for feature in FEATURES], np.float32)

_AT_LOG = len(_LINEAR)
_AT_MATCH = _AT_LOG + len(_LOG)
_AT_AGREEMENT = _AT_MATCH + len(_MATCH)
_AT_TARGET = _AT_AGREEMENT + len(_AGREEMENT)
_AT_DRAFT = _AT_TARGET + len(_TARGET)
_AT_LOAD = _AT_DRAFT + len(_DRAFT)
_AT_ROUND = _AT_LOAD + len(_LOAD)
_LOG_SCALE: Floats = 1.0 / np.log2(1.0 + np.array(_LOG_BASES, np.float64))[:, None]
_MATCH_SIZES = np.arange(1, 5)
_AGREEMENT_COLUMNS = np.array(AGREEMENT_DEPTHS) - 1
_ENTROPY_SCALE = 0.2
for _array in (LOW, HIGH, _LOG_SCALE, _MATCH_SIZES, _AGREEMENT_COLUMNS):
    _array.flags.writeable = False


def feature_matrix(state: RoundState) -> NDArray[np.float32]:
    """Return a new float32 [R, F] matrix, one row a running sequence, for `state`.

    Takes 35 to 55 microseconds for 32 sequences: columns are written in groups, since each numpy
    call costs about one.
    """
    out = np.zeros((state.num_running, NUM_FEATURES), np.float32)
    if state.num_running == 0:
        return out
    _write_sequences(out, state)
    if state.drafter == "draft-model":
        _write_draft(out, state)
    _write_round(out, state)
    np.copyto(out, 0.0, where=out != out)  # NaN is the one value that differs from itself
    # np.clip and ndarray.clip spend 3 microseconds on checks that these two do not
    np.maximum(out, LOW, out=out)
    np.minimum(out, HIGH, out=out)
    return out


def _write_sequences(out: NDArray[np.float32], state: RoundState) -> None:
    linear = np.array(
        (
            state.acceptance_ema,
            state.acceptance_ema_slow,
            state.match_agreement,
            state.match_in_output,
            state.last_depth,
            state.last_accepted,
            state.proposal_length,
            state.max_depths,
            state.num_remaining,
            state.full_streak,
            state.last_match_length,
        ),
        np.float64,
    )
    linear[4:9] *= 1.0 / UNIT_DEPTH
    linear[9:] *= 0.25
    out[:, :_AT_LOG] = linear.T
    counts = np.array(
        (
            state.num_drafted_tokens,
            state.num_drafted_rounds,
            state.rounds_since_draft,
            state.num_matches,
            state.match_tokens,
            state.match_distance,
            state.draft_lag,
            state.positions,
            state.num_generated,
            state.num_remaining,
        ),
        np.float64,
    )
    np.maximum(counts, 0.0, out=counts)
    counts += 1.0
    np.log2(counts, out=counts)
    counts *= _LOG_SCALE
    out[:, _AT_LOG:_AT_MATCH] = counts.T
    sizes = np.minimum(state.match_length, 4)
    out[:, _AT_MATCH:_AT_AGREEMENT] = sizes[:, None] == _MATCH_SIZES
    if state.max_num_speculative_tokens:
        shown = state.agreement.take(_AGREEMENT_COLUMNS, axis=1, mode="clip")
        out[:, _AT_AGREEMENT:_AT_TARGET] = shown
    top1 = state.target_top1
    out[:, _AT_TARGET] = top1 == top1
    out[:, _AT_TARGET + 1] = top1
    out[:, _AT_TARGET + 2] = state.target_entropy * _ENTROPY_SCALE


def _write_draft(out: NDArray[np.float32], state: RoundState) -> None:
    top1 = state.draft_top1
    if top1.shape[1] == 0:
        return
    signals = np.array((top1, state.draft_entropy, state.draft_margin))
    known = signals == signals
    np.copyto(signals, 0.0, where=~known)  # nanmean takes ten times as long and warns on empty rows
    num_known = np.add.reduce(known[0], axis=1, dtype=np.float64)
    means = np.add.reduce(signals, axis=2) / np.maximum(num_known, 1.0)
    at = _AT_DRAFT
    out[:, at] = num_known > 0
    out[:, at + 1] = top1[:, 0]
    out[:, at + 2] = means[0]
    out[:, at + 3] = np.fmin.reduce(top1, axis=1)  # NaN only where nothing is known
    out[:, at + 4] = means[1] * _ENTROPY_SCALE
    out[:, at + 5] = means[2]


def _write_round(out: NDArray[np.float32], state: RoundState) -> None:
    running, slots, cost = state.num_running, state.max_num_seqs, state.cost
    prefill = max(state.num_prefill_tokens, 0)
    context = max(state.num_context_tokens, 0)
    num_tokens = running + prefill
    pass_s = cost.pass_s(num_tokens, prefill, context)
    next_s = cost.pass_s(num_tokens + running, prefill, context)
    deep_s = cost.pass_s(num_tokens + running * UNIT_DEPTH, prefill, context)
    draft_s = cost.draft_pass_s(running) if state.drafter == "draft-model" else 0.0
    load = sum(running >= first for first in _LOAD_STARTS) - 1
    out[:, _AT_LOAD + load] = 1.0
    drafted_before = np.maximum(state.last_depth, 0)
    out[:, _AT_ROUND:] = (
        _log2_of(running, 256),
        running / slots,
        state.num_waiting / slots,
        state.kv_used_fraction,
        state.num_free_blocks * state.block_size / (4.0 * running * (UNIT_DEPTH + 1)),
        _log2_of(num_tokens, 4096),
        prefill / num_tokens,
        next_s / pass_s - 1.0,
        (deep_s / pass_s - 1.0) / UNIT_DEPTH,
        draft_s / pass_s,
        state.acceptance_ema.sum() / running,
        np.count_nonzero(state.proposal_length > 0) / running,
        drafted_before.sum() / (UNIT_DEPTH * running),
    )


def _log2_of(count: int, top: int) -> float:
    return math.log2(1 + count) / math.log2(1 + top)
