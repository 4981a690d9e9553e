"""Coupled verification: the text is a function of seed and target alone, and has the target's law."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdepth.decoder.sampling import gumbel_argmax, token_probs
from specdepth.decoder.verification import verify_equal

VOCAB_SIZE = 5
PROMPT = (0, 1)


class Model:
    """A distribution over the next token for each of the last two tokens."""

    def __init__(self, seed: int, temperature: float, top_p: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.temperature, self.top_p = temperature, top_p

    def probs(self, before: Tensor, last: Tensor) -> Tensor:
        count = len(last)
        return token_probs(
            self.logits[before, last],
            torch.full((count,), self.temperature),
            torch.zeros(count, dtype=torch.int64),
            torch.full((count,), self.top_p),
        )

    def blend(self, other: "Model", weight: float) -> "Model":
        self.logits = self.logits * (1 - weight) + other.logits * weight
        return self


def decode(
    target: Model, draft: Model, seeds: Tensor, depths_of_rounds: list[Tensor], num_tokens: int
) -> tuple[Tensor, float]:
    """Decode R sequences in rounds whose depths are cycled through.

    Returns:
        int64 [R, num_tokens] and the share of drafted tokens that stood.
    """
    texts = [list(PROMPT) for _ in seeds]
    num_drafted = num_accepted = 0
    for depths in itertools.cycle(depths_of_rounds):
        max_depth = int(depths.max())
        positions = torch.tensor([len(text) for text in texts])
        window = torch.tensor([text[-2:] for text in texts])
        for j in range(max_depth):
            probs = draft.probs(window[:, -2], window[:, -1])
            ids = gumbel_argmax(probs, seeds, positions + j)
            window = torch.cat([window, ids[:, None]], 1)
        inside = torch.arange(max_depth + 1) <= depths[:, None]
        sequence, at = inside.nonzero(as_tuple=True)
        target_ids = gumbel_argmax(
            target.probs(window[sequence, at], window[sequence, at + 1]),
            seeds[sequence],
            positions[sequence] + at,
        )
        result = verify_equal(target_ids, window[:, 2:], depths)
        for text, ids, accepted in zip(texts, result.token_ids, result.num_accepted, strict=True):
            text.extend(ids[: accepted + 1].tolist())
        num_drafted += int(depths.sum())
        num_accepted += int(result.num_accepted.sum())
        if min(map(len, texts)) >= len(PROMPT) + num_tokens:
            break
    tokens = torch.tensor([text[len(PROMPT) :][:num_tokens] for text in texts])
    return tokens, num_accepted / max(num_drafted, 1)


@settings(max_examples=40)
@given(
    st.integers(0, 1000),
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.sampled_from([0.6, 1.0]),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_the_text_is_the_same_whatever_the_depths_and_the_drafter(
    seed, depths, temperature, top_p, likeness
):
    target = Model(seed, temperature, top_p)
    draft = Model(seed + 1, temperature, top_p).blend(target, likeness)
    seeds = torch.tensor([seed, 0, 1])
    alone, _ = decode(target, draft, seeds, [torch.zeros(3, dtype=torch.int64)], 10)
    text, share = decode(target, draft, seeds, [torch.tensor(row) for row in depths], 10)
    assert torch.equal(text, alone)
    assert share == 1 or likeness < 1 or not any(map(any, depths))


def test_equal_models_accept_every_draft():
    model, count = Model(0, 0.8, 1.0), 50
    before, last = torch.randint(VOCAB_SIZE, (2, count), generator=torch.Generator().manual_seed(0))
    keys = torch.arange(count), torch.arange(count)
    ids = gumbel_argmax(model.probs(before, last), *keys)
    depths = torch.ones(count, dtype=torch.int64)
    both = torch.stack([ids, ids], 1).flatten()
    assert verify_equal(both, ids[:, None], depths).num_accepted.all()


@pytest.mark.parametrize("depth", [1, 3])
def test_speculated_tokens_have_the_targets_law(depth):
    count = 4000
    target = Model(3, 2.0, 0.95)
    draft = Model(4, 2.0, 0.95).blend(target, 0.5)
    depths = [torch.full((count,), depth)]
    tokens, share = decode(target, draft, torch.arange(count), depths, 2)
    assert 0.2 < share < 0.9
    first = target.probs(torch.tensor([0]), torch.tensor([1]))[0].double()
    second = target.probs(torch.ones(5, dtype=torch.int64), torch.arange(5)).double()
    law = (first[:, None] * second).flatten().numpy()
    possible = law > 0
    assert 10 < possible.sum() < 25
    counts = np.bincount((tokens[:, 0] * VOCAB_SIZE + tokens[:, 1]).numpy(), minlength=25)
    assert counts[~possible].sum() == 0
    expected = count * law[possible] / law.sum()
    assert stats.chisquare(counts[possible], expected).pvalue > 1e-6
