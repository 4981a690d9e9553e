from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from specdepth.decoder.config import SamplingParams
from specdepth.decoder.profiler import MAX_REPEATS, PASS_TOKENS, profile, round_overhead_s
from specdepth.decoder.roofline import ModelSize
from specdepth.scheduler.depth import VerificationRule
from specdepth.scheduler.state import DrafterKind
from tests.decoder.tiny import build_decoder, noisy_copy, repetitive_prompts, tiny_llama
from tests.decoder.tiny_eagle import tiny_eagle

SAMPLED_S = {
    "target": {"greedy": 4e-5, "rejection": 3.4e-4, "coupled": 9.4e-4},
    "draft": {"greedy": 1e-5, "rejection": 2.1e-4, "coupled": 0.9e-5},
}


class LawTimer:
    """Passes whose time follows a known law, plus spikes; each pass moves its own clock."""

    def __init__(
        self,
        *,
        drafter: DrafterKind = "draft-model",
        base: Callable[[int], float] = lambda n: 0.050 + 0.003 * max(n - 8, 0),
        head_row_s: float = 0.0004,
        context_s: float = 2e-6,
        pair_s: float = 0.0,
        spike_share: float = 0.0,
        first_run: float = 20.0,
        seed: int = 0,
        max_num_seqs: int = 32,
        max_pass_tokens: int = 512,
        max_model_len: int = 2048,
        max_kv_tokens: int = 65536,
        block_size: int = 16,
    ) -> None:
        self.drafter = drafter
        self.base = base
        self.head_row_s = head_row_s
        self.context_s = context_s
        self.pair_s = pair_s
        self.spike_share = spike_share
        self.first_run = first_run
        self.rng = np.random.default_rng(seed)
        self.max_num_seqs = max_num_seqs
        self.max_num_speculative_tokens = 8
        self.max_pass_tokens = max_pass_tokens
        self.max_model_len = max_model_len
        self.max_kv_tokens = max_kv_tokens
        self.block_size = block_size
        self.now = 0.0
        self.passes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.seen: set[tuple[object, ...]] = set()

    def clock(self) -> float:
        return self.now

    def time_pass(
        self,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        num_logit_rows: int,
        model: Literal["target", "draft"] = "target",
    ) -> float:
        num_tokens = sum(query_lengths)
        assert len(query_lengths) == len(context_lengths) <= self.max_num_seqs
        assert min(query_lengths) >= 1
        assert num_tokens <= self.max_pass_tokens
        assert 1 <= num_logit_rows <= num_tokens
        assert all(q <= c for q, c in zip(query_lengths, context_lengths, strict=True))
        assert max(context_lengths) <= self.max_model_len
        blocks = sum(-(-c // self.block_size) for c in context_lengths)
        assert blocks <= self.max_kv_tokens // self.block_size
        if model == "target":
            seconds = self.base(num_tokens) + self.head_row_s * num_logit_rows
            seconds += self.context_s * sum(context_lengths)
            if max(query_lengths) > self.max_num_speculative_tokens + 1:  # prompts
                pairs = zip(query_lengths, context_lengths, strict=True)
                seconds += self.pair_s * sum(q * c for q, c in pairs)
        else:
            assert self.drafter == "draft-model"
            sequences = len(query_lengths)
            seconds = 0.004 + 0.0002 * sequences + 0.0001 * (num_tokens - sequences)
        shape = (model, tuple(query_lengths), tuple(context_lengths), num_logit_rows)
        if shape not in self.seen:
            self.seen.add(shape)
            seconds *= self.first_run  # the first run of a shape compiles and touches memory
        elif self.rng.random() < self.spike_share:
            seconds *= 5
        self.passes.append((model, tuple(query_lengths), tuple(context_lengths)))
        seconds = self.disturbed(seconds)
        self.now += seconds
        return seconds

    def disturbed(self, seconds: float) -> float:
        """What the machine makes of a pass."""
        return seconds

    def time_sampling(
        self,
        num_seqs: int,
        depth: int,
        rule: VerificationRule,
        model: Literal["target", "draft"] = "target",
    ) -> float:
        assert num_seqs <= self.max_num_seqs
        assert depth <= self.max_num_speculative_tokens
        rows = num_seqs * (1 + depth) if model == "target" else num_seqs
        seconds = 1e-4 + SAMPLED_S[model][rule] * rows
        if (model, rule) not in self.seen:
            self.seen.add((model, rule))
            seconds *= 20
        self.now += seconds
        return seconds


def run(timer: LawTimer, **changes: object):
    options = {"name": "law", "time_budget_s": 600.0, "clock": timer.clock} | changes
    return profile(timer, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured():
    timer = LawTimer(spike_share=0.1)
    return timer, run(timer)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 9, 17, 40, 100, 256])
@pytest.mark.parametrize("num_context_tokens", [0, 128, 20_000])
def test_verify_law_is_recovered_within_one_percent(
    measured, num_tokens: int, num_context_tokens: int
) -> None:
    timer, cost = measured
    truth = timer.base(num_tokens) + timer.head_row_s * num_tokens
    truth += timer.context_s * num_context_tokens
    assert cost.pass_s(num_tokens, 0, num_context_tokens) == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("num_tokens", [1, 4, 32, 200, 256])
def test_prefill_is_priced_without_the_head(measured, num_tokens: int) -> None:
    timer, cost = measured
    truth = timer.base(num_tokens) + timer.head_row_s
    assert cost.pass_s(num_tokens, num_tokens) == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("num_sequences", [1, 3, 7, 20, 32])
def test_draft_law_is_recovered_within_one_percent(measured, num_sequences: int) -> None:
    _, cost = measured
    truth = 0.004 + 0.0002 * num_sequences
    assert cost.draft_pass_s(num_sequences) == pytest.approx(truth, rel=0.01)


def test_price_of_catching_up_is_recovered(measured) -> None:
    _, cost = measured
    assert cost.draft_token_s == pytest.approx(0.0001, rel=0.01)


def test_staircases_are_kept() -> None:
    def staircase(n: int) -> float:
        return {1: 0.05, 2: 0.06, 3: 0.09, 4: 0.09, 6: 0.11, 8: 0.115, 12: 0.112}.get(n, 0.01 * n)

    cost = run(LawTimer(base=staircase, head_row_s=0.0))
    eight, twelve = cost.pass_s(8), cost.pass_s(12)
    assert eight == pytest.approx(0.115, rel=1e-3)
    assert twelve == pytest.approx(0.112, rel=1e-3)


def test_the_first_run_of_each_shape_is_dropped() -> None:
    timer = LawTimer()
    cost = run(timer)
    assert cost.pass_s(1) == pytest.approx(0.050 + timer.head_row_s, rel=1e-6)


def test_repeats_of_a_size_are_interleaved() -> None:
    timer = LawTimer(drafter="prompt-lookup")
    run(timer)
    repeats = sum(a == b for a, b in zip(timer.passes, timer.passes[1:], strict=False))
    assert repeats < 0.1 * len(timer.passes)


def test_verification_passes_are_ragged_in_depth_and_context() -> None:
    timer = LawTimer(drafter="prompt-lookup")
    run(timer)
    ragged = [p for p in timer.passes if sum(p[1]) == 48 and len(p[1]) > 1]
    assert ragged
    for _, queries, contexts in ragged:
        assert len(set(queries)) > 2
        assert len(set(contexts)) > 2
        assert max(queries) <= 1 + timer.max_num_speculative_tokens


def test_large_prefill_passes_hold_several_prompts() -> None:
    timer = LawTimer(drafter="prompt-lookup")
    run(timer, tokens=(1, 192, 512), time_budget_s=1e6)
    assert ("target", (256, 256), (256, 256)) in timer.passes
    assert ("target", (192,), (192,)) in timer.passes


def test_without_a_draft_model_drafting_is_free() -> None:
    timer = LawTimer(drafter="prompt-lookup")
    cost = run(timer)
    assert cost.drafter_is_free
    assert cost.draft_token_s == 0.0
    assert all(model == "target" for model, _, _ in timer.passes)


def test_budget_is_kept_by_giving_up_large_passes() -> None:
    timer = LawTimer(base=lambda n: 0.1 * n)
    cost = run(timer, time_budget_s=40.0)
    assert timer.now < 1.2 * 40.0
    assert 1 < cost.tokens[-1] < 256
    assert cost.pass_s(256) == pytest.approx(0.1 * 256 + timer.head_row_s * 256, rel=0.01)


def test_budget_that_allows_nothing_still_gives_a_model() -> None:
    cost = run(LawTimer(), time_budget_s=1e-6)
    assert cost.tokens[0] == 1


def test_repeats_stop_at_the_maximum() -> None:
    timer = LawTimer(drafter="prompt-lookup")
    run(timer, tokens=(1,), contexts=(128, 128), time_budget_s=1e9)
    target_of_one = [p for p in timer.passes if p == ("target", (1,), (128,))]
    assert len(target_of_one) == 1 + MAX_REPEATS


def test_grid_ends_where_the_engine_does() -> None:
    cost = run(LawTimer(max_pass_tokens=50, max_num_seqs=5))
    assert cost.tokens == tuple(n for n in PASS_TOKENS if n <= 50)
    assert cost.draft_sequences == (1, 2, 4, 5)


def test_a_small_pool_is_never_overfilled() -> None:
    # The timer itself asserts that every pass fits.
    cost = run(LawTimer(max_kv_tokens=320, max_model_len=64, max_num_seqs=8))
    assert cost.context_s == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize("context", [256, 1500])
def test_what_prompt_tokens_look_at_has_a_price_of_its_own(context: int) -> None:
    timer = LawTimer(pair_s=5e-7, drafter="prompt-lookup")
    cost = run(timer)
    assert cost.prefill_pair_s == pytest.approx(5e-7, rel=0.01)
    timer.time_pass((256,), (context,), 1)  # the first run of a shape is slow
    seconds = timer.time_pass((256,), (context,), 1)
    assert cost.pass_s(256, 256, context, 256 * context) == pytest.approx(seconds, rel=0.01)


def test_where_no_longer_context_fits_prompts_look_for_nothing() -> None:
    cost = run(LawTimer(pair_s=5e-7, max_model_len=64, drafter="prompt-lookup"))
    assert cost.prefill_pair_s == 0.0


def test_noise_in_the_context_price_is_clipped_at_zero() -> None:
    assert run(LawTimer(context_s=-1e-7)).context_s == 0.0


def test_the_same_seed_takes_the_same_order() -> None:
    one, other = LawTimer(), LawTimer()
    assert run(one, seed=3) == run(other, seed=3)
    assert one.passes == other.passes


def test_progress_runs_from_low_to_one() -> None:
    shares: list[float] = []
    run(LawTimer(), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[-1] == 1.0


def test_sizes_and_names_are_recorded() -> None:
    size = ModelSize(num_parameters=10, weight_bytes=20, flops_per_token=18.0, kv_bytes_per_token=4)
    cost = run(LawTimer(), size=size, device="gpu", dtype="bfloat16", overhead_s=0.001)
    assert (cost.weight_bytes, cost.flops_per_token, cost.kv_bytes_per_token) == (20, 18.0, 4)
    assert (cost.name, cost.device, cost.dtype) == ("law", "gpu", "bfloat16")
    assert cost.overhead_s == 0.001
    assert cost.measured


def test_an_engine_too_small_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to profile"):
        run(LawTimer(max_pass_tokens=0))


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_that_is_not_positive_is_refused(budget: float) -> None:
    with pytest.raises(ValueError, match="time_budget_s must be above 0"):
        run(LawTimer(), time_budget_s=budget)


def test_the_prices_of_sampling_are_what_it_takes_beyond_greedy() -> None:
    cost = run(LawTimer())
    assert cost.rejection_row_s == pytest.approx(3e-4)
    assert cost.coupled_row_s == pytest.approx(9e-4)
    assert cost.rejection_draw_s == pytest.approx(2e-4)
    assert cost.coupled_draw_s == 0.0  # a noisy negative one
    lookup = run(LawTimer(drafter="prompt-lookup"))
    assert lookup.coupled_row_s == pytest.approx(9e-4)
    assert lookup.rejection_draw_s == 0.0


def test_overhead_is_time_outside_passes_a_round() -> None:
    assert round_overhead_s(0.2, 0.4, 100) == pytest.approx(0.006)
    assert round_overhead_s(0.0, 0.0, 0) == 0.0


class DriftingTimer(LawTimer):
    """Passes on a machine whose speed swings by half every few seconds of its own clock."""

    def slowness(self) -> float:
        return 1.0 + 0.5 * (int(self.now / 10.0) % 2)

    def disturbed(self, seconds: float) -> float:
        return seconds * self.slowness()

    def probe(self) -> float:
        return 0.005 * self.slowness()


def test_a_probe_takes_the_machines_swings_out_of_the_prices() -> None:
    def spread(probe: Callable[[], float] | None, timer: DriftingTimer) -> float:
        model = profile(timer, name="swings", time_budget_s=800, clock=timer.clock, probe=probe)
        sizes = [n for n in model.tokens if n <= 256]
        ratios = [model.pass_s(n) / (timer.base(n) + timer.head_row_s * n) for n in sizes]
        return max(ratios) / min(ratios)

    plain, probed = DriftingTimer(), DriftingTimer()
    assert spread(probed.probe, probed) < 1.03
    assert spread(None, plain) > 1.2


class DisturbedTimer(LawTimer):
    """The pass right after a probe takes 4 ms more: it finds its caches swept."""

    swept = False

    def disturbed(self, seconds: float) -> float:
        more, self.swept = 0.004 * self.swept, False
        return seconds + more

    def probe(self) -> float:
        self.swept = True
        return 0.005


def test_what_a_probe_does_to_the_next_pass_is_in_no_price() -> None:
    disturbed, quiet = DisturbedTimer(), LawTimer()
    settings: dict[str, Any] = {"name": "swept", "time_budget_s": 800}
    prices = profile(disturbed, clock=disturbed.clock, probe=disturbed.probe, **settings)
    assert prices.verify_s == pytest.approx(
        profile(quiet, clock=quiet.clock, **settings).verify_s, rel=1e-9
    )


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model", "eagle"])
def test_the_runner_times_sampling_and_leaves_no_trace(drafter: str) -> None:
    target = tiny_llama()
    drafts: dict[str, Any] = {"draft-model": noisy_copy(target, 0.05), "eagle": tiny_eagle(target)}
    decoder = build_decoder(target, drafts.get(drafter, drafter))
    prompts = repetitive_prompts()[:3]
    expected = [r.token_ids for r in decoder.generate(prompts, 8)]
    parts = ("target",) if drafter == "prompt-lookup" else ("target", "draft")
    for part in parts:
        for rule in ("greedy", "rejection", "coupled"):
            assert decoder.runner.time_sampling(2, 3, rule, part) > 0  # type: ignore[arg-type]
    assert [r.token_ids for r in decoder.generate(prompts, 8)] == expected
    decoder.engine.add_request(prompts[0], SamplingParams(max_new_tokens=4))
    decoder.engine.step()
    with pytest.raises(RuntimeError, match="abort all requests first"):
        decoder.runner.time_sampling(2, 3, "coupled")
