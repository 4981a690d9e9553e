from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.recorded_text import SMOLLM2_LOOKUP, LookupLaw, RecordedText
from specdepth.decoder.request import Request
from specdepth.decoder.runner import Offer, RoundPlan
from specdepth.decoder.sequences import SequenceTable
from specdepth.decoder.speculative_decoder import SpeculativeDecoder

from .tiny import VOCAB, tiny_llama

PROMPT = [3, 1, 4, 1, 5]
TEXT = [int(token) for token in np.random.default_rng(7).integers(0, 50, 60)]
K = 8


class Bench:
    """A drafter over one slot whose committed text can be set at will."""

    def __init__(
        self,
        law: LookupLaw,
        text: Sequence[int] = TEXT,
        seed: int = 0,
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        self.table = SequenceTable(2, 512)
        self.drafter = RecordedText(
            self.table,
            [(PROMPT, text)],
            vocab_size=50,
            device=torch.device("cpu"),
            law=law,
            seed=seed,
        )
        request = Request(
            request_id="0",
            number=0,
            prompt_token_ids=np.array(prompt),
            sampling=SamplingParams(max_new_tokens=200),
            arrival_s=0.0,
        )
        self.slot = np.array([1])
        self.table.start(1, request)
        self.drafter.start(1, request)

    def offer(self, generated: int, max_length: int = K) -> Offer:
        self.table.num_tokens[1] = len(PROMPT) + generated
        return self.drafter.offer(self.slot, max_length)

    def proposed(self, generated: int, depth: int = K) -> list[int]:
        """Tokens proposed after so many committed ones, as many as are on offer."""
        length = min(int(self.offer(generated).length[0]), depth)
        none = np.zeros(0, np.int64)
        plan = RoundPlan(
            slots=self.slot,
            rows=np.array([0]),
            depths=np.array([length]),
            prefill_slots=none,
            prefill_lengths=none,
        )
        tokens: list[int] = self.drafter.draft(plan).token_ids[0].tolist()
        return tokens

    def accepted(self, generated: int) -> int:
        proposed = self.proposed(generated)
        pairs = zip(proposed, TEXT[generated:], strict=False)
        wrong = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
        return wrong[0] if wrong else len(proposed)


def test_certain_acceptance_proposes_the_text_itself() -> None:
    bench = Bench(LookupLaw.constant(1.0))
    assert [bench.proposed(t) for t in range(61)] == [TEXT[t : t + K] for t in range(61)]


def test_no_acceptance_gets_the_first_token_wrong_at_each_position() -> None:
    bench = Bench(LookupLaw.constant(0.0))
    proposals = [bench.proposed(t) for t in range(60)]
    assert all(len(tokens) == min(K, 60 - t) for t, tokens in enumerate(proposals))
    assert all(tokens[0] != TEXT[t] for t, tokens in enumerate(proposals))
    assert all(0 <= token < 50 for tokens in proposals for token in tokens)


def test_nothing_is_offered_beyond_the_record_or_without_one() -> None:
    law = LookupLaw.constant(1.0)
    assert Bench(law).offer(60).length[0] == 0
    assert Bench(law).offer(150).length[0] == 0
    assert Bench(law).offer(58).length[0] == 2
    stranger = Bench(law, prompt=[1, 1, 1]).offer(0)
    assert (stranger.length[0], stranger.match_length[0]) == (0, 0)


def test_a_slot_taken_by_an_unrecorded_request_forgets_the_one_before() -> None:
    bench = Bench(LookupLaw.constant(1.0))
    other = Request(
        request_id="1",
        number=1,
        prompt_token_ids=np.array([9, 9, 9, 9, 9]),
        sampling=SamplingParams(),
        arrival_s=0.0,
    )
    bench.drafter.start(1, other)
    assert bench.offer(0).length[0] == 0


def test_an_empty_set_of_recordings_offers_nothing() -> None:
    table = SequenceTable(1, 16)
    drafter = RecordedText(table, [], vocab_size=5, device=torch.device("cpu"))
    table.num_tokens[0] = 3
    assert drafter.offer(np.array([0]), 4).length.tolist() == [0]


@given(seed=st.integers(-(2**63), 2**63 - 1), start=st.integers(0, 59), depth=st.integers(1, K))
def test_a_position_has_one_fate_whatever_the_depth_and_the_way_there(
    seed: int, start: int, depth: int
) -> None:
    one, other = Bench(SMOLLM2_LOOKUP, seed=seed), Bench(SMOLLM2_LOOKUP, seed=seed)
    for t in range(start):
        other.offer(t, 3)
    assert one.proposed(start, depth) == other.proposed(start)[:depth]
    # The token that is wrong from here is wrong from the next position as well.
    accepted = one.accepted(start)
    if 0 < accepted < min(K, 60 - start):
        assert one.accepted(start + 1) == accepted - 1


def test_seed_and_prompt_change_the_fates_and_text_length_does_not() -> None:
    def fates(**options: object) -> list[int]:
        bench = Bench(SMOLLM2_LOOKUP, **options)  # type: ignore[arg-type]
        return [int(bench.offer(t).match_length[0]) for t in range(40)]

    assert fates() == fates() == fates(text=TEXT[:45])
    assert fates() != fates(seed=1)


@pytest.fixture(scope="module")
def long_run() -> tuple[np.ndarray, np.ndarray]:
    """Match length, and whether the proposed token is right, at each of 30,000 positions."""
    rng = np.random.default_rng(0)
    match, right = [], []
    for seed in range(60):
        table = SequenceTable(1, 1024)
        text = rng.integers(0, 50, 500)
        drafter = RecordedText(
            table,
            [(PROMPT, text.tolist())],
            vocab_size=50,
            device=torch.device("cpu"),
            law=SMOLLM2_LOOKUP,
            seed=seed,
        )
        request = Request(
            request_id="0",
            number=0,
            prompt_token_ids=np.array(PROMPT),
            sampling=SamplingParams(max_new_tokens=500),
            arrival_s=0.0,
        )
        table.start(0, request)
        drafter.start(0, request)
        for t in range(500):
            table.num_tokens[0] = len(PROMPT) + t
            offer = drafter.offer(np.array([0]), 1)
            match.append(int(offer.match_length[0]))
            right.append(bool(offer.length[0]) and bool(drafter._offered[0, 0] == text[t]))
    return np.array(match), np.array(right)


def test_acceptance_by_match_length_and_shares_are_those_of_the_trace(
    long_run: tuple[np.ndarray, np.ndarray],
) -> None:
    match, right = long_run
    rates = [right[match == m].mean() for m in range(1, 5)]
    # 30,000 positions, 2,100 of the rarest length: three standard errors are 0.03.
    assert rates == pytest.approx(SMOLLM2_LOOKUP.accept, abs=0.035)
    assert not right[match == 0].any()
    shares = np.bincount(match, minlength=5) / len(match)
    assert shares == pytest.approx([0.16, 0.19, 0.10, 0.07, 0.47], abs=0.05)


def test_a_match_grows_by_one_while_it_is_right_and_stays_at_the_longest(
    long_run: tuple[np.ndarray, np.ndarray],
) -> None:
    match, right = long_run
    inner = np.arange(len(match) - 1) % 500 != 499
    went_on = right[:-1] & inner
    assert (match[1:][went_on] == np.minimum(match[:-1][went_on] + 1, 4)).all()


@pytest.mark.parametrize(
    ("accept", "restart", "said"),
    [
        ((), ((1.0,),), "rows"),
        ((0.5,), ((1.0, 0.0),), "2 rows"),
        ((1.5,), ((0.5, 0.5), (0.5, 0.5)), "probabilities"),
        ((float("nan"),), ((0.5, 0.5), (0.5, 0.5)), "probabilities"),
        ((0.5,), ((0.5, 0.4), (0.5, 0.5)), "sum to 1"),
    ],
)
def test_a_law_that_is_none_is_refused(
    accept: tuple[float, ...], restart: tuple[tuple[float, ...], ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        LookupLaw(accept=accept, restart=restart)


def test_a_vocabulary_without_a_wrong_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        RecordedText(SequenceTable(1, 8), [], vocab_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, VOCAB, size)] for size in (5, 9, 17, 3)]


@pytest.fixture(scope="module")
def texts(prompts: list[list[int]]) -> list[list[int]]:
    alone = SpeculativeDecoder.from_pretrained(tiny_llama(), "none", dtype=torch.float64)
    return [result.token_ids for result in alone.generate(prompts, 40, depth_scheduler=0)]


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
@pytest.mark.parametrize("depth", [0, 1, 5, 8])
def test_engine_commits_the_recorded_text_at_the_acceptance_of_the_law(
    prompts: list[list[int]], texts: list[list[int]], depth: int, verification: str
) -> None:
    recorded = list(zip(prompts, texts, strict=True))
    decoder = SpeculativeDecoder.from_pretrained(
        tiny_llama(),
        RecordedText.factory(recorded, law=SMOLLM2_LOOKUP),
        dtype=torch.float64,
        max_num_seqs=3,
        verification=verification,  # type: ignore[arg-type]
    )
    assert decoder.model_pair.endswith("+recorded-text")
    out = decoder.generate(prompts, 40, depth_scheduler=depth)
    assert [result.token_ids for result in out] == texts
    assert (out.metrics.acceptance_length > 1) == (depth > 0)


def test_certain_acceptance_at_depth_4_takes_a_fifth_of_the_rounds(
    prompts: list[list[int]], texts: list[list[int]]
) -> None:
    recorded = list(zip(prompts, texts, strict=True))
    factory = RecordedText.factory(recorded, law=LookupLaw.constant(1.0))
    decoder = SpeculativeDecoder.from_pretrained(tiny_llama(), factory, dtype=torch.float64)
    out = decoder.generate(prompts, 40, depth_scheduler=4)
    assert [result.metrics.num_rounds for result in out] == [8] * 4
    assert out.metrics.acceptance_length == 5.0
