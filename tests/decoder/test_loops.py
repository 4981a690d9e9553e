"""Texts that repeat themselves at their end."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.decoder.loops import LOOP_PERIOD, LOOP_TOKENS, is_looping

NOISE = np.random.default_rng(0).integers(0, 10**6, 100).tolist()


@pytest.mark.parametrize("period", [1, 2, 7, LOOP_PERIOD])
def test_a_text_that_repeats_a_passage_to_its_end_loops(period: int) -> None:
    passage = NOISE[:period]
    repeated = np.resize(passage, LOOP_TOKENS + period).tolist()
    assert is_looping(NOISE + repeated)
    assert is_looping(repeated)
    assert not is_looping(repeated[1:])  # a token short of 32 that repeat


def test_a_longer_passage_does_not_count() -> None:
    assert not is_looping(NOISE[: LOOP_PERIOD + 1] * 4)


def test_a_text_that_leaves_its_loop_does_not_count() -> None:
    assert not is_looping([7] * 60 + [8])


@pytest.mark.parametrize("tokens", [[], [1], NOISE[:LOOP_TOKENS], NOISE])
def test_short_and_varied_texts_do_not_loop(tokens: list[int]) -> None:
    assert not is_looping(tokens)
