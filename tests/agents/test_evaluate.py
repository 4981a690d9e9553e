from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from specdepth.agents.evaluate import evaluate, has_thread_time
from specdepth.agents.fitting import MIN_NEW_TOKENS
from specdepth.decoder.clock import VirtualClock, WallClock
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.baselines import FixedDepth, Off, RandomDepth
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.state import Ints, RoundState
from tests.agents.tiny_target import COST, tiny_decoder, tiny_requests


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


def policies() -> dict[str, DepthScheduler]:
    return {"off": Off(), "fixed:2": FixedDepth(2), "fixed:8": FixedDepth(8)}


def value(found: Any, policy: str, load: int, metric: str) -> float:
    rows = [
        row for row in found.rows() if (row.policy, row.load, row.metric) == (policy, load, metric)
    ]
    assert len(rows) == 1, f"{len(rows)} rows of {metric}"
    return float(rows[0].value)


def test_all_policies_serve_the_same_tokens(decoder):
    found = evaluate(decoder, policies(), tiny_requests(6), [1, 4], num_requests=6)
    for load in (1, 4):
        tokens = {value(found, name, load, "committed_tokens") for name in policies()}
        assert len(tokens) == 1
        for name in policies():
            assert value(found, name, load, "different_text_share") == 0


def test_throughput_is_tokens_over_makespan_and_speedup_its_ratio_to_off(decoder):
    found = evaluate(decoder, policies(), tiny_requests(8), [4], num_requests=8)
    for name in policies():
        tokens = value(found, name, 4, "committed_tokens")
        rate = value(found, name, 4, "throughput_tok_s")
        assert rate == pytest.approx(tokens / value(found, name, 4, "makespan_s"))
        off = value(found, "off", 4, "throughput_tok_s")
        assert value(found, name, 4, "speedup") == pytest.approx(rate / off)


def test_times_of_a_virtual_clock_are_those_of_the_cost_model(decoder):
    requests = [replace(r, prompt_token_ids=(1, 2, 3)) for r in tiny_requests(4)]
    found = evaluate(decoder, {"off": Off()}, requests, [1], num_requests=4)
    assert found.clock == "virtual"
    # 24 rounds a request: the first computes the prompt, three tokens.
    expected = 4 * 24 * (COST.pass_s(1) + COST.overhead_s)
    assert value(found, "off", 1, "makespan_s") == pytest.approx(expected)


def test_a_virtual_machine_has_no_noise_and_a_real_one_some(decoder):
    exact = evaluate(decoder, policies(), tiny_requests(8, 8), [1, 3], num_requests=8)
    assert exact.has_noise
    assert max(run.noise for run in exact.runs.values()) < 1e-9
    measured = replace(COST, measured=True)
    real = tiny_decoder(clock=WallClock(), cost=measured)
    found = evaluate(real, policies(), tiny_requests(8, 8), [1, 3], num_requests=8)
    assert found.has_noise
    assert found.runs[1].noise > 0
    assert "noise of the machine (about" in found.notes[0]
    unpriced = tiny_decoder(clock=WallClock())
    unknown = evaluate(unpriced, policies(), tiny_requests(8, 4), [1], num_requests=4)
    assert not unknown.has_noise
    assert "do not cover the noise" in unknown.notes[0]


def test_blocks_are_interleaved_and_the_order_rotates(decoder):
    seen: list[str] = []
    evaluate(
        decoder,
        policies(),
        tiny_requests(16, 2),
        [1],
        num_requests=16,
        progress=lambda share, text: seen.append(text.removeprefix("load 1, ")),
    )
    off, two, eight = policies()
    assert seen == [off, two, eight, two, eight, off, eight, off, two, off, two, eight]


def test_progress_goes_from_above_0_to_1(decoder):
    shares: list[float] = []
    evaluate(
        decoder,
        policies(),
        tiny_requests(8, 8),
        [1, 2],
        num_requests=4,
        repeats=2,
        progress=lambda share, text: shares.append(share),
    )
    assert 0 < shares[0] < 0.2
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def test_repeats_serve_the_same_requests_again(decoder):
    once = evaluate(decoder, policies(), tiny_requests(20, 8), [2], num_requests=8)
    thrice = evaluate(decoder, policies(), tiny_requests(20, 8), [2], num_requests=8, repeats=3)
    assert thrice.runs[2].num_requests == once.runs[2].num_requests == 8
    assert (once.runs[2].num_repeats, thrice.runs[2].num_repeats) == (1, 3)
    assert value(thrice, "off", 2, "makespan_s") == pytest.approx(
        3 * value(once, "off", 2, "makespan_s")
    )
    # Repeats say nothing about other requests: the interval stays as wide.
    a, b = (found.runs[2].ratio("fixed:8", "off") for found in (once, thrice))
    assert a == pytest.approx(b)


def test_a_load_is_kept_up_while_a_block_runs(decoder):
    found = evaluate(decoder, policies(), tiny_requests(12, 12), [1, 4], num_requests=12)
    assert value(found, "off", 1, "mean_in_flight") == 1
    assert 2.5 < value(found, "off", 4, "mean_in_flight") <= 4


def test_minutes_are_kept_and_shared_between_loads():
    real = tiny_decoder(clock=WallClock(), cost=CostModel.linear(base_s=0.0005, token_s=1e-6))
    start = time.perf_counter()
    found = evaluate(real, policies(), tiny_requests(40, 8), [1, 4], minutes=1.5 / 60)
    assert time.perf_counter() - start < 4
    assert found.clock == ("cpu" if has_thread_time(real) else "wall")
    assert all(found.runs[load].num_blocks >= 1 for load in (1, 4))
    assert found.runs[1].num_requests >= 4


def test_slow_models_get_shorter_answers_and_the_notes_say_so(decoder):
    slow = CostModel.linear(base_s=10.0, token_s=1.0)
    before, decoder.engine.cost = decoder.engine.cost, slow
    try:
        found = evaluate(decoder, policies(), tiny_requests(8), [1, 4], minutes=0.01)
    finally:
        decoder.engine.cost = before
    assert any(f"cut to {MIN_NEW_TOKENS} instead of 24" in note for note in found.notes)
    tokens = value(found, "off", 1, "committed_tokens")
    assert tokens <= MIN_NEW_TOKENS * found.runs[1].num_requests


class StopsAtRequest(FixedDepth):
    """Interrupts in the middle of the request after `served` others."""

    def __init__(self, served: int) -> None:
        super().__init__(2)
        self.served = served
        self.rounds: dict[int, int] = {}

    def choose(self, state: RoundState) -> Ints:
        number = int(state.request_ids[0])
        self.rounds[number] = self.rounds.get(number, 0) + 1
        if len(self.rounds) > self.served and self.rounds[number] > 2:
            raise KeyboardInterrupt
        return super().choose(state)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_after_an_interrupt_only_complete_blocks_count(decoder, blocks):
    # In the middle of a block of four requests.
    stops = StopsAtRequest(4 * blocks + 2)
    chosen: dict[str, DepthScheduler] = {"off": Off(), "stops": stops}
    found = evaluate(decoder, chosen, tiny_requests(16, 8), [1], num_requests=16)
    assert found.interrupted
    assert any("Interrupted" in note for note in found.notes)
    assert found.loads == ([1] if blocks else [])
    if blocks:
        assert found.runs[1].num_blocks == blocks
        assert value(found, "off", 1, "requests") == 4 * blocks
        assert value(found, "stops", 1, "requests") == 4 * blocks
    assert not decoder.engine.has_work


def test_the_decoders_clock_is_given_back():
    clock = WallClock()
    real = tiny_decoder(clock=clock)
    evaluate(real, {"off": Off()}, tiny_requests(2), [1], num_requests=1)
    assert real.engine.clock is clock
    assert real.runner.clock is clock


def test_cpu_time_and_wall_time_are_both_told():
    real = tiny_decoder(clock=WallClock())
    found = evaluate(real, policies(), tiny_requests(6), [2], num_requests=6, clock="cpu")
    assert any("CPU time of the one thread" in note for note in found.notes)
    wall, cpu = value(found, "off", 2, "wall_s"), value(found, "off", 2, "makespan_s")
    assert 0 < cpu < 1.2 * wall
    assert value(found, "off", 2, "speedup_wall") == 1


def test_random_depths_do_not_change_the_text(decoder):
    chosen: dict[str, DepthScheduler] = {"off": Off(), "random:1": RandomDepth(1)}
    found = evaluate(decoder, chosen, tiny_requests(12), [8], num_requests=12)
    assert value(found, "random:1", 8, "different_text_share") == 0


@pytest.mark.parametrize(("verification", "equal"), [("rejection", False), ("coupled", True)])
def test_sampled_texts_are_the_same_under_coupled_only(verification, equal):
    sampler = tiny_decoder(verification=verification)
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=1.0, seed=i))
        for i, r in enumerate(tiny_requests(6, 12))
    ]
    found = evaluate(sampler, policies(), requests, [3], num_requests=6)
    assert found.same_text is equal
    if equal:
        assert value(found, "fixed:8", 3, "different_text_share") == 0
    assert any("a text of its own" in note for note in found.notes) is not equal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": {}}, "at least one policy"),
        ({"loads": []}, "one load"),
        ({"requests": []}, "one request"),
        ({"loads": [9]}, r"load 9 is outside 1\.\.8 \(max_num_seqs\)"),
        ({"loads": [0]}, "outside 1..8"),
        ({"loads": [2, 2]}, "measured once"),
        ({"loads": [8]}, "load 8 needs at least 8 different requests, there are 4"),
        ({"repeats": 0}, "at least 1"),
        ({"num_requests": 0}, "at least 1"),
        ({"minutes": 0.0}, "above 0"),
        ({"requests": tiny_requests(4, max_new_tokens=600)}, "the model holds 512"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(decoder, changes, message):
    settings: dict[str, Any] = {
        "policies": policies(),
        "requests": tiny_requests(4),
        "loads": [1],
        "num_requests": 1,
    }
    with pytest.raises(ValueError, match=message):
        evaluate(decoder, **(settings | changes))
    assert isinstance(decoder.engine.clock, VirtualClock)
