"""The command line: in processes of its own for help, usage and signals, in-process for the rest."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from specdepth.agents.cli import COMMANDS, main
from specdepth.agents.options import _name_list
from specdepth.decoder.engine import Engine
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from tests.agents import interruptible
from tests.agents.tiny_target import save_tiny_target, write_prompts

PROBE = """
import sys
from specdepth.agents.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = [name for name in ("torch", "transformers", "stable_baselines3") if name in sys.modules]
print("HEAVY", *heavy, file=sys.stderr)
sys.exit(code)
"""


def probe(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *args], capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.txt")


def model_flags(target: Path) -> list[str]:
    return ["--target", str(target), "--dtype", "float32", "--device", "cpu"]


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main([*args, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ------------------------------------------------------------------ help and usage


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_and_loads_no_model_library(command):
    done = probe(command, "--help")
    assert done.returncode == 0
    assert f"specdepth {command} " in done.stdout
    for flag in ("--seed", "--device", "--out", "--json", "--quiet"):
        assert flag in done.stdout, flag
    assert "HEAVY\n" in done.stderr


def test_the_overview_names_every_command():
    done = probe("--help")
    assert done.returncode == 0
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert command.summary in done.stdout
    assert "HEAVY\n" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "usage: specdepth COMMAND"),
        (["generat"], 'Did you mean "generate"?'),
        (["frobnicate"], 'no command "frobnicate"; there are demo, profile,'),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--max-new-token", "3"], "--max-new-tokens"),
        (["generate", "hi", "--max-new-tokens", "three"], "three"),
        (["evaluate", "--loads", "1,two"], "--loads"),
        (["train", "--env", "replay"], "--env"),
        (["profile", "--dtype", "int8"], "int8"),
    ],
)
def test_usage_errors_exit_with_2_and_name_what_is_wrong(args, message, capsys):
    try:
        code: object = main(args)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "specdepth", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("specdepth ")


def test_the_commas_of_a_table_do_not_split_a_list_of_policies():
    text = "off,table:1-4=4,5-16=2,17-=0,policy:runs/x,fixed:4"
    assert _name_list([text]) == (
        "off",
        "table:1-4=4,5-16=2,17-=0",
        "policy:runs/x",
        "fixed:4",
    )


# ------------------------------------------------------------------ generate


@pytest.mark.parametrize("name", ["generate", "evaluate", "demo"])
def test_step_times_of_another_engine_are_a_cost_model_too(name):
    options = importlib.import_module(f"specdepth.agents.{COMMANDS[name].module}").Options
    args = ["hello"] if name == "generate" else []
    assert tyro.cli(options, args=[*args, "--cost-from", "times.csv"]).cost == "times.csv"


def test_generate_prints_the_decoders_own_text(target, capsys):
    flags = [*model_flags(target), "--max-new-tokens", "12"]
    assert main(["generate", "abc abc", *flags]) == 0
    shown = capsys.readouterr()
    decoder = SpeculativeDecoder.from_pretrained(target, dtype="float32", device="cpu")
    text = decoder.generate(["abc abc"], max_new_tokens=12)[0].text
    assert shown.out == f"{text}\n"
    assert "12 tokens in" in shown.err


@pytest.mark.parametrize("policy", ["off", "fixed:8", "heuristic", "table:1-=3", "random:3"])
def test_the_policy_does_not_change_the_text(target, capsys, policy):
    flags = [*model_flags(target), "--max-new-tokens", "16"]
    off = run_json(capsys, "generate", "abc abc", *flags, "--policy", "off")
    other = run_json(capsys, "generate", "abc abc", *flags, "--policy", policy)
    assert other["token_ids"] == off["token_ids"]
    assert other["policy"] == policy


def test_generate_json_tells_each_round(target, capsys):
    flags = [*model_flags(target), "--max-new-tokens", "10", "--policy", "fixed:4"]
    found = run_json(capsys, "generate", "abc abc", *flags)
    rounds = found["rounds"]
    assert sum(one["num_committed_tokens"] for one in rounds) == found["num_generated_tokens"]
    assert len(rounds) == found["num_rounds"]
    assert {one["depth"] for one in rounds} == {4}
    assert all(one["num_accepted_tokens"] <= one["num_drafted_tokens"] for one in rounds)


def test_verbose_shows_depth_and_acceptance_of_each_round(target, capsys):
    flags = [*model_flags(target), "--max-new-tokens", "6", "--policy", "fixed:3"]
    assert main(["generate", "abc abc", *flags, "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["round", "depth", "accepted", "ms", "text"]
    assert lines[1].split()[:2] == ["1", "3"]


def test_the_prompt_may_come_from_stdin(target, capsys, monkeypatch):
    import io

    flags = [*model_flags(target), "--max-new-tokens", "4"]
    typed = run_json(capsys, "generate", "abc", *flags)
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert run_json(capsys, "generate", "-", *flags)["token_ids"] == typed["token_ids"]


def test_generate_writes_what_it_found_where_it_is_told(target, capsys, tmp_path):
    flags = [*model_flags(target), "--max-new-tokens", "4", "--out", str(tmp_path / "x")]
    found = run_json(capsys, "generate", "abc", *flags)
    assert json.loads((tmp_path / "x" / "generation.json").read_text()) == found


# ------------------------------------------------------------------ errors


def failure(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a failing command prints."""
    assert main(list(args)) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    line: str = err.strip().splitlines()[-1]
    assert line.startswith(f"specdepth {args[0]}: ")
    return line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "hi", "--policy", "nonsense"], 'unknown scheduler "nonsense"; there are'),
        (["generate", "hi", "--policy", "fixed:99"], "deeper than max_num_speculative_tokens"),
        (["generate", "hi", "--policy", "policy:absent"], "absent"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "hi", "--temperature", "-1"], "temperature must be 0 or more"),
        (["generate", "hi", "--threads", "0"], "threads must be at least 1"),
        (["generate", "hi", "--cost", "absent.json"], "absent.json"),
        (["evaluate", "--policies", "nonsense"], "unknown scheduler"),
        (["evaluate", "--prompts", "absent.txt"], "no prompt file absent.txt"),
        (["demo", "--minutes", "0"], "minutes must be above 0"),
        (["demo", "--loads", "1,64"], "above --max-num-seqs 16"),
        (["profile", "--minutes", "-1"], "minutes must be above 0"),
        (["export", "absent"], "no training run in absent"),
        (["train", "--resume", "absent"], "no training run in absent"),
    ],
)
def test_bad_input_is_one_line_and_no_model_is_loaded_for_it(
    args, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # no default model is touched, and no run folder left behind

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", load)
    assert message in failure(capsys, *args)
    assert list(tmp_path.iterdir()) == []


def test_an_absent_model_is_named(capsys):
    line = failure(capsys, "generate", "hi", "--target", "no/such-model", "--device", "cpu")
    assert "no/such-model" in line


def test_a_model_without_tokenizer_cannot_read_text(capsys, tmp_path):
    folder = save_tiny_target(tmp_path / "bare", with_tokenizer=False)
    assert "no tokenizer" in failure(capsys, "generate", "hi", *model_flags(folder))


def test_a_missing_gpu_is_named(target, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    line = failure(capsys, "generate", "hi", "--target", str(target), "--device", "cuda")
    assert "CUDA" in line


@pytest.mark.parametrize("command", ["demo", "profile", "evaluate"])
def test_an_out_that_is_a_file_is_refused_first(command, target, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    line = failure(capsys, command, *model_flags(target), "--out", str(file))
    assert "is a file" in line
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_out_is_refused_first(target, capsys, tmp_path):
    tmp_path.chmod(0o500)
    out = str(tmp_path / "run")
    assert "cannot write" in failure(capsys, "profile", *model_flags(target), "--out", out)


def test_an_out_below_a_file_is_refused_first(target, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "run")
    assert "cannot write" in failure(capsys, "profile", *model_flags(target), "--out", out)


def test_debug_shows_where_an_error_came_from(capsys):
    assert main(["generate", "hi", "--policy", "nonsense", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_of_ours_is_marked_as_one(target, capsys, monkeypatch):
    def fail(self: Engine) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(Engine, "step", fail)
    line = failure(capsys, "generate", "hi", *model_flags(target))
    assert "ZeroDivisionError: oh" in line
    assert "--debug" in line


# ------------------------------------------------------------------ interrupts


def test_an_interrupt_keeps_the_text_so_far(target, capsys, monkeypatch):
    step, count = Engine.step, 0

    def few(self: Engine) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", few)
    flags = [*model_flags(target), "--policy", "off", "--max-new-tokens", "50"]
    assert main(["generate", "hi", *flags]) == 130
    shown = capsys.readouterr()
    assert "interrupted after 3 tokens" in shown.err
    assert "abort" in shown.err
    assert shown.out.endswith("\n")


def test_ctrl_c_ends_a_process_with_130(target):
    flags = [*model_flags(target), "--max-new-tokens", "900", "--policy", "off", "--verbose"]
    process = interruptible.start("generate", "hi", *flags)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in err
    assert "Traceback" not in err


# ------------------------------------------------------------------ profile, evaluate, train, export


def test_profile_writes_a_cost_model_that_others_take(target, prompts, capsys, tmp_path):
    from specdepth.scheduler.cost import CostModel

    out = tmp_path / "profile"
    flags = [*model_flags(target), "--max-num-seqs", "4", "--prompts", str(prompts)]
    found = run_json(
        capsys, "profile", *flags, "--minutes", "0.05", "--max-new-tokens", "8", "--out", str(out)
    )
    cost = CostModel.load(out / "cost.json")
    assert cost.measured
    assert found["knee_tokens"] == cost.knee_tokens()
    assert {"cost.json", "knee.svg", "report.html", "results.json"} <= {
        file.name for file in out.iterdir()
    }
    run_json(
        capsys,
        "generate",
        "abc",
        *flags[:-2],
        "--cost",
        str(out / "cost.json"),
        "--max-new-tokens",
        "2",
    )


def test_evaluate_compares_with_off_and_fixed_depths(target, prompts, capsys, tmp_path):
    out = tmp_path / "evaluate"
    found = run_json(
        capsys,
        "evaluate",
        *model_flags(target),
        *("--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "8"),
        *("--policies", "heuristic,table:1-2=4,3-=0", "--loads", "1,3", "--fixed-depths", "2,8"),
        *("--requests", "4", "--max-num-seqs", "4"),
    )
    rows = found["results"]["rows"]
    assert {row["policy"] for row in rows} == {
        "off",
        "fixed:2",
        "fixed:8",
        "heuristic",
        "table:1-2=4,3-=0",
    }
    assert {row["load"] for row in rows} == {1, 3}
    assert set(rows[0]) == {"policy", "load", "metric", "value", "unit", "ci_low", "ci_high"}
    speedups = [row for row in rows if row["metric"] == "speedup"]
    assert len(speedups) == 5 * 2
    assert all(row["ci_low"] <= row["value"] <= row["ci_high"] for row in speedups)
    assert any("in hindsight: table:" in note for note in found["notes"])
    assert json.loads((out / "results.json").read_text())["rows"] == rows
    assert "heuristic" in (out / "report.html").read_text()


TRAIN = (
    *("--timesteps", "128", "--minutes", "1", "--ppo.n-steps", "16", "--ppo.batch-size", "16"),
    *("--ppo.n-epochs", "1", "--ppo.hidden", "8", "--warm-start.rounds", "20"),
    *("--workload.num-requests", "6", "--workload.max-new-tokens", "8"),
    *("--workload.concurrencies", "1", "3", "--decoder.max-num-seqs", "4"),
)


def train_flags(target: Path, prompts: Path, out: Path) -> list[str]:
    decoder = ["--decoder.target", str(target), "--decoder.dtype", "float32", "--device", "cpu"]
    return [*decoder, "--prompts", str(prompts), "--out", str(out), *TRAIN]


@pytest.fixture(scope="module")
def run(
    target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A training run, and what the command printed."""
    import contextlib
    import io

    from specdepth.agents import train_command

    out = tmp_path_factory.mktemp("runs") / "run"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(train_command, "PROFILE_SECONDS", 1.0)
        assert main(["train", *train_flags(target, prompts, out), "--json", "--quiet"]) == 0
    return out, json.loads(printed.getvalue())


def test_train_leaves_a_policy_that_the_decoder_runs(run, target, capsys):
    out, found = run
    assert found["policy"] == str(out / "policy")
    assert found["num_updates"] >= 1
    assert (out / "cost.json").is_file()
    flags = [*model_flags(target), "--policy", found["policy"], "--max-new-tokens", "8"]
    learned = run_json(capsys, "generate", "abc", *flags)
    off = run_json(capsys, "generate", "abc", *flags[:-4], "--policy", "off", *flags[-2:])
    assert learned["token_ids"] == off["token_ids"]


def test_export_writes_the_policy_of_the_checkpoint(run, capsys, tmp_path):
    out, _ = run
    found = run_json(capsys, "export", str(out), "--out", str(tmp_path / "policy"))
    assert found["policy"] == str(tmp_path / "policy")
    names = {file.name for file in (tmp_path / "policy").iterdir()}
    assert names == {"policy.safetensors", "config.json", "README.md"}
    weights = "policy.safetensors"
    assert (tmp_path / "policy" / weights).read_bytes() == (out / "policy" / weights).read_bytes()


def test_train_goes_on_with_a_run(run, capsys):
    out, first = run
    found = run_json(capsys, "train", "--resume", str(out), "--timesteps", "64")
    assert found["num_timesteps"] > first["num_timesteps"]
    assert found["folder"] == str(out)


def test_train_refuses_the_folder_of_another_run(run, target, prompts, capsys):
    out, _ = run
    assert "already holds a run" in failure(capsys, "train", *train_flags(target, prompts, out))


def test_a_policy_for_another_k_is_refused_before_a_model_is_loaded(run, capsys, monkeypatch):
    out, _ = run
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", None)
    line = failure(
        capsys,
        "generate",
        "hi",
        *("--policy", f"policy:{out / 'policy'}", "--max-num-speculative-tokens", "4"),
    )
    assert "max_num_speculative_tokens 32, not 4" in line


def test_a_policy_for_another_pair_is_refused(run, capsys, tmp_path):
    out, _ = run
    other = save_tiny_target(tmp_path / "other")
    line = failure(
        capsys, "generate", "hi", *model_flags(other), "--policy", f"policy:{out / 'policy'}"
    )
    assert "model pair tiny+prompt-lookup, not other+prompt-lookup" in line
