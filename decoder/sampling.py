"""From logits to token ids: the sampling law and keyed random draws. Pure functions.

Legend: N rows, V vocabulary. Nothing here keeps state: every random number is a hash of its key, so
a draw does not depend on batch, device, order of calls or what else was drawn.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import bf16_rows
from .gumbel_race import can_race, race

_PREFILTER_WIDTH = 64
_BLOCK = 64
_SAMPLE_BLOCK = 256
_CACHED_VALUES = 2**18
_RACE_CHUNK = 2**16
_SPARSE_RATIO = 8
_MIN_TEMPERATURE = 1e-20


class Stream(IntEnum):
    """What a draw is for; draws of different streams are independent."""

    DRAFT = 1
    """Which token the draft model proposes."""
    ACCEPT = 2
    """Whether a proposed token is accepted."""
    FINAL = 3
    """The recovered or bonus token of a round."""
    GUMBEL = 4
    """Noise that draft and target share under coupled verification."""


def _signed(bits: int) -> int:
    """Two's complement: torch has no uint64 arithmetic, and int64 wraps around to the same bits."""
    return bits - 2**64 if bits >= 2**63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_STREAM_STEP = 0xD1B54A32D192ED03


def _mix_(bits: Tensor) -> Tensor:
    """Output function of SplitMix64 [Steele, Lea, Flood 2014], in place on int64.

    `>>` on int64 copies the sign, so each shift is masked to make it a logical one.
    """
    bits.bitwise_xor_((bits >> 30).bitwise_and_(2**34 - 1)).mul_(_MIX_1)
    bits.bitwise_xor_((bits >> 27).bitwise_and_(2**37 - 1)).mul_(_MIX_2)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(2**33 - 1))


def _absorb(state: Tensor | int, key: Tensor) -> Tensor:
    """Hash `key` into `state`; for fixed `state` no two keys collide."""
    return _mix_(key * _GOLDEN + state)


def _to_unit_(bits: Tensor) -> Tensor:
    """Top 52 bits of a hash as the middle of one of 2^52 equal cells of (0, 1), float64.

    52 and not 53: the largest middle of 2^53 cells would round to 1.
    """
    return (bits >> 12).bitwise_and_(2**52 - 1).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _row_keys(seed: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """Hash of (stream, seed, position), int64."""
    return _absorb(_absorb(_signed(stream * _STREAM_STEP % 2**64), seed), position)


def uniform(seed: Tensor, position: Tensor, attempt: Tensor, stream: Stream) -> Tensor:
    """Uniform draw in (0, 1) for each key; the same bits on every device.

    Args:
        seed: int64, the request's own seed.
        position: int64, index in the sequence of the token that the draw is about.
        attempt: int64, the request's round. A token may be drafted at one position in several
            rounds; if those drafts shared a draw, a scheduler that has seen the first could choose
            the fate of the second, and bend the law.
        stream: what the draw is for.

    Returns:
        float64 of the broadcast shape, strictly between 0 and 1, on a grid of 2^-52.
    """
    return _to_unit_(_absorb(_row_keys(seed, position, stream), attempt))


def round_uniforms(
    seed: Tensor, position: Tensor, attempt: Tensor, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Draws of one verification round for `verify_rejection`.

    Args:
        seed: int64 [R].
        position: int64 [R], index of the first token that the round decides.
        attempt: int64 [R], never the same for two rounds of a request.
        max_depth: K, columns of the result.

    Returns:
        Accept draws [R, K] and final draws [R], float64.
    """
    columns = torch.arange(max_depth, device=position.device)
    accept = uniform(seed[:, None], position[:, None] + columns, attempt[:, None], Stream.ACCEPT)
    return accept, uniform(seed, position, attempt, Stream.FINAL)


def token_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities that a request asks for: temperature, then top-k, then top-p.

    The same function serves draft and target. Top-k and top-p cut at a *value*: every token as
    likely as the least likely kept one is kept too, so the law depends on the logits alone and
    never on how a sort breaks ties. Top-p keeps the most likely tokens whose predecessors hold
    less than `top_p` of the mass that top-k left.

    Numerics: softmax in the dtype of the logits (float32 for bf16 and fp16), cumulative mass in
    float64. Rows do not influence one another. On the CPU the cut is looked for among the 64 most
    likely tokens, and a row is sorted whole only if it lies beyond; on CUDA rows are sorted whole,
    because looking at whether the 64 were enough would make the host wait for the device.

    Args:
        logits: [N, V], without vocabulary padding.
        temperature: float [N] on the CPU: paths are chosen by its values. 0 makes the row a point
            mass at the first largest logit; below 1e-20 counts as 1e-20.
        top_k: int [N] on the CPU; 0 keeps all.
        top_p: float [N] on the CPU, in (0, 1].

    Returns:
        [N, V] float32, or float64 for float64 logits; a new tensor.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    num_rows, vocab_size = logits.shape
    greedy = temperature == 0
    if bool(greedy.all()):
        return _point_masses(logits)
    divisor = None
    if bool((temperature != 1).any()):
        divisor = temperature.masked_fill(greedy, 1).clamp(min=_MIN_TEMPERATURE).to(logits)
    top_k = top_k.where((top_k < vocab_size) & ~greedy, 0)
    top_p = top_p.double().where(~greedy, 1)
    probs = torch.empty_like(logits)
    for rows in cache_slices(num_rows, logits):
        scaled = logits[rows] if divisor is None else logits[rows] / divisor[rows, None]
        torch.softmax(scaled, -1, out=probs[rows])
        if bool(((top_k[rows] > 0) | (top_p[rows] < 1)).any()):
            _filter_(probs[rows], top_k[rows].to(probs.device), top_p[rows].to(probs.device))
    if bool(greedy.any()):
        at = greedy.nonzero()[:, 0].to(logits.device)
        probs[at] = _point_masses(logits[at])
    return probs


def cache_slices(num_rows: int, like: Tensor) -> list[slice]:
    """Slices of `num_rows` rows as wide as those of `like` [., V] that a CPU's cache holds together
    with a copy or two; on other devices one slice with all. Never none.
    """
    num_rows = max(num_rows, 1)
    step = max(_CACHED_VALUES // like.shape[1], 1) if like.device.type == "cpu" else num_rows
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def argmax(logits: Tensor) -> Tensor:
    """First largest entry of each row, int64 [N]: greedy decoding.

    On the CPU by a kernel in bfloat16, else by numpy, which is ten times as fast as torch. All break ties
    alike.
    """
    if bf16_rows.can_read(logits):
        return bf16_rows.argmax(logits)
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    return torch.from_numpy(logits.numpy().argmax(-1))


def _point_masses(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(1, argmax(logits)[:, None], 1.0)


def _filter_(probs: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Cut and renormalise the rows of `probs` [n, V], in place; top_k 0 and top_p 1 cut nothing."""
    if probs.device.type == "cpu" and probs.shape[1] >= _BLOCK * _PREFILTER_WIDTH:
        floor, total, found = _cut(_largest(probs), top_k, top_p)
        if not bool(found.all()):
            beyond = (~found).nonzero()[:, 0]
            values = _descending(probs[beyond])
            floor[beyond], total[beyond], _ = _cut(values, top_k[beyond], top_p[beyond])
    else:
        floor, total, _ = _cut(_descending(probs), top_k, top_p)
    if probs.device.type == "cpu":  # four times as fast as masked_fill_
        array = probs.numpy()
        np.multiply(array, array >= floor[:, None].numpy(), out=array)
    else:
        probs.masked_fill_(probs < floor[:, None], 0.0)
    probs.div_(total[:, None])


def _cut(values: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the least kept probability, given the W largest of each row, [n, W] descending.

    Returns:
        That probability [n] (0 keeps all), the mass that it keeps [n], and bool [n]: whether both
        are right, however the row goes on beyond the W.
    """
    width = values.shape[1]
    has_top_k, has_top_p = top_k > 0, top_p < 1
    fits = ~has_top_k | (top_k <= width)
    kth = values.gather(1, (top_k.clamp(1, width) - 1)[:, None])
    mass = values.double().masked_fill((values < kth) & has_top_k[:, None], 0.0)
    budget = top_p * torch.where(has_top_k, mass.sum(-1), 1.0)
    before = mass.cumsum(-1) - mass
    kept = (mass > 0) & ((before < budget[:, None]) | ~has_top_p[:, None])
    floor = values.masked_fill(~kept, torch.inf).amin(-1)
    total = mass.masked_fill_(values < floor[:, None], 0.0).sum(-1)
    last = values[:, -1]
    unfiltered = ~(has_top_k | has_top_p)
    found = unfiltered | (last <= 0) | (fits & (last < floor))
    floor, total = floor.masked_fill(unfiltered, 0.0), total.masked_fill(unfiltered, 1.0)
    return floor, total.to(values.dtype), found


def _largest(probs: Tensor) -> Tensor:
    """The `_PREFILTER_WIDTH` largest values of each row, descending.

    They lie in as many blocks, those with the largest maxima: each of these blocks has a value at
    least as large as any elsewhere. Three times as fast as topk over the row.
    """
    num_rows, vocab_size = probs.shape
    blocks = F.pad(probs, (0, -vocab_size % _BLOCK), value=-1.0).view(num_rows, -1, _BLOCK)
    chosen = blocks.amax(-1).topk(_PREFILTER_WIDTH, -1, sorted=False).indices
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    return inside.topk(_PREFILTER_WIDTH, -1).values


def _descending(probs: Tensor) -> Tensor:
    """All values of each row, descending. On the CPU numpy sorts: it can leave the indices out and
    use SIMD (20 times as fast as torch with AVX-512).
    """
    if probs.device.type != "cpu":
        return probs.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(probs.numpy(), -1)).flip(-1)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution, in float64.

    Never returns a token of probability 0, whatever the uniform.

    Args:
        probs: [N, V] weights >= 0; rows need not sum to 1.
        uniforms: float64 [N] in [0, 1].

    Returns:
        int64 [N]. Non-decreasing in the uniform. Undefined, but inside the vocabulary, for rows
        that sum to 0.
    """
    num_rows, vocab_size = probs.shape
    block = min(_SAMPLE_BLOCK, vocab_size)
    num_blocks = -(-vocab_size // block)
    if vocab_size % block:  # F.pad copies even where nothing is added
        probs = F.pad(probs, (0, -vocab_size % block))
    blocks = probs.reshape(num_rows, num_blocks, block)
    # Two levels, because a float64 cumulative sum over 49k columns costs as much as ten sums.
    block_mass = blocks.sum(-1, dtype=torch.float64)
    chosen, rest = _first_above(block_mass, uniforms.double() * block_mass.sum(-1))
    inside = blocks[torch.arange(num_rows, device=probs.device), chosen].double()
    offset, _ = _first_above(inside, rest)
    return (chosen * block + offset).clamp_(max=vocab_size - 1)


def _first_above(mass: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """First entry of each row, mass > 0, at which the running sum of `mass` [N, M] exceeds `level`
    [N]; and what of `level` falls inside that entry.
    """
    # A parallel running sum (CUDA) may fall by a rounding error across an entry of mass 0, and the
    # level may round up to the total: mask the one, cap the other.
    running = mass.cumsum(-1)
    reached = running.masked_fill(mass <= 0, 0.0)
    top = reached.amax(-1)
    level = torch.minimum(level, torch.nextafter(top, torch.zeros_like(top)))
    index = (reached > level[:, None]).to(torch.uint8).argmax(-1)
    before = (running - mass).gather(1, index[:, None])[:, 0]
    return index, (level - before).clamp_(min=0.0)


def gumbel_argmax(probs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Exact sample of each row by argmax(log p + g), g Gumbel noise keyed by (seed, position, id).

    Whoever calls this with the same seed and position shares the noise: a draft and a target that
    agree on p agree on the token, and the target's tokens do not depend on the draft at all
    [Daliri, Musco, Suresh 2024, arXiv 2408.07978]. A point mass gives its token, so temperature 0
    is plain argmax.

    Computed as the equivalent argmin of -log(u) / p in float64 (an exponential race: one logarithm
    less), ties to the lowest id. On CPUs with AVX-512 `gumbel_race.c` runs it. Elsewhere noise is
    hashed only where p > 0 on the CPU, rows with few survivors being packed; on CUDA all are
    hashed, since packing would make the host wait.

    Args:
        probs: [N, V] weights >= 0; rows need not sum to 1, but must not be all 0.
        seed: int64 [N].
        position: int64 [N], index in the sequence of the token to draw.

    Returns:
        int64 [N].
    """
    keys = _row_keys(seed, position, Stream.GUMBEL)
    if can_race(probs):
        return race(probs, keys)
    if probs.device.type != "cpu":
        return _race_dense(probs, keys)
    survivors = torch.from_numpy(np.flatnonzero(probs.numpy() > 0))
    if len(survivors) * _SPARSE_RATIO <= probs.numel():
        return _race_sparse(probs, keys, survivors)
    step = max(_RACE_CHUNK // probs.shape[1], 1)
    chunks = (slice(start, start + step) for start in range(0, len(probs), step))
    return torch.cat([_race_dense(probs[rows], keys[rows]) for rows in chunks])


def _race_times(probs: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """Arrival times -log(u) / p of the tokens `ids`, float64; infinite where p = 0."""
    return _to_unit_(_absorb(keys, ids)).log_().neg_().div_(probs)


def _race_dense(probs: Tensor, keys: Tensor) -> Tensor:
    ids = torch.arange(probs.shape[1], device=probs.device)
    return _race_times(probs, keys[:, None], ids).argmin(-1)


def _race_sparse(probs: Tensor, keys: Tensor, survivors: Tensor) -> Tensor:
    """As `_race_dense`, for the entries `survivors` of the flattened `probs`, ascending."""
    num_rows, vocab_size = probs.shape
    rows, ids = survivors // vocab_size, survivors % vocab_size
    times = _race_times(probs.flatten()[survivors], keys[rows], ids)
    first = times.new_full((num_rows,), torch.inf).scatter_reduce_(0, rows, times, "amin")
    ids = ids.masked_fill(times > first[rows], vocab_size - 1)
    return ids.new_full((num_rows,), vocab_size - 1).scatter_reduce_(0, rows, ids, "amin")
