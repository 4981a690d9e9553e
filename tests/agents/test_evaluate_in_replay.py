"""`specdepth evaluate --mode replay`, from the command line to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.cli import main
from specdepth.agents.evaluate_in_replay import BEST_SINGLE, TABLE
from specdepth.agents.replay_evaluate import BEST_FIXED, ONE_DEPTH_ORACLE, ORACLE
from specdepth.agents.results import Results
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace

COST = CostModel.linear(base_s=0.05, token_s=0.01, knee=3, name="made")
FIXED = [f"fixed:{depth}" for depth in range(1, 5)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("replay")
    make_trace(24, num_tokens=16).save(folder / "made.npz")
    COST.save(folder / "cost.json")
    return [
        *("evaluate", "--mode", "replay", "--max-num-speculative-tokens", "4"),
        *("--policies", "heuristic"),
        *("--trace", str(folder / "made.npz"), "--cost", str(folder / "cost.json")),
    ]


@pytest.fixture(scope="module")
def results(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("out")
    more = ["--loads", "1,4", "--arrivals", "constant,varying", "--tpot-limit-ms", "60"]
    assert main([*files, *more, "--out", str(out), "--quiet"]) == 0
    assert "tuned-table" in (out / "report.html").read_text()
    return Results.load(out / "results.json")


def test_references_and_oracles_are_always_in_the_table(results):
    references = [TABLE, ORACLE, ONE_DEPTH_ORACLE, BEST_FIXED, BEST_SINGLE]
    assert results.policies == ["off", *FIXED, "heuristic", *references]
    assert results.loads == [1, 4, "varying"]


@pytest.mark.parametrize("load", [1, 4, "varying"])
def test_every_policy_has_the_numbers_of_the_comparison(results, load):
    for policy in results.policies:
        for metric in (
            *("throughput_tok_s", "speedup", "ratio_to_best_fixed", "ratio_to_table"),
            *("ratio_to_best_single_fixed", "oracle_gap_closed", "goodput_tok_s", "policy_ms"),
            *("tpot_p99_ms", "ttft_p99_ms", "mean_depth", "acceptance_length", "mean_in_flight"),
        ):
            assert results.find(policy, load, metric) is not None, f"{policy} lacks {metric}"
    row = results.find(TABLE, load, "speedup")
    assert row is not None
    assert row.ci_low is not None
    assert row.ci_low <= row.value


def test_tuned_rules_come_from_the_training_split(files, results, capsys, tmp_path):
    assert main([*files, "--loads", "1,4", "--out", str(tmp_path), "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    (note,) = [note for note in found["notes"] if "training split" in note]
    assert "the best table table:1-" in note
    single = results.find(BEST_SINGLE, 1, "ratio_to_best_single_fixed")
    assert single is not None
    assert single.value == 1


def test_requests_that_loop_can_be_left_out(files, capsys, tmp_path):
    counts = {}
    for looping in ("all", "without", "only"):
        more = ["--loads", "1", "--looping", looping, "--out", str(tmp_path / looping)]
        assert main([*files, *more, "--json", "--quiet"]) == 0
        first = json.loads(capsys.readouterr().out)["notes"][0]
        counts[looping] = int(first.split("order: ")[1].split()[0])
    assert counts["all"] == 8
    assert 0 < counts["only"] < 8
    assert counts["all"] == counts["without"] + counts["only"]


def test_no_model_is_loaded(files, tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", refuse)
    assert main([*files, "--loads", "2", "--out", str(tmp_path), "--quiet"]) == 0


def test_a_training_split_that_is_too_small_leaves_the_table_out(capsys, tmp_path):
    trace = make_trace(24, num_tokens=8)
    trace.select(trace.rows("held-out")).save(tmp_path / "held-out.npz")
    COST.save(tmp_path / "cost.json")
    arguments = [
        *("evaluate", "--mode", "replay", "--max-num-speculative-tokens", "4", "--loads", "2"),
        *("--policies", "heuristic"),
        *("--trace", str(tmp_path / "held-out.npz"), "--cost", str(tmp_path / "cost.json")),
        *("--out", str(tmp_path / "out"), "--json", "--quiet"),
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("has 0 such requests, too few for load 2" in note for note in found["notes"])
    assert TABLE not in {row["policy"] for row in found["results"]["rows"]}


def test_an_engine_with_lag_drafts_otherwise(files, capsys, tmp_path):
    depths = {}
    for engine in ("specdepth", "vllm-like"):
        more = ["--loads", "4", "--engine", engine, "--out", str(tmp_path / engine)]
        assert main([*files, *more, "--json", "--quiet"]) == 0
        rows = json.loads(capsys.readouterr().out)["results"]["rows"]
        (depths[engine],) = [
            row["value"]
            for row in rows
            if (row["policy"], row["metric"]) == ("fixed:4", "mean_depth")
        ]
    assert depths["vllm-like"] < depths["specdepth"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--loads", "9"], "load 9 needs at least 9 different requests"),
        (["--loads", "0"], "at least 1, got [0]"),
        (["--loads", "1", "--arrivals", "tidal"], "no arrivals 'tidal'"),
        (["--policies", "nonsense"], 'unknown scheduler "nonsense"'),
        (["--policies", "fixed:5"], "fixed:5 is deeper"),
        (["--engine", "other"], 'unknown engine profile "other"'),
        (["--trace", "absent"], "no trace 'absent'"),
        (["--cost", "absent"], "unknown cost model 'absent'"),
        (["--loads", "1", "--max-num-speculative-tokens", "8"], "recorded up to 4"),
    ],
)
def test_bad_input_is_one_sentence(files, more, message, capsys, tmp_path):
    assert main([*files, *more, "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("specdepth evaluate: ")
    assert message in error


def test_live_runs_take_no_arrivals(capsys, tmp_path):
    assert main(["evaluate", "--arrivals", "ramp", "--out", str(tmp_path)]) == 1
    assert "--arrivals and --looping need --mode replay" in capsys.readouterr().err


def test_the_report_is_in_the_folder_asked_for(files, tmp_path):
    folder = tmp_path / "a" / "b"
    assert main([*files, "--loads", "1", "--out", str(folder), "--quiet"]) == 0
    assert {path.name for path in Path(folder).iterdir()} == {"report.html", "results.json"}
