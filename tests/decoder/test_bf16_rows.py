"""What the kernels read off rows of logits in bfloat16, against the definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdepth.decoder import bf16_rows
from tests.decoder.bf16 import on_each_kernel
from tests.decoder.threads import torch_threads

pytestmark = on_each_kernel
INF = math.inf


def random(rows: int, columns: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, columns, generator=generator)).bfloat16()


def defined(logits: torch.Tensor) -> torch.Tensor:
    """The three signals in float64."""
    probs = torch.softmax(logits.double(), -1)
    two = torch.nn.functional.pad(probs, (0, 1)).topk(2, -1).values
    return torch.stack([two[:, 0], torch.special.entr(probs).sum(-1), two[:, 0] - two[:, 1]])


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 100) | st.sampled_from([1023, 1024, 1025, 49152]),
    scale=st.sampled_from([0.0, 0.1, 3.0, 100.0]),  # 0: all equal
    seed=st.integers(0, 999),
)
@example(1, 1, 3.0, 0)
@example(2, 33, 3.0, 0)  # two vectors and one column
def test_rows_of_any_length(rows: int, columns: int, scale: float, seed: int) -> None:
    logits = random(rows, columns, scale, seed)
    assert torch.equal(bf16_rows.argmax(logits), logits.float().argmax(-1))
    torch.testing.assert_close(bf16_rows.signals(logits), defined(logits), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [0, 15, 16, 31, 32, 63, 64, 68])
def test_of_equal_entries_the_first_counts_and_the_margin_is_none(place: int) -> None:
    logits = random(1, 69, 1.0)
    logits[0, [place, 68]] = 9.0
    assert bf16_rows.argmax(logits).tolist() == [place]
    margin = float(bf16_rows.signals(logits)[2, 0])
    assert (margin == 0) == (place < 68)


def test_tokens_that_cannot_be() -> None:
    logits = torch.tensor([[-INF, 2.0, -INF, 2.0], [-INF, -INF, -INF, -5.0]]).bfloat16()
    assert bf16_rows.argmax(logits).tolist() == [1, 3]
    wanted = torch.tensor([[0.5, 1.0], [math.log(2), 0.0], [0.0, 1.0]]).double()
    torch.testing.assert_close(bf16_rows.signals(logits), wanted, rtol=1e-6, atol=1e-6)


def test_a_row_without_any_number_has_an_argmax_all_the_same() -> None:
    assert bf16_rows.argmax(torch.full((1, 40), math.nan).bfloat16()).tolist() == [0]
    assert bf16_rows.argmax(torch.full((1, 40), -INF).bfloat16()).tolist() == [0]


def test_rows_may_lie_anyhow_and_threads_change_nothing() -> None:
    logits = random(6, 100)
    ids, shown = bf16_rows.argmax(logits), bf16_rows.signals(logits)
    padded = torch.full((6, 128), 50.0).bfloat16()
    padded[:, 7:107] = logits
    for same in (padded[:, 7:107], logits.T.contiguous().T):
        assert torch.equal(bf16_rows.argmax(same), ids)
        assert torch.equal(bf16_rows.signals(same), shown)
    with torch_threads(3):
        assert torch.equal(bf16_rows.argmax(logits), ids)
        assert torch.equal(bf16_rows.signals(logits), shown)


def test_what_it_takes() -> None:
    assert bf16_rows.can_read(random(2, 40))
    assert not bf16_rows.can_read(random(2, 40).float())
    assert not bf16_rows.can_read(random(2, 40)[:, :0])
