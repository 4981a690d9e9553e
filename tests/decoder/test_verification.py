"""Properties of the verification rules; their law is in test_verification_exact.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdepth.decoder import sampling
from specdepth.decoder.sampling import sample, token_probs
from specdepth.decoder.verification import (
    PADDING,
    DraftProbs,
    Verification,
    packed_rows,
    row_offsets,
    verify_equal,
    verify_rejection,
)

DEPTHS = st.lists(st.integers(0, 4), max_size=6)
SEEDS = st.integers(0, 10**6)
MAX_DEPTH = 4


class Round:
    """A random round: R sequences of ragged depths over a vocabulary of 6."""

    vocab_size = 6

    def __init__(self, seed: int, depths: list[int], dtype: torch.dtype = torch.float64) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.depths = torch.tensor(depths, dtype=torch.int64)
        num_seqs, num_drafts = len(depths), sum(depths)
        self.target_probs = self.random_probs(num_drafts + num_seqs, dtype)
        rows = torch.randint(max(num_drafts, 1), (num_seqs, MAX_DEPTH), generator=self.generator)
        order = torch.randperm(num_drafts, generator=self.generator)  # drafts come pass by pass
        drafted = torch.arange(MAX_DEPTH) < self.depths[:, None]
        rows[drafted] = order
        self.draft_probs = DraftProbs(self.random_probs(num_drafts, dtype), rows)
        self.draft_ids = torch.full((num_seqs, MAX_DEPTH), -7)  # whatever a buffer may hold
        draws = torch.rand(num_drafts, generator=self.generator, dtype=torch.float64)
        self.draft_ids[drafted] = sample(self.draft_probs.probs, draws)[order]
        self.accept_uniforms = self.uniforms(num_seqs, MAX_DEPTH)
        self.final_uniforms = self.uniforms(num_seqs)

    def uniforms(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).clamp(min=1e-12)

    def random_probs(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        logits = 2 * torch.randn(num_rows, self.vocab_size, generator=self.generator, dtype=dtype)
        return token_probs(
            logits,
            torch.ones(num_rows),
            torch.full((num_rows,), 4),  # zeros on both sides, not at the same tokens
            torch.ones(num_rows),
        )

    def verify(self, point_mass: bool = False) -> Verification:
        return verify_rejection(
            self.target_probs,
            self.draft_ids,
            None if point_mass else self.draft_probs,
            self.depths,
            self.accept_uniforms,
            self.final_uniforms,
        )

    def target_row(self, sequence: int, position: int) -> Tensor:
        return self.target_probs[int((self.depths[:sequence] + 1).sum()) + position]


def check_shape_of_result(result: Verification, draft_ids: Tensor, depths: Tensor) -> None:
    """The accepted tokens are a prefix of the draft; one token more is emitted; then padding."""
    assert result.token_ids.shape == (len(depths), draft_ids.shape[1] + 1)
    for i, (accepted, depth) in enumerate(zip(result.num_accepted, depths, strict=True)):
        assert 0 <= accepted <= depth
        assert torch.equal(result.token_ids[i, :accepted], draft_ids[i, :accepted])
        assert result.token_ids[i, accepted] >= 0
        assert (result.token_ids[i, accepted + 1 :] == PADDING).all()


@given(DEPTHS)
def test_packed_rows_follow_one_another_and_repeat_the_last(depths):
    expected, row = [], 0
    for depth in depths:
        expected.append([row + min(j, depth) for j in range(MAX_DEPTH + 1)])
        row += depth + 1
    tensor = torch.tensor(depths, dtype=torch.int64)
    assert packed_rows(tensor, MAX_DEPTH).tolist() == expected
    assert row_offsets(tensor).tolist() == [rows[0] for rows in expected]


# Greedy and coupled


@given(SEEDS, DEPTHS)
def test_equal_emits_the_targets_tokens_up_to_the_first_that_differs(seed, depths):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(2, (sum(depths) + len(depths),), generator=generator)
    draft = torch.randint(2, (len(depths), MAX_DEPTH), generator=generator)
    result = verify_equal(target, draft, torch.tensor(depths, dtype=torch.int64))
    check_shape_of_result(result, draft, torch.tensor(depths))
    start = 0
    for i, depth in enumerate(depths):
        own = target[start : start + depth + 1].tolist()
        agreed = [own[j] == draft[i, j] for j in range(depth)]
        accepted = [*agreed, False].index(False)
        assert result.num_accepted[i] == accepted
        assert result.token_ids[i, : accepted + 1].tolist() == own[: accepted + 1]
        start += depth + 1


def test_equal_ignores_what_lies_beyond_the_depth():
    draft = torch.tensor([[3, 9], [9, 9]])
    result = verify_equal(torch.tensor([3, 9, 9]), draft, torch.tensor([1, 0]))
    assert result.num_accepted.tolist() == [1, 0]
    assert result.token_ids.tolist() == [[3, 9, PADDING], [9, PADDING, PADDING]]


# Rejection


@given(SEEDS, DEPTHS, st.booleans(), st.integers(1, 3))
def test_rejection_decides_alike_in_slices_of_any_size(seed, depths, point_mass, num_rows):
    batch = Round(seed, depths)
    whole = batch.verify(point_mass)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CACHED_VALUES", num_rows * batch.vocab_size)
        parts = batch.verify(point_mass)
    assert torch.equal(parts.num_accepted, whole.num_accepted)
    assert torch.equal(parts.token_ids, whole.token_ids)


@settings(max_examples=150)
@given(SEEDS, DEPTHS, st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_rejection_emits_an_accepted_prefix_and_one_token_of_positive_probability(
    seed, depths, point_mass, dtype
):
    batch = Round(seed, depths, dtype)
    result = batch.verify(point_mass)
    check_shape_of_result(result, batch.draft_ids, batch.depths)
    for i, accepted in enumerate(result.num_accepted.tolist()):
        for j in range(accepted + 1):
            assert batch.target_row(i, j)[result.token_ids[i, j]] > 0
        if accepted < depths[i]:
            final, draft = result.token_ids[i, accepted], batch.draft_ids[i, accepted]
            row = batch.draft_probs.probs[batch.draft_probs.rows[i, accepted]]
            assert final != draft
            assert point_mass or batch.target_row(i, accepted)[final] > row[final]


@given(SEEDS, DEPTHS)
def test_a_draft_with_the_targets_law_is_accepted_whole(seed, depths):
    batch = Round(seed, depths)
    rows = packed_rows(batch.depths, MAX_DEPTH)[:, :MAX_DEPTH]
    batch.draft_probs = DraftProbs(batch.target_probs, rows)
    for i, depth in enumerate(depths):
        for j in range(depth):
            batch.draft_ids[i, j] = sample(batch.target_row(i, j)[None], batch.uniforms(1))[0]
    batch.accept_uniforms.fill_(1 - 2.0**-53)  # the hardest draw there is
    assert batch.verify().num_accepted.tolist() == depths


@given(SEEDS, DEPTHS)
def test_a_draft_with_disjoint_support_is_rejected_whole_and_recovered_from_the_target(
    seed, depths
):
    batch = Round(seed, depths)
    batch.target_probs[:, 3:] = 0
    batch.target_probs += torch.tensor([1e-3] * 3 + [0.0] * 3)
    batch.draft_probs.probs[:, :3] = 0
    batch.draft_ids = batch.draft_ids.clamp(min=3)
    batch.accept_uniforms.fill_(2.0**-53)  # the easiest draw there is
    result = batch.verify()
    assert not result.num_accepted.any()
    first = batch.target_probs[row_offsets(batch.depths)]
    assert torch.equal(result.token_ids[:, 0], sample(first, batch.final_uniforms))


@given(SEEDS, st.lists(st.integers(0, 4), min_size=2, max_size=6), st.booleans())
def test_a_sequence_does_not_depend_on_the_others_in_the_batch(seed, depths, point_mass):
    batch = Round(seed, depths)
    together = batch.verify(point_mass)
    order = torch.randperm(len(depths), generator=batch.generator)
    starts = row_offsets(batch.depths)
    rows = torch.cat([starts[i] + torch.arange(depths[i] + 1) for i in order.tolist()])
    shuffled = verify_rejection(
        batch.target_probs[rows],
        batch.draft_ids[order],
        None if point_mass else DraftProbs(batch.draft_probs.probs, batch.draft_probs.rows[order]),
        batch.depths[order],
        batch.accept_uniforms[order],
        batch.final_uniforms[order],
    )
    assert torch.equal(shuffled.num_accepted, together.num_accepted[order])
    assert torch.equal(shuffled.token_ids, together.token_ids[order])


@given(SEEDS, DEPTHS, st.booleans())
def test_point_masses_are_verified_greedily_beside_sampled_sequences(seed, depths, point_mass):
    batch = Round(seed, depths)
    logits = torch.randn(len(batch.target_probs), 6, generator=batch.generator)
    num_rows = len(logits)
    greedy_rows = token_probs(logits, torch.zeros(num_rows), *torch.ones(2, num_rows))
    is_greedy = torch.arange(len(depths)) % 2 == 0
    rows_of_greedy = is_greedy.repeat_interleave(batch.depths + 1)
    batch.target_probs[rows_of_greedy] = greedy_rows[rows_of_greedy].double()
    drafted = torch.arange(MAX_DEPTH) < batch.depths[:, None]
    for i in is_greedy.nonzero()[:, 0].tolist():
        for j in range(depths[i]):
            row = batch.draft_probs.rows[i, j]
            batch.draft_probs.probs[row] = torch.eye(6, dtype=torch.float64)[batch.draft_ids[i, j]]
    result = batch.verify(point_mass)
    expected = verify_equal(
        batch.target_probs.argmax(-1), batch.draft_ids.where(drafted, 0), batch.depths
    )
    assert torch.equal(result.num_accepted[is_greedy], expected.num_accepted[is_greedy])
    assert torch.equal(result.token_ids[is_greedy], expected.token_ids[is_greedy])


@pytest.mark.parametrize("point_mass", [True, False])
@pytest.mark.parametrize("max_depth", [0, 3])
@pytest.mark.parametrize("num_seqs", [0, 2])
def test_nothing_drafted_gives_one_token_of_the_target(num_seqs, max_depth, point_mass):
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(num_seqs, -1)
    nothing = torch.full((num_seqs, max_depth), -1)
    result = verify_rejection(
        probs,
        nothing,
        None if point_mass else DraftProbs(torch.zeros(0, 3), nothing),
        torch.zeros(num_seqs, dtype=torch.int64),
        torch.full((num_seqs, max_depth), 0.5, dtype=torch.float64),
        torch.full((num_seqs,), 0.5, dtype=torch.float64),
    )
    assert result.num_accepted.tolist() == [0] * num_seqs
    assert result.token_ids.tolist() == [[1] + [PADDING] * max_depth] * num_seqs


def test_a_residual_that_rounding_emptied_falls_back_to_the_target():
    below = torch.tensor([[0.5, 0.5 - 2.0**-25, 0.0]])  # p <= q everywhere, p(1) < q(1)
    draft = torch.tensor([[0.5, 0.5, 0.0]])
    result = verify_rejection(
        below.repeat(2, 1),
        torch.tensor([[1]]),
        DraftProbs(draft, torch.tensor([[0]])),
        torch.tensor([1]),
        torch.tensor([[1 - 2.0**-53]], dtype=torch.float64),
        torch.tensor([0.75], dtype=torch.float64),
    )
    assert result.num_accepted.tolist() == [0]
    assert result.token_ids[0, 0] == 1


def test_a_rejected_lookup_token_never_comes_back():
    probs = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)
    for step in range(1, 100):
        result = verify_rejection(
            probs,
            torch.tensor([[1]]),
            None,
            torch.tensor([1]),
            torch.tensor([[0.9]], dtype=torch.float64),
            torch.tensor([step / 100], dtype=torch.float64),
        )
        assert result.token_ids[0, 0] == (0 if step < 50 else 2)


@given(SEEDS, DEPTHS)
def test_inputs_are_left_as_they_are(seed, depths):
    batch, copy = Round(seed, depths), Round(seed, depths)
    batch.verify()
    assert torch.equal(batch.target_probs, copy.target_probs)
    assert torch.equal(batch.draft_probs.probs, copy.draft_probs.probs)
    assert torch.equal(batch.draft_probs.rows, copy.draft_probs.rows)
    assert torch.equal(batch.draft_ids, copy.draft_ids)


@pytest.mark.gpu
def test_cuda_verifies_the_same_as_the_cpu():
    for seed in range(20):
        batch = Round(seed, [0, 4, 2, 1, 3])
        on_cuda = verify_rejection(
            batch.target_probs.cuda(),
            batch.draft_ids.cuda(),
            DraftProbs(batch.draft_probs.probs.cuda(), batch.draft_probs.rows.cuda()),
            batch.depths.cuda(),
            batch.accept_uniforms.cuda(),
            batch.final_uniforms.cuda(),
        )
        on_cpu = batch.verify()
        assert torch.equal(on_cuda.num_accepted.cpu(), on_cpu.num_accepted)
        assert torch.equal(on_cuda.token_ids.cpu(), on_cpu.token_ids)
