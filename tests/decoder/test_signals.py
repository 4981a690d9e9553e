"""Confidence of a law: largest probability, entropy and margin, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from specdepth.decoder.signals import law_signals


def test_a_law_of_a_half_and_two_quarters() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log() + 7.0
    top1, entropy, margin = law_signals(logits, with_margin=True)
    torch.testing.assert_close(top1, torch.tensor([0.5]).double())
    torch.testing.assert_close(entropy, torch.tensor([1.5 * math.log(2)]).double())
    torch.testing.assert_close(margin, torch.tensor([0.25]).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_those_of_the_definition_and_the_logits_stay(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(7, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    before = logits.clone()
    probs = torch.softmax(logits.double(), -1)
    largest = probs.topk(2, -1).values
    wanted = torch.stack(
        [largest[:, 0], -(probs * probs.log()).sum(-1), largest[:, 0] - largest[:, 1]]
    )
    torch.testing.assert_close(law_signals(logits, with_margin=True), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(law_signals(logits), wanted[:2], rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


def test_tokens_that_cannot_be_add_nothing() -> None:
    logits = torch.tensor([[1.0, -math.inf, 1.0], [-math.inf, 3.0, -math.inf]])
    top1, entropy = law_signals(logits)
    torch.testing.assert_close(top1, torch.tensor([0.5, 1.0]).double())
    torch.testing.assert_close(entropy, torch.tensor([math.log(2), 0.0]).double())


def test_no_rows_give_no_signals() -> None:
    assert law_signals(torch.zeros(0, 5)).shape == (2, 0)
