"""The law of speculative decoding, computed and not sampled, on small vocabularies in float64.

`verify_rejection` itself is measured: for each prefix and each draft that can be drawn there, the set
of uniforms that leads to each outcome is an interval, and its ends are found by bisecting the
function's own answers. No formula of the rule is used, so a wrong rule gives a wrong law; planted
mistakes at the end show that it does.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdepth.decoder.sampling import Stream, round_uniforms, sample, token_probs, uniform
from specdepth.decoder.verification import (
    DraftProbs,
    Verification,
    packed_rows,
    verify_rejection,
)

Prefix = tuple[int, ...]
Verify = Callable[
    [Tensor, Tensor, DraftProbs | None, Tensor, Tensor, Tensor],
    Verification,
]
NUM_BISECTIONS = 36
EASIEST = 1e-300
"""An accept draw for which every token of positive probability stands."""
TOLERANCE = 1e-9
LENGTH = 3
"""Committed tokens whose joint law is compared."""
MAX_DEPTH = 3


class World:
    """Target and draft distributions for every prefix, and a rule for depths."""

    vocab_size = 3
    point_mass = False

    def __init__(self, seed: int, depth: int | None) -> None:
        self.depth = depth
        generator = torch.Generator().manual_seed(seed)
        self.target: dict[Prefix, Tensor] = {}
        self.draft: dict[Prefix, Tensor] = {}
        for length in range(LENGTH + MAX_DEPTH):
            for prefix in itertools.product(range(self.vocab_size), repeat=length):
                self.target[prefix], self.draft[prefix] = self.distributions(generator)

    def distributions(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        weights = torch.rand(2, self.vocab_size, generator=generator, dtype=torch.float64) ** 2
        target, draft = weights / weights.sum(-1, keepdim=True)
        return target, draft

    def depth_after(self, prefix: Prefix) -> int:
        """A lawful rule: committed tokens only. None means ragged, 0 to 3 by prefix."""
        if self.depth is not None:
            return self.depth
        return (len(prefix) + sum((i + 2) * token for i, token in enumerate(prefix))) % 4

    def drafts(self, prefix: Prefix, depth: int) -> list[tuple[Prefix, float]]:
        """What can be drafted, with its probability."""
        paths: list[tuple[Prefix, float]] = [((), 1.0)]
        for _ in range(depth):
            paths = [
                ((*path, token), weight * mass)
                for path, weight in paths
                for token, mass in enumerate(self.draft_row(prefix + path).tolist())
                if mass > 0
            ]
        return paths

    def draft_row(self, prefix: Prefix) -> Tensor:
        return self.draft[prefix]

    def target_law(self) -> Tensor:
        law = torch.ones([self.vocab_size] * LENGTH, dtype=torch.float64)
        for tokens in itertools.product(range(self.vocab_size), repeat=LENGTH):
            for position, token in enumerate(tokens):
                law[tokens] *= self.target[tokens[:position]][token]
        return law


class SparseWorld(World):
    """Supports that overlap in part or not at all, and rows on which draft and target are equal."""

    def distributions(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        target, draft = super().distributions(generator)
        kind = int(torch.randint(4, (1,), generator=generator))
        if kind == 0:
            return target, target.clone()
        if kind == 1:
            return torch.eye(3, dtype=torch.float64)[0], torch.eye(3, dtype=torch.float64)[2]
        target[int(torch.randint(3, (1,), generator=generator))] = 0
        draft[int(torch.randint(3, (1,), generator=generator))] = 0
        return target / target.sum(), draft / draft.sum()


class ProcessedWorld(World):
    """Logits through temperature, top-k and top-p, the same on both sides."""

    vocab_size = 4
    temperature, top_k, top_p = 0.7, 3, 0.9

    def distributions(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        logits = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        target, draft = token_probs(
            logits,
            torch.full((2,), self.temperature),
            torch.full((2,), self.top_k),
            torch.full((2,), self.top_p),
        )
        return target, draft


class GreedyWorld(ProcessedWorld):
    temperature = 0.0


class LookupWorld(World):
    """Proposals that are copied, not drawn: a token that depends on the prefix."""

    point_mass = True

    def draft_row(self, prefix: Prefix) -> Tensor:
        token = (len(prefix) + sum(prefix)) % self.vocab_size
        return torch.eye(self.vocab_size, dtype=torch.float64)[token]


class Batch:
    """All (prefix, draft) pairs that one length of prefix leads to, as one packed round."""

    def __init__(self, world: World, masses: dict[Prefix, float]) -> None:
        self.world = world
        self.prefixes: list[Prefix] = []
        self.paths: list[Prefix] = []
        masses_of_paths = []
        for prefix, mass in masses.items():
            for path, weight in world.drafts(prefix, world.depth_after(prefix)):
                self.prefixes.append(prefix)
                self.paths.append(path)
                masses_of_paths.append(mass * weight)
        self.masses = torch.tensor(masses_of_paths, dtype=torch.float64)
        self.depths = torch.tensor([len(path) for path in self.paths])
        pairs = list(zip(self.prefixes, self.paths, strict=True))
        self.target_probs = torch.stack(
            [world.target[p + path[:j]] for p, path in pairs for j in range(len(path) + 1)]
        )
        drafted = [world.draft_row(p + path[:j]) for p, path in pairs for j in range(len(path))]
        self.draft_ids = torch.zeros(len(pairs), MAX_DEPTH, dtype=torch.int64)
        inside = torch.arange(MAX_DEPTH) < self.depths[:, None]
        self.draft_ids[inside] = torch.tensor(
            [token for path in self.paths for token in path], dtype=torch.int64
        )
        rows = torch.zeros_like(self.draft_ids)
        rows[inside] = torch.arange(len(drafted))
        no_rows = torch.zeros(0, world.vocab_size, dtype=torch.float64)
        probs = torch.stack(drafted) if drafted else no_rows
        self.draft_probs = None if world.point_mass else DraftProbs(probs, rows)

    def run(self, verify: Verify, accept: Tensor, final: Tensor) -> Verification:
        """Verify with C sets of uniforms at once: `accept` [C * R, K], `final` [C * R]."""
        copies = len(final) // len(self.paths)
        return verify(
            self.target_probs.repeat(copies, 1),
            self.draft_ids.repeat(copies, 1),
            self.draft_probs
            and DraftProbs(self.draft_probs.probs, self.draft_probs.rows.repeat(copies, 1)),
            self.depths.repeat(copies),
            accept,
            final,
        )


def bisect(is_below: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Where each of `count` step functions of a uniform goes from True to False."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


def measure_acceptance(batch: Batch, verify: Verify) -> Tensor:
    """Probability [R, K] that draft token j stands, given that those before it do."""
    count = len(batch.paths)
    column = torch.arange(MAX_DEPTH).repeat_interleave(count)
    accept = torch.full((len(column), MAX_DEPTH), EASIEST, dtype=torch.float64)
    final = torch.full((len(column),), 0.5, dtype=torch.float64)

    def stands(uniforms: Tensor) -> Tensor:
        accept.scatter_(1, column[:, None], uniforms[:, None])
        return batch.run(verify, accept, final).num_accepted > column

    return bisect(stands, len(column)).view(MAX_DEPTH, count).T


def measure_final(batch: Batch, verify: Verify, edges: Tensor) -> Tensor:
    """Law [K + 1, R, V] of the token that follows 0..K accepted ones; noise where that cannot be."""
    count, last = len(batch.paths), batch.world.vocab_size - 1
    accepted, token, _ = torch.cartesian_prod(
        torch.arange(MAX_DEPTH + 1), torch.arange(last), torch.arange(count)
    ).T
    columns = torch.arange(MAX_DEPTH)
    rejecting = ((1 + edges) / 2).repeat((MAX_DEPTH + 1) * last, 1)
    accept = rejecting.masked_fill(columns < accepted[:, None], EASIEST)

    def at_most(uniforms: Tensor) -> Tensor:
        emitted = batch.run(verify, accept, uniforms).token_ids
        return emitted.gather(1, accepted[:, None])[:, 0] <= token

    cuts = bisect(at_most, len(token)).view(MAX_DEPTH + 1, last, count)
    return (
        torch.nn.functional.pad(cuts, (0, 0, 1, 0))
        .diff(dim=1, append=torch.ones(MAX_DEPTH + 1, 1, count, dtype=torch.float64))
        .transpose(1, 2)
    )


def committed_law(world: World, verify: Verify = verify_rejection) -> Tensor:
    """Joint law of the first `LENGTH` tokens that rounds of any number of them commit."""
    law = torch.zeros([world.vocab_size] * LENGTH, dtype=torch.float64)
    masses: list[dict[Prefix, float]] = [{(): 1.0}, *({} for _ in range(LENGTH - 1))]
    for length in range(LENGTH):
        if not masses[length]:
            continue
        batch = Batch(world, masses[length])
        edges = measure_acceptance(batch, verify)
        final = measure_final(batch, verify, edges)
        reach = batch.masses.clone()
        for accepted in range(MAX_DEPTH + 1):
            ends = torch.ones_like(reach)
            if accepted < MAX_DEPTH:
                ends = torch.where(batch.depths > accepted, 1 - edges[:, accepted], ends)
            mass_of_token = ((reach * ends)[:, None] * final[accepted]).tolist()
            possible = (batch.depths >= accepted).nonzero()[:, 0].tolist()
            for i, token in itertools.product(possible, range(world.vocab_size)):
                text = (*batch.prefixes[i], *batch.paths[i][:accepted], token)
                mass = mass_of_token[i][token]
                if len(text) >= LENGTH:
                    law[text[:LENGTH]] += mass
                elif mass > 0:
                    masses[len(text)][text] = masses[len(text)].get(text, 0.0) + mass
            if accepted < MAX_DEPTH:
                reach = reach * edges[:, accepted]
    return law


def worst_error(world: World, verify: Verify = verify_rejection) -> float:
    return float((committed_law(world, verify) - world.target_law()).abs().max())


@pytest.mark.parametrize("depth", [0, 1, 2, 3, None])
@pytest.mark.parametrize("kind", [World, SparseWorld, LookupWorld])
def test_committed_tokens_have_the_targets_law(kind, depth):
    assert worst_error(kind(seed=1, depth=depth)) < TOLERANCE


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", [World, SparseWorld, LookupWorld])
def test_committed_tokens_have_the_targets_law_on_further_pairs(kind, seed):
    assert worst_error(kind(seed, None)) < TOLERANCE


@pytest.mark.parametrize("kind", [ProcessedWorld, GreedyWorld])
def test_committed_tokens_have_the_law_that_temperature_top_k_and_top_p_give(kind):
    world = kind(seed=4, depth=None)
    law = world.target_law()
    assert (law == 0).sum() > 10
    assert worst_error(world) < TOLERANCE


def test_outcomes_are_intervals_of_each_uniform_whatever_the_others_are():
    """What the bisection takes for granted: a token stands below its edge and falls above."""
    world = World(seed=5, depth=None)
    batch = Batch(world, {prefix: 1.0 for prefix in itertools.product(range(3), repeat=2)})
    edges = measure_acceptance(batch, verify_rejection)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        accept = torch.rand(edges.shape, generator=generator, dtype=torch.float64)
        final = torch.rand(len(edges), generator=generator, dtype=torch.float64)
        stands = (accept < edges) & (torch.arange(MAX_DEPTH) < batch.depths[:, None])
        result = batch.run(verify_rejection, accept, final)
        assert torch.equal(result.num_accepted, stands.cumprod(1).sum(1))


# Planted mistakes: each must bend the law


def with_final_weights(weights_of: Callable[[Tensor, Tensor], Tensor]) -> Verify:
    """The real rule, but the token after a rejection drawn from `weights_of(p, q)`."""

    def verify(target_probs, draft_ids, draft_probs, depths, accept, final):
        result = verify_rejection(target_probs, draft_ids, draft_probs, depths, accept, final)
        at = result.num_accepted[:, None]
        target = target_probs[packed_rows(depths, MAX_DEPTH).gather(1, at)[:, 0]]
        fallen = at.clamp(max=MAX_DEPTH - 1)
        if draft_probs is None:
            draft = torch.nn.functional.one_hot(draft_ids.gather(1, fallen)[:, 0], 3).double()
        else:
            draft = draft_probs.probs[draft_probs.rows.gather(1, fallen)[:, 0]]
        rejected = (result.num_accepted < depths)[:, None]
        ids = sample(torch.where(rejected, weights_of(target, draft), target), final)
        return Verification(result.num_accepted, result.token_ids.scatter(1, at, ids[:, None]))

    return verify


def with_tempered_acceptance(target_probs, draft_ids, draft_probs, depths, accept, final):
    """Accepts with probability min(1, p / q) ** 0.98."""
    return verify_rejection(
        target_probs, draft_ids, draft_probs, depths, accept ** (1 / 0.98), final
    )


def with_inverted_ratio(target_probs, draft_ids, draft_probs, depths, accept, final):
    """Accepts with probability min(1, q / p)."""
    rows = packed_rows(depths, MAX_DEPTH)[:, :MAX_DEPTH]
    swapped = target_probs.clone()
    inside = torch.arange(MAX_DEPTH) < depths[:, None]
    swapped[rows[inside]] = draft_probs.probs[draft_probs.rows[inside]]
    num_accepted = verify_rejection(
        swapped, draft_ids, DraftProbs(target_probs, rows), depths, accept, final
    ).num_accepted
    forced = torch.where(torch.arange(MAX_DEPTH) < num_accepted[:, None], 1e-300, 1 - 1e-16)
    return verify_rejection(target_probs, draft_ids, draft_probs, depths, forced.double(), final)


MISTAKES = {
    "residual replaced by the target": with_final_weights(lambda p, q: p),
    "residual of the wrong sign kept": with_final_weights(lambda p, q: (p - q).abs()),
    "most likely token of the residual": with_final_weights(
        lambda p, q: torch.eye(3, dtype=torch.float64)[(p - q).argmax(-1)]
    ),
    "acceptance to the power 0.98": with_tempered_acceptance,
    "acceptance ratio upside down": with_inverted_ratio,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistake_in_the_rule_is_caught(name):
    assert worst_error(World(seed=1, depth=2), MISTAKES[name]) > 1e-4


@pytest.mark.parametrize(
    "name", ["residual replaced by the target", "acceptance to the power 0.98"]
)
def test_planted_mistake_in_the_point_mass_rule_is_caught(name):
    assert worst_error(LookupWorld(seed=1, depth=2), MISTAKES[name]) > 1e-4


# A scheduler that remembers discarded drafts [DSpark, appendix A]

TARGET = torch.tensor([0.7, 0.3], dtype=torch.float64)
DRAFT = torch.tensor([0.5, 0.5], dtype=torch.float64)
COUNT = 40_000


def share_of_liked_token(redraft_attempt: int) -> float:
    """Token 0's share at position 1, over seeds, under a scheduler that wants token 0 there.

    Round 0 drafts positions 0 and 1. The draft at 0 is always rejected, so the token drafted at 1
    is discarded, but the scheduler has seen it. In round 1 it drafts again only if it liked it.
    """
    seeds, one = torch.arange(COUNT), torch.ones(COUNT, dtype=torch.int64)
    never, always = torch.eye(2, dtype=torch.float64)

    def draft(attempt: int) -> Tensor:
        draws = uniform(seeds, one, torch.tensor(attempt), Stream.DRAFT)
        return sample(DRAFT.expand(COUNT, -1), draws)

    remembered = draft(attempt=0)
    first = verify_rejection(
        torch.stack([always, TARGET, TARGET]).repeat(COUNT, 1),
        torch.stack([torch.zeros_like(remembered), remembered], 1),
        DraftProbs(torch.stack([never, DRAFT]), torch.tensor([[0, 1]]).expand(COUNT, -1)),
        2 * one,
        *round_uniforms(seeds, 0 * one, 0 * one, 2),
    )
    assert not first.num_accepted.any()

    depths = (remembered == 0).long()
    second = verify_rejection(
        TARGET.expand(int((depths + 1).sum()), -1),
        draft(redraft_attempt)[:, None],
        DraftProbs(DRAFT[None], torch.zeros(COUNT, 1, dtype=torch.int64)),
        depths,
        *round_uniforms(seeds, one, one, 1),
    )
    return float((second.token_ids[:, 0] == 0).double().mean())


def test_a_scheduler_that_remembers_discarded_drafts_cannot_bend_the_law():
    assert share_of_liked_token(redraft_attempt=1) == pytest.approx(0.7, abs=0.012)  # 5 sigma


def test_planted_reuse_of_a_draw_is_caught():
    assert share_of_liked_token(redraft_attempt=0) == pytest.approx(0.85, abs=0.012)


def test_what_remembering_does_to_the_law_exactly():
    """The same two schedulers, integrated over all draws."""

    class TwoTokens(World):
        vocab_size = 2

        def distributions(self, generator):
            return TARGET, DRAFT

    batch = Batch(TwoTokens(seed=0, depth=1), {(): 1.0})
    stands = measure_acceptance(batch, verify_rejection)[:, :1]
    recovered = measure_final(batch, verify_rejection, stands.expand(-1, MAX_DEPTH))[0]
    law_by_draft = stands * torch.eye(2) + (1 - stands) * recovered  # row: the token drafted
    law_at_depth_0 = committed_law(TwoTokens(seed=0, depth=0)).sum((1, 2))

    likes, dislikes = DRAFT
    fresh = likes * (DRAFT @ law_by_draft) + dislikes * law_at_depth_0
    reused = likes * law_by_draft[0] + dislikes * law_at_depth_0
    assert fresh[0] == pytest.approx(0.7, abs=TOLERANCE)
    assert reused[0] == pytest.approx(0.85, abs=TOLERANCE)
