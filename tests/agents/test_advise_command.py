from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents.advice_settings import settings_text
from specdepth.agents.advise_command import Options, run
from specdepth.agents.console import Console
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import load_trace
from specdepth.scheduler.baselines import TableDepth, make_scheduler
from specdepth.scheduler.baselines.capped_greedy import CappedGreedyDepth
from specdepth.scheduler.cost import CostModel
from tests.agents.made_trace import make_trace

NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs that copy from their prompts, as token ids."""
    rng = random.Random(0)
    lines = []
    for _ in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000) for _ in range(24)]
        start = rng.randrange(8)
        lines.append(json.dumps({"prompt": prompt, "output": prompt[start : start + 12]}))
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve tokens are free, and each one more costs 10 ms."""
    rows = [f"{n},{50 + 10 * max(n - 12, 0)}" for n in (1, 4, 12, 64)]
    path = tmp_path_factory.mktemp("times") / "times.csv"
    path.write_text("tokens,ms\n" + "\n".join(rows) + "\n")
    return path


def run_json(options: Options) -> dict[str, Any]:
    out = io.StringIO()
    run(options, Console(as_json=True, quiet=True, stdout=out, stderr=io.StringIO()))
    (line,) = out.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def answer(
    log: Path, times: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("advice") / "out"
    options = Options(
        from_outputs=log, cost_from=times, loads=(1, 4), depths=(2, 4), out=folder, json=True
    )
    return run_json(options), folder


def test_a_log_and_step_times_give_advice(answer: tuple[dict[str, Any], Path]) -> None:
    found, _ = answer
    first, last = found["loads"]
    assert found["drafter"] == "prompt-lookup"
    assert found["num_training_requests"] + found["num_judged_requests"] == NUM_REQUESTS
    assert found["cost_is_measured"] is True
    # Copied text is accepted as deep as it is drafted, and five tokens are free.
    assert (first["depth"], first["pays"]) == (4, "yes")
    assert first["table_over_off"]["value"] > 2
    assert last["depth"] >= 2
    assert found["largest_priced_pass_tokens"] == 64


def test_files_hold_the_advice_and_the_settings(answer: tuple[dict[str, Any], Path]) -> None:
    found, folder = answer
    assert json.loads((folder / "advice.json").read_text()) == found
    vllm = json.loads((folder / "vllm.json").read_text())
    assert vllm == found["settings"]["vllm"]["speculative_config"]
    assert vllm["method"] == "ngram"
    table = TableDepth(found["table"])
    read = TableDepth.from_json(folder / "vllm.json")
    sglang = json.loads((folder / "sglang.json").read_text())
    for size in range(1, 9):
        assert read.depth_at(size) == table.depth_at(size)
    for low, _, depth in table.ranges:
        if low <= found["max_load"]:
            assert sglang[str(low)] == {"candidate_steps": [depth]}


def test_the_trace_of_the_log_is_kept_for_other_cost_models(
    answer: tuple[dict[str, Any], Path], times: Path, tmp_path: Path
) -> None:
    found, folder = answer
    trace = folder / "trace.npz"
    assert Trace.load(trace).num_requests == NUM_REQUESTS
    again = run_json(
        Options(
            trace=str(trace),
            cost=str(times),
            loads=(1, 4),
            depths=(2, 4),
            out=tmp_path / "again",
            json=True,
        )
    )
    assert again["loads"] == found["loads"]
    assert again["table"] == found["table"]


def test_a_person_gets_tables_sentences_and_settings(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    make_trace(40, 12).save(trace)
    cost = tmp_path / "cost.json"
    CostModel.linear(knee=8).save(cost)
    out = io.StringIO()
    options = Options(trace=str(trace), cost=str(cost), loads=(1, 8), out=tmp_path / "out")
    run(options, Console(quiet=True, stdout=out, stderr=io.StringIO()))
    text = out.getvalue()
    for part in ("Knee: a pass of", "Speculation pays at load 1", "Switch it off", "Best table"):
        assert part in text
    assert "--speculative-config '{" in text
    assert "--speculative-algorithm NGRAM" in text
    assert "modelled, not measured" in text
    assert "without looping" in text


def test_a_table_that_never_drafts_needs_no_settings(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    none = make_trace(24, 8)
    replace(none, accepted=0 * none.accepted).save(trace)
    cost = tmp_path / "cost.json"
    CostModel.linear(knee=8).save(cost)
    folder = tmp_path / "out"
    options = Options(trace=str(trace), cost=str(cost), loads=(1,), out=folder, json=True)
    found = run_json(options)
    assert found["off_above"] == 0
    assert not (folder / "vllm.json").exists()
    assert found["settings"]["sglang"]["flags"] == []
    lines = settings_text(found["settings"])
    assert "  no --speculative-config" in lines
    assert "  no --speculative-algorithm" in lines


def test_nothing_heavy_is_imported(log: Path, times: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from specdepth.agents.advise_command import Options, run\n"
        "from specdepth.agents.console import Console\n"
        "log, times, out = map(Path, sys.argv[1:])\n"
        "run(Options(from_outputs=log, cost_from=times, loads=(1,), depths=(2,), out=out),\n"
        "    Console(quiet=True))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    arguments = [str(log), str(times), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()


def refusal(options: Options) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller looks at the sentence
        run(options, Console(quiet=True, stdout=io.StringIO(), stderr=io.StringIO()))
    return str(error.value)


def test_bad_input_is_refused_in_a_sentence(log: Path, times: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty, text, foreign = (tmp_path / name for name in ("empty.jsonl", "text.jsonl", "x.npz"))
    empty.write_text("")
    text.write_text('{"prompt": "Hello", "output": "there"}\n')
    foreign.write_bytes(b"no trace")
    trace = tmp_path / "trace.npz"
    make_trace(12, 8).save(trace)
    with_times: dict[str, Any] = {"cost_from": times, "out": out}
    assert "no request with output" in refusal(Options(from_outputs=empty, **with_times))
    assert "--tokenizer" in refusal(Options(from_outputs=text, **with_times))
    assert "x.npz" in refusal(Options(trace=str(foreign), **with_times))
    assert "load 9 needs at least 9" in refusal(Options(trace=str(trace), loads=(9,), **with_times))
    deep = Options(trace=str(trace), max_num_speculative_tokens=9, **with_times)
    assert "recorded up to 4" in refusal(deep)
    assert "needs the pass times" in refusal(Options(from_outputs=log, out=out))
    assert "--cost-from exclude" in refusal(Options(cost="cost.json", **with_times))
    both = Options(trace=str(trace), from_outputs=log, **with_times)
    assert "--trace and --from-outputs exclude" in refusal(both)
    assert "unknown engine profile" in refusal(Options(engine="other", **with_times))
    assert not out.exists()


def test_a_rule_over_a_named_estimator_can_be_loaded_again(
    log: Path, times: Path, tmp_path: Path
) -> None:
    run_json(
        Options(
            from_outputs=log,
            cost_from=times,
            loads=(1, 2),
            depths=(2,),
            survival="match",
            out=tmp_path,
            json=True,
        )
    )
    rule = make_scheduler(f"rule:{tmp_path / 'rule.json'}")
    assert isinstance(rule, CappedGreedyDepth)
    assert sorted(rule.shrinkage) == [1, 2]
    assert json.loads((tmp_path / "rule.json").read_text())["notes"]["trace"] == "trace.npz"


def test_the_shipped_model_is_used_for_traces_of_its_pair(tmp_path: Path) -> None:
    shipped = load_trace("default")
    few = np.concatenate([shipped.rows("train")[:4], shipped.rows("held-out")[:4]])
    shipped.select(few).save(tmp_path / "few.npz")
    found = run_json(
        Options(
            trace=str(tmp_path / "few.npz"),
            cost="cpu-smollm2-bf16",
            loads=(1,),
            depths=(4,),
            out=tmp_path / "out",
            json=True,
        )
    )
    assert "SurvivalModel" in found["rule"]
    assert (tmp_path / "out" / "rule.json").is_file()
