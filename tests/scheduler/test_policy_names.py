"""Policies by name, and those that are shipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdepth.checkpoints import shipped_path
from specdepth.decoder.config import EngineConfig
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import serve
from specdepth.decoder.trace_files import load_trace
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.baselines import Off, make_scheduler
from specdepth.scheduler.cost_files import load_cost
from specdepth.scheduler.policy_names import find_policy, shipped_policies
from tests.agents.made_policy import save_constant

PAIRS = {
    "smollm2-prompt-lookup-cpu-bf16": ("smollm2-prompt-lookup-greedy", "cpu-smollm2-bf16"),
    "smollm2-prompt-lookup-cpu-bf16-ppo": ("smollm2-prompt-lookup-greedy", "cpu-smollm2-bf16"),
    "smollm2-eagle3-cpu-bf16": ("smollm2-eagle3-greedy", "cpu-smollm2-eagle3-bf16"),
    "smollm2-prompt-lookup-cpu-bf16-amx": ("smollm2-prompt-lookup-greedy", "cpu-smollm2-bf16-amx"),
    "smollm2-eagle3-cpu-bf16-amx": ("smollm2-eagle3-greedy", "cpu-smollm2-eagle3-bf16-amx"),
}
UNIVERSAL = "universal-1"


def test_the_shipped_policies_are_these() -> None:
    assert shipped_policies() == tuple(sorted([*PAIRS, UNIVERSAL]))


@pytest.mark.parametrize(
    ("name", "trace", "cost"),
    [
        *((name, *pair) for name, pair in PAIRS.items()),
        *((UNIVERSAL, *pair) for pair in sorted(set(PAIRS.values()))),
    ],
)
def test_a_shipped_policy_fits_its_pair_and_beats_no_speculation(
    name: str, trace: str, cost: str
) -> None:
    recorded = load_trace(trace)
    policy = make_scheduler(
        f"policy:{name}",
        model_pair=recorded.info.model_pair,
        drafter=recorded.info.drafter,
        max_num_speculative_tokens=recorded.info.max_num_speculative_tokens,
    )
    decoder = ReplayDecoder(recorded, load_cost(cost))
    requests = decoder.requests(recorded.rows("held-out")[:12])
    work = Workload(requests=requests, process=ClosedLoop.constant(4))
    gained = serve(decoder.engine, work, policy).throughput_tok_s
    assert gained > 1.05 * serve(decoder.engine, work, Off()).throughput_tok_s


@pytest.mark.parametrize("name", ["smollm2-prompt-lookup-cpu-bf16", UNIVERSAL])
def test_a_shipped_policy_is_as_good_where_engines_draft_less(name: str) -> None:
    """At load 16 hardly anybody drafts more than 8 tokens, so an engine with that limit loses nothing
    unless its features look strange to a policy that was made in one of 32.
    """
    recorded, cost = load_trace("default"), load_cost("cpu-smollm2-bf16")
    rates = {}
    for top in (8, 16, 32):
        config = EngineConfig(max_num_speculative_tokens=top, max_num_seqs=16)
        decoder = ReplayDecoder(recorded, cost, config)
        work = Workload(
            requests=decoder.requests(recorded.rows("held-out")[:48]),
            process=ClosedLoop.constant(16),
        )
        policy = make_scheduler(f"policy:{name}", max_num_speculative_tokens=top)
        rates[top] = serve(decoder.engine, work, policy).throughput_tok_s
    assert min(rates.values()) > 0.97 * max(rates.values())


@pytest.mark.parametrize("name", [*PAIRS, UNIVERSAL])
def test_the_card_says_how_it_was_made_and_holds_no_path_of_a_machine(name: str) -> None:
    training = find_policy(name).card.training
    assert set(training["loads"]) >= {1, 2, 4, 8, 16, 32}
    with shipped_path("policies", name) as folder:
        for file in ("README.md", "config.json"):
            text = (folder / file).read_text(encoding="utf-8")
            assert not any(root in text for root in ("/tmp/", "/work/", "/home/", "/root/"))


def test_a_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_constant(tmp_path / UNIVERSAL, 2)
    monkeypatch.chdir(tmp_path)
    assert find_policy(UNIVERSAL).card.model_pair == "made + prompt-lookup"


def test_a_policy_of_another_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="trained for model pair"):
        find_policy("smollm2-eagle3-cpu-bf16", model_pair="a + b")


def test_a_policy_of_depths_is_for_one_limit_and_offsets_for_any(tmp_path: Path) -> None:
    save_constant(tmp_path, 2)
    top = find_policy(tmp_path).max_num_speculative_tokens
    with pytest.raises(ValueError, match=f"trained for max_num_speculative_tokens {top}"):
        find_policy(tmp_path, max_num_speculative_tokens=top - 1)
    assert find_policy(UNIVERSAL, max_num_speculative_tokens=4).max_num_speculative_tokens == 32


def test_the_universal_policy_reads_prices() -> None:
    """The same requests on a machine where tokens are dear: it drafts less."""
    recorded = load_trace("default")
    depths = []
    for cost in ("h100-llama-8b-modelled", "cpu-smollm2-float32"):
        decoder = ReplayDecoder(recorded, load_cost(cost))
        requests = decoder.requests(recorded.rows("held-out")[:48])
        work = Workload(requests=requests, process=ClosedLoop.constant(32))
        depths.append(serve(decoder.engine, work, find_policy(UNIVERSAL)).metrics.mean_depth)
    assert depths[0] > depths[1] + 1
    assert np.isfinite(depths).all()
