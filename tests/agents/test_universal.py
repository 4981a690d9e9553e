"""One policy for many machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdepth.agents import universal
from specdepth.agents.cli import main
from specdepth.agents.offset_search import SearchConfig
from specdepth.agents.survival_fit import SurvivalFitConfig
from specdepth.agents.survival_rows import TARGET, UNKNOWN_SHARE, exploring_behaviours
from specdepth.agents.universal import (
    UniversalConfig,
    _rows,
    train_universal,
)
from specdepth.decoder.replay import ReplayDecoder
from specdepth.decoder.serving import ServeResult, serve
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace
from specdepth.decoder.workload import ClosedLoop, Workload
from specdepth.scheduler.baselines import Off
from specdepth.scheduler.baselines.capped_greedy import Shrinkage
from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost
from specdepth.scheduler.depth import DepthScheduler
from specdepth.scheduler.features import FEATURE_NAMES
from specdepth.scheduler.policy_names import find_policy
from tests.agents.made_trace import DEPTH, make_trace

QUICK = UniversalConfig(
    loads=(1, 4),
    machines_per_step=1,
    survival=SurvivalFitConfig(hidden_units=12, num_steps=300),
    search=SearchConfig(iterations=1, pairs=1, num_requests=4, num_replays=1),
)


def draft_trace() -> Trace:
    """The same law with a draft model, which knows how sure to be."""
    plain = make_trace(20, 20)
    size = len(plain.accepted)
    info = replace(plain.info, model_pair="made + draft", drafter="draft-model")
    signals = np.random.default_rng(1).random((size, DEPTH))
    left = np.concatenate([np.arange(n, 0, -1) for n in plain.num_tokens])
    return replace(
        plain,
        info=info,
        proposal_length=np.full(size, DEPTH),
        accepted=np.minimum(plain.accepted, left),
        match_length=np.zeros(size, np.int64),
        num_matches=np.zeros(size, np.int64),
        num_agreeing=np.zeros(size, np.int64),
        draft_top1=signals,
        draft_entropy=1 - signals,
        draft_margin=signals / 2,
    )


def served(trace: Trace, cost: CostModel, scheduler: DepthScheduler) -> ServeResult:
    decoder = ReplayDecoder(trace, cost)
    requests = decoder.requests(trace.rows("held-out"))
    return serve(
        decoder.engine, Workload(requests=requests, process=ClosedLoop.constant(4)), scheduler
    )


def test_one_policy_drafts_by_the_prices_of_machines_that_it_never_saw() -> None:
    traces = {"lookup": make_trace(20, 20), "draft": draft_trace()}
    policy = train_universal(traces, QUICK)
    assert policy.card.model_pair == policy.card.drafter == "any"
    free = CostModel.linear(knee=512, draft_base_s=0.001)
    dear = CostModel.linear(token_s=0.05, draft_base_s=0.001)
    for trace in traces.values():
        fast, slow = served(trace, free, policy), served(trace, dear, policy)
        assert fast.metrics.mean_depth > slow.metrics.mean_depth + 1
        assert fast.throughput_tok_s > 1.5 * served(trace, free, Off()).throughput_tok_s
        assert slow.throughput_tok_s > 0.99 * served(trace, dear, Off()).throughput_tok_s


def test_a_start_that_keeps_all_from_drafting_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(universal, "START", {1: Shrinkage(price=1e6)})
    traces = {"lookup": make_trace(20, 20), "draft": draft_trace()}
    # With samples this close to the start only the choice of the start can lower the price.
    search = replace(QUICK.search, sigma=1e-6, step=1e-6)
    policy = train_universal(traces, replace(QUICK, loads=(4,), search=search))
    assert policy.weights.shrinkage[4].price == pytest.approx(1, abs=1e-3)


def test_a_quarter_of_the_rows_is_seen_without_the_targets_signals_too() -> None:
    traces = {"lookup": make_trace(20, 20), "draft": draft_trace()}
    seen = _rows(traces, np.random.default_rng(0), lambda top: exploring_behaviours(0, top))
    known = seen.features[:, TARGET[0]] == 1
    hidden = ~known & (seen.features[:, FEATURE_NAMES.index("generated")] > 0)
    assert hidden.sum() == pytest.approx(UNKNOWN_SHARE * known.sum(), rel=0.1)
    assert not seen.features[hidden][:, TARGET].any()
    bare = seen.features.copy()
    bare[:, TARGET] = 0.0
    assert {tuple(row) for row in bare[hidden].tolist()} <= {
        tuple(row) for row in bare[known].tolist()
    }


@pytest.mark.parametrize(
    ("policy", "pair", "cost_name"),
    [
        ("universal-1", "smollm2-eagle3", "cpu-smollm2-eagle3-bf16"),
        ("smollm2-prompt-lookup-cpu-bf16", "smollm2-prompt-lookup", "cpu-smollm2-bf16"),
    ],
)
def test_shipped_policies_draft_where_the_target_shows_nothing(
    policy: str, pair: str, cost_name: str
) -> None:
    """As in a trace of a log: a fit that knew only first rounds without signals never drafted there."""
    trace, cost = load_trace(f"{pair}-greedy"), load_cost(cost_name)
    unknown = np.full(len(trace.accepted), np.nan)
    silent = replace(trace, target_top1=unknown, target_entropy=unknown)
    depths = []
    for one in (trace, silent):
        decoder = ReplayDecoder(one, cost)
        requests = decoder.requests(one.rows("held-out")[:12])
        workload = Workload(requests=requests, process=ClosedLoop.constant(4))
        depths.append(serve(decoder.engine, workload, find_policy(policy)).metrics.mean_depth)
    assert depths[0] > 1
    assert depths[1] > 0.8 * depths[0]


def test_training_can_be_repeated_and_another_seed_differs() -> None:
    traces = {"lookup": make_trace(20, 20)}
    first, again, other = (train_universal(traces, replace(QUICK, seed=n)) for n in (0, 0, 1))
    for one, same in zip(first.weights.weights, again.weights.weights, strict=True):
        np.testing.assert_array_equal(one, same)
    assert not np.array_equal(first.weights.weights[0], other.weights.weights[0])


def test_held_out_requests_do_not_matter() -> None:
    trace = make_trace(20, 20)
    spoiled = trace.accepted.copy()
    for row in trace.rows("held-out"):
        spoiled[trace.starts[row] : trace.starts[row] + trace.num_tokens[row]] = 0
    one = train_universal({"a": trace}, QUICK)
    other = train_universal({"a": replace(trace, accepted=spoiled)}, QUICK)
    for first, second in zip(one.weights.weights, other.weights.weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_one_policy_learns_from_traces_of_different_depths() -> None:
    trace = make_trace(20, 20)
    info = replace(trace.info, max_num_speculative_tokens=DEPTH + 1)
    agreement = np.pad(trace.agreement, ((0, 0), (0, 1)))
    deeper = replace(trace, info=info, agreement=agreement)
    policy = train_universal({"a": trace, "b": deeper}, QUICK)
    assert policy.max_num_speculative_tokens == DEPTH + 1
    free = CostModel.linear(knee=512)
    for one in (trace, deeper):
        assert served(one, free, policy).metrics.mean_depth > 2


def test_no_traces_and_bad_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        train_universal({}, QUICK)
    with pytest.raises(ValueError, match="loads must be out of"):
        UniversalConfig(loads=(3,))
    with pytest.raises(ValueError, match="machines_per_step"):
        UniversalConfig(machines_per_step=0)


def test_the_command_writes_a_policy_with_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace(20, 20).save(tmp_path / "a.npz")
    out = tmp_path / "policy"
    numbers = [
        "--iterations",
        "1",
        "--machines-per-step",
        "1",
        "--num-requests",
        "4",
        "--json",
        "--quiet",
    ]
    loads = ("--loads", "1")
    assert (
        main(["train-universal", str(tmp_path / "a.npz"), *loads, *numbers, "--out", str(out)]) == 0
    )
    assert json.loads(capsys.readouterr().out)["traces"] == ["a"]
    policy = find_policy(out, model_pair="whatever", drafter="prompt-lookup")
    assert policy.card.training["loads"] == [1]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "offsets searched over random machines" in card
    assert "PPO" not in card


def test_two_traces_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train-universal", "x/a.npz", "y/a.npz", "--out", str(tmp_path / "p")]
    assert main(argv) == 1
    assert "told apart by file name" in capsys.readouterr().err
