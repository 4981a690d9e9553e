"""Losslessness on one screen: which drafted tokens stand, and what comes after them.

Pure functions of probabilities, tokens and uniforms. Legend: R sequences, K = largest depth, V
vocabulary, k_i the depth of sequence i, N = sum(1 + k_i) rows of a packed target pass, sequence by
sequence, positions in order: row j of a sequence judges its draft token j, row k_i gives the bonus.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import cache_slices, sample

PADDING = -1
"""Fills `Verification.token_ids` after the last emitted token."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What a round adds to each sequence."""

    num_accepted: Tensor
    """int64 [R], drafted tokens that stand; the bonus or recovered token is not counted."""
    token_ids: Tensor
    """int64 [R, K + 1]: accepted tokens, then the bonus or recovered one, then `PADDING`."""


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Distributions that the drafted tokens were drawn from, packed.

    A draft pass that goes over D sequences appends its D rows, whatever the sequences; nothing is
    padded, so the size goes by the number of drafted tokens.
    """

    probs: Tensor
    """[M, V], as `sample` drew from them. V is the target's; tokens that the draft model
    cannot name have probability 0."""
    rows: Tensor
    """int64 [R, K]: row of `probs` for draft token j of sequence i; any value from the depth on."""


def row_offsets(depths: Tensor) -> Tensor:
    """First packed row of each sequence, int64 [R], for depths int64 [R]."""
    return (depths + 1).cumsum(0) - (depths + 1)


def packed_rows(depths: Tensor, max_depth: int) -> Tensor:
    """Packed rows of each sequence, int64 [R, K + 1]; its last row repeats where it is shorter."""
    columns = torch.arange(max_depth + 1, device=depths.device)
    return row_offsets(depths)[:, None] + torch.minimum(columns, depths[:, None])


def verify_equal(target_ids: Tensor, draft_ids: Tensor, depths: Tensor) -> Verification:
    """Accept drafted tokens while they equal the target's own: greedy and coupled verification.

    Lossless for any drafter and any depths, chosen in whatever way: each emitted token is the
    target's own choice after the tokens before it [Daliri et al. 2024 for the coupled rule].

    Args:
        target_ids: int64 [N], the target's token for each packed row.
        draft_ids: int64 [R, K], arbitrary from the depth on.
        depths: int64 [R], each in 0..K.
    """
    max_depth = draft_ids.shape[1]
    chosen = target_ids[packed_rows(depths, max_depth)]
    num_accepted = _accepted_run(chosen[:, :max_depth] == draft_ids, depths)
    return Verification(num_accepted, _up_to(chosen, num_accepted))


def verify_rejection(
    target_probs: Tensor,
    draft_ids: Tensor,
    draft_probs: DraftProbs | None,
    depths: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
) -> Verification:
    """Speculative sampling [Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
    arXiv 2302.01318]: the emitted tokens have the target's law.

    A token x drawn from q stands with probability min(1, p(x) / q(x)). At the first that falls, the
    token is drawn from max(p - q, 0), normalised; where all stand, a bonus token from p. A
    proposal that was not drawn (prompt lookup) is a point mass: x stands with probability p(x),
    else the token is drawn from p without x. Sequences at temperature 0 hold point masses, for
    which this is exactly greedy verification.

    The law holds only if depths do not depend on the drafted tokens or on the uniforms, except for
    point-mass proposals, where depths may depend on anything but the uniforms.

    Args:
        target_probs: [N, V] float32 or float64, rows as the module says.
        draft_ids: int64 [R, K], arbitrary from the depth on.
        draft_probs: what they were drawn from; None for point masses.
        depths: int64 [R], each in 0..K.
        accept_uniforms: float64 [R, K] in (0, 1).
        final_uniforms: float64 [R] in (0, 1), independent of the former.
    """
    max_depth = draft_ids.shape[1]
    if draft_probs is not None and not len(draft_probs.probs):
        draft_probs = None  # nothing was drafted, and there is no row to look at
    outside = torch.arange(max_depth, device=depths.device) >= depths[:, None]
    rows = packed_rows(depths, max_depth)
    draft_ids = draft_ids.masked_fill(outside, 0)
    target_of_draft = target_probs[rows[:, :max_depth], draft_ids].double()
    if draft_probs is None:
        stands = accept_uniforms < target_of_draft
    else:
        draft_rows = draft_probs.rows.masked_fill(outside, 0)
        draft_of_draft = draft_probs.probs[draft_rows, draft_ids].double()
        stands = accept_uniforms * draft_of_draft < target_of_draft
    num_accepted = _accepted_run(stands, depths)

    at = num_accepted[:, None]
    law_rows = rows.gather(1, at)[:, 0]
    fallen = at.clamp(max=max_depth - 1)
    has_fallen = num_accepted < depths
    final_ids = []
    for part in cache_slices(len(depths), target_probs):
        weights = target_probs.index_select(0, law_rows[part])
        if draft_probs is not None:
            drawn_from = draft_rows[part].gather(1, fallen[part])[:, 0]
            draft_weights = draft_probs.probs.index_select(0, drawn_from).to(weights.dtype)
            weights = _residual(weights, draft_weights, has_fallen[part])
        elif max_depth:
            _take_out_(weights, draft_ids[part].gather(1, fallen[part]), has_fallen[part])
        final_ids.append(sample(weights, final_uniforms[part]))
    last_ids = torch.cat(final_ids)[:, None]
    token_ids = torch.cat([draft_ids, last_ids], 1).scatter(1, at, last_ids)
    return Verification(num_accepted, _up_to(token_ids, num_accepted))


def _take_out_(weights: Tensor, token_ids: Tensor, where: Tensor) -> None:
    """Residual of point masses at `token_ids` [n, 1], in place, in the rows `where` [n].

    A residual can only be empty by rounding, when p and q are equal: then p is the law.
    """
    kept = weights.gather(1, token_ids)
    weights.scatter_(1, token_ids, 0.0)
    stays = ~where | (weights.amax(-1) <= 0)
    weights.scatter_(1, token_ids, kept * stays[:, None])


def _residual(weights: Tensor, draft_weights: Tensor, where: Tensor) -> Tensor:
    """The same for any draft law [n, V], which is overwritten."""
    residual = torch.sub(weights, draft_weights, out=draft_weights).clamp_(min=0.0)
    use_residual = where & (residual.amax(-1) > 0)
    return torch.where(use_residual[:, None], residual, weights)


def _accepted_run(stands: Tensor, depths: Tensor) -> Tensor:
    """Length of the run of tokens that stand from the front, int64 [R]."""
    columns = torch.arange(stands.shape[1], device=depths.device)
    return (stands & (columns < depths[:, None])).cumprod(1).sum(1)


def _up_to(token_ids: Tensor, last: Tensor) -> Tensor:
    """Keep columns 0..last of `token_ids`, `PADDING` after them."""
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    return token_ids.masked_fill(columns > last[:, None], PADDING)
