"""The table of running sequences: what a slot takes over from a request, and gives back."""

from __future__ import annotations

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.request import Request
from specdepth.decoder.sequences import NO_END, SequenceTable


def request(seed: int | None = None, **changes: object) -> Request:
    sampling = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, seed=seed, max_new_tokens=6, ignore_eos=True
    )
    made = Request(
        request_id="a",
        number=7,
        prompt_token_ids=np.array([4, 5, 6]),
        sampling=sampling,
        arrival_s=1.0,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_slot_takes_over_prompt_and_settings() -> None:
    table = SequenceTable(2, 16)
    assert table.start(1, request()) == 3
    assert table.active.tolist() == [False, True]
    assert table.tokens[1, :3].tolist() == [4, 5, 6]
    assert (table.number[1], table.num_prompt[1], table.num_tokens[1]) == (7, 3, 3)
    assert (table.num_computed[1], table.draft_computed[1], table.attempt[1]) == (0, 0, 0)
    assert table.max_tokens[1] == 9
    assert table.end_at[1] == NO_END
    assert (table.temperature[1], table.top_k[1], table.top_p[1]) == (0.5, 3, 0.9)
    assert table.ignore_eos[1]
    assert np.isnan(table.first_token_s[1])


def test_a_preempted_request_comes_back_with_all_but_its_cache() -> None:
    table = SequenceTable(2, 16)
    made = request()
    table.start(0, made)
    table.tokens[0, 3:5] = [8, 9]
    table.num_tokens[0], table.num_computed[0], table.draft_computed[0] = 5, 4, 2
    table.attempt[0], table.num_rounds[0], table.first_token_s[0] = 3, 2, 3.5
    table.end_at[0] = 8
    table.stop(0, made)
    assert not table.active[0]
    assert (made.generated, made.first_token_s) == ([8, 9], 3.5)
    assert (made.attempt, made.num_rounds) == (3, 2)  # one round failed
    table.start(1, made)
    assert table.tokens[1, :5].tolist() == [4, 5, 6, 8, 9]
    assert table.generated(1).tolist() == [8, 9]
    assert (table.num_tokens[1], table.num_computed[1], table.draft_computed[1]) == (5, 0, 0)
    assert (table.attempt[1], table.num_rounds[1]) == (3, 2)
    assert (table.first_token_s[1], table.max_tokens[1]) == (3.5, 9)


@pytest.mark.parametrize(
    ("seed", "stored"),
    [(None, 0), (5, 5), (-1, -1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64 + 3, 3)],
)
def test_any_whole_number_is_a_seed(seed: int | None, stored: int) -> None:
    table = SequenceTable(1, 16)
    table.start(0, request(seed))
    assert table.seed[0] == stored
    if seed is not None and -(2**63) <= seed < 2**63:
        table.start(0, request(np.int64(seed)))  # type: ignore[arg-type]
        assert table.seed[0] == stored
