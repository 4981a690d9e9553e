"""`specdepth record`: from prompts and from logs, interrupted and gone on, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.agents import recording
from specdepth.agents.cli import main
from specdepth.agents.trace_parts import TraceParts
from specdepth.agents.trace_tables import survival_grid
from specdepth.decoder.config import SamplingParams
from specdepth.decoder.prompts import load_prompt_file
from specdepth.decoder.speculative_decoder import SpeculativeDecoder
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_summary import TraceSummary
from tests.agents import interruptible
from tests.agents.tiny_target import byte_tokenizer, save_tiny_target, write_prompts

NUM_PROMPTS = 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.txt", NUM_PROMPTS)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", 12)


def write_log(path: Path, count: int, **more: Any) -> Path:
    """Token ids, the output a copy of part of the prompt; every fifth has no output."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        prompt = rng.integers(0, 50, 30).tolist()
        output = [] if i % 5 == 4 else [*prompt[5:20], 99]
        rows.append({"prompt": prompt, "output": output} | more)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def decode_flags(target: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    model = ["--target", str(target), "--dtype", "float32", "--device", "cpu"]
    sizes = ["--max-num-seqs", "2", "--max-new-tokens", "8", "--max-num-speculative-tokens", "4"]
    return ["--prompts", str(prompts), *model, *sizes, "--out", str(out), *more]


def record_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["record", *args, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def failure(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["record", *args]) == 1
    err: str = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


def assert_same(a: Trace, b: Trace) -> None:
    assert (a.ids, a.kinds) == (b.ids, b.kinds)
    for field in fields(Trace):
        if isinstance(getattr(a, field.name), np.ndarray):
            left, right = getattr(a, field.name), getattr(b, field.name)
            np.testing.assert_array_equal(left, right, err_msg=field.name)


# ------------------------------------------------------------------ decoding


@pytest.mark.parametrize("temperature", ["0.0", "0.8"])
def test_a_trace_of_prompts_is_of_the_decoders_own_text(
    target, prompts, capsys, tmp_path, temperature
):
    out = tmp_path / "t.npz"
    flags = decode_flags(target, prompts, out, "--temperature", temperature, "--seed", "5")
    found = record_json(capsys, *flags)
    trace = Trace.load(out)
    decoder = SpeculativeDecoder.from_pretrained(
        target, dtype="float32", device="cpu", verification="coupled"
    )
    every = load_prompt_file(prompts)
    results = decoder.generate(
        [prompt.text for prompt in every],
        sampling=[
            SamplingParams(temperature=float(temperature), seed=5 + i, max_new_tokens=8)
            for i in range(NUM_PROMPTS)
        ],
    )
    assert trace.num_tokens.tolist() == [len(one.token_ids) for one in results]
    assert trace.held_out.tolist() == [prompt.split == "held-out" for prompt in every]
    assert trace.info.model_pair == "tiny+prompt-lookup"
    assert trace.info.verification == ("coupled" if float(temperature) else "greedy")
    assert trace.info.source == "decoder"
    assert trace.info.lookup == {"max_ngram": 4, "min_ngram": 1, "max_length": None}
    assert trace.info.max_num_speculative_tokens == 4
    assert not np.isnan(trace.target_top1).any()
    assert found["info"]["model_pair"] == "tiny+prompt-lookup"
    assert found["kinds"][0]["num_requests"] == NUM_PROMPTS
    assert found["kinds"][0]["mean_run"] == pytest.approx(trace.accepted.mean())
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]


def test_a_draft_model_is_recorded_with_its_signals(target, prompts, capsys, tmp_path):
    flags = decode_flags(target, prompts, tmp_path / "t.npz", "--draft", str(target))
    record_json(capsys, *flags)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.info.drafter == "draft-model"
    assert trace.info.lookup == {}
    assert trace.draft_top1 is not None
    # The target drafts for itself, so all is right up to the end of the text.
    left = np.concatenate([np.arange(length, 0, -1) for length in trace.num_tokens])
    assert trace.accepted.tolist() == np.minimum(left, 4).tolist()


def test_an_interrupted_recording_goes_on_and_equals_one_that_was_not(
    target, prompts, capsys, tmp_path, monkeypatch
):
    whole, resumed = tmp_path / "whole.npz", tmp_path / "resumed.npz"
    record_json(capsys, *decode_flags(target, prompts, whole, "--keep-text"))
    add = TraceParts.add

    def stop_after_one(self: TraceParts, *args: Any) -> None:
        if self.num_done:
            raise KeyboardInterrupt
        add(self, *args)

    monkeypatch.setattr(TraceParts, "add", stop_after_one)
    flags = decode_flags(target, prompts, resumed, "--keep-text")
    assert main(["record", *flags]) == 130
    err = capsys.readouterr().err
    assert f"interrupted; 4 of {NUM_PROMPTS} requests are in {resumed}.parts, the same" in err
    assert not resumed.exists()
    monkeypatch.setattr(TraceParts, "add", add)
    assert main(["record", *flags]) == 0
    assert f"Going on after 4 of {NUM_PROMPTS} requests." in capsys.readouterr().err
    assert_same(Trace.load(resumed), Trace.load(whole))
    texts = [path.with_suffix(".texts.jsonl").read_text() for path in (whole, resumed)]
    assert texts[0] == texts[1]
    assert not resumed.with_name("resumed.npz.parts").exists()


def test_kept_texts_give_the_same_trace_when_taken_as_a_log(target, prompts, capsys, tmp_path):
    first, again = tmp_path / "a.npz", tmp_path / "b.npz"
    record_json(capsys, *decode_flags(target, prompts, first, "--keep-text"))
    rows = [json.loads(line) for line in (tmp_path / "a.texts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [one.text for one in load_prompt_file(prompts)]
    log = ["--from-outputs", str(tmp_path / "a.texts.jsonl"), "--target", str(target)]
    record_json(capsys, *log, "--max-new-tokens", "8", "--out", str(again))
    a, b = Trace.load(first), Trace.load(again)
    # Bytes that are no text cannot be kept as text; most answers of a random model are.
    same = [
        row
        for row in range(NUM_PROMPTS)
        if "\ufffd" not in rows[row]["output"] and not a.stopped[row]
    ]
    assert same
    for row in same:
        at = slice(a.starts[row], a.starts[row] + a.num_tokens[row])
        other = slice(b.starts[row], b.starts[row] + b.num_tokens[row])
        depth = np.minimum(b.accepted[other], 4)
        assert a.accepted[at].tolist() == depth.tolist()
    assert a.held_out.tolist() == b.held_out.tolist()


def test_prompts_that_do_not_fit_are_left_out_and_counted(target, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"question": text}) for text in ("abc abc", "x" * 2000)]
    path.write_text("\n".join(lines))
    flags = decode_flags(target, path, tmp_path / "t.npz", "--prompt-column", "question")
    assert main(["record", *flags]) == 0
    assert "1 prompts are too long for the model; left out." in capsys.readouterr().err
    assert Trace.load(tmp_path / "t.npz").ids == ("prompts.jsonl:1",)


# ------------------------------------------------------------------ logs


def test_a_log_of_token_ids_needs_no_model_and_no_tokenizer(log, tmp_path):
    code = (
        "import sys\n"
        "from specdepth.agents import cli\n"
        "code = cli.main(sys.argv[1:])\n"
        "print(*[name for name in ('torch', 'transformers') if name in sys.modules])\n"
        "sys.exit(code)\n"
    )
    out = tmp_path / "t.npz"
    args = ["record", "--from-outputs", str(log), "--out", str(out), "--quiet", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    trace = Trace.load(out)
    assert trace.num_requests == 10
    assert trace.info.source == "outputs"
    assert trace.info.model_pair == "log+prompt-lookup"
    assert trace.stopped.all()
    assert trace.max_new_tokens.tolist() == [4096] * 10
    assert np.isnan(trace.target_top1).all()


def test_a_log_in_parts_is_the_same_trace(log, capsys, tmp_path, monkeypatch):
    record_json(capsys, "--from-outputs", str(log), "--out", str(tmp_path / "one.npz"))
    monkeypatch.setattr(recording.LoggedRequests, "chunk_size", 3)
    record_json(capsys, "--from-outputs", str(log), "--out", str(tmp_path / "many.npz"))
    one, many = Trace.load(tmp_path / "one.npz"), Trace.load(tmp_path / "many.npz")
    assert_same(one, many)
    assert one.ids[:5] == tuple(f"log.jsonl:{i}" for i in (1, 2, 3, 4, 6))


def test_a_log_is_read_with_its_columns_and_the_tokenizer_named(target, capsys, tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"q": "abc abc", "a": "abc", "task": "copy"}, {"q": "x", "a": "yy", "task": "other"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["--prompt-column", "q", "--output-column", "a", "--kind-column", "task"]
    log = ["--from-outputs", str(path), "--tokenizer", str(target), "--target", "org/model"]
    record_json(capsys, *log, *columns, "--temperature", "0.5", "--out", str(tmp_path / "t.npz"))
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.kinds == ("copy", "other")
    assert trace.num_prompt.tolist() == [
        len(byte_tokenizer()(row["q"])["input_ids"]) for row in rows
    ]
    assert trace.num_tokens.tolist() == [4, 3]  # with the end token
    assert trace.info.model_pair == "org/model+prompt-lookup"
    assert (trace.info.temperature, trace.info.verification) == (0.5, "coupled")


def test_a_draft_model_goes_along_a_log(target, log, capsys, tmp_path):
    models = ["--target", str(target), "--draft", str(target), "--dtype", "float32"]
    sizes = ["--max-num-seqs", "4", "--max-num-speculative-tokens", "2", "--device", "cpu"]
    out = ["--out", str(tmp_path / "t.npz")]
    record_json(capsys, "--from-outputs", str(log), *models, *sizes, *out)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.info.model_pair == "tiny+tiny"
    assert trace.draft_entropy is not None
    assert np.isfinite(trace.draft_entropy).all()


def test_no_text_is_kept_unless_asked(capsys, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": [1, 2, 3], "output": [1, 2], "secret": "s"}) + "\n")
    for more, names in (((), {"t.npz"}), (("--keep-text",), {"t.npz", "t.texts.jsonl"})):
        folder = tmp_path / f"out{len(names)}"
        record_json(capsys, "--from-outputs", str(path), "--out", str(folder / "t.npz"), *more)
        assert {file.name for file in folder.iterdir()} == names
    kept = json.loads((tmp_path / "out2" / "t.texts.jsonl").read_text())
    assert kept == {"id": "log.jsonl:1", "prompt": [1, 2, 3], "output": [1, 2]}


def test_the_tables_say_what_was_recorded(log, capsys, tmp_path):
    assert main(["record", "--from-outputs", str(log), "--out", str(tmp_path / "t.npz")]) == 0
    shown = capsys.readouterr()
    assert "2 requests have no output; left out." in shown.err
    for title in ("What was recorded", "By length of the match", "right up to a depth"):
        assert title in " ".join(shown.out.split())
    assert f"Wrote {tmp_path / 't.npz'}" in shown.err


def test_the_table_of_depths_is_short_and_ends_with_the_deepest():
    summary = TraceSummary(
        kinds=(), matches=(), survival=tuple(1 / depth for depth in range(1, 31))
    )
    grid = survival_grid(summary)
    assert [row[0] for row in grid.rows] == ["1", "2", "3", "4", "6", "8", "12", "16", "24", "30"]
    assert grid.rows[5] == ("8", "12.5")


# ------------------------------------------------------------------ interrupts and errors


def test_ctrl_c_keeps_complete_parts(target, prompts, tmp_path):
    out = tmp_path / "t.npz"
    flags = decode_flags(target, prompts, out, "--max-new-tokens", "200")
    process = interruptible.start("record", *flags)
    first = Path(f"{out}.parts") / "00000.npz"
    while not first.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    assert first.exists()
    assert not out.exists()


def test_other_settings_are_refused_beside_parts(log, capsys, tmp_path, monkeypatch):
    def stop(self: TraceParts) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TraceParts, "join", stop)
    flags = ["--from-outputs", str(log), "--out", str(tmp_path / "t.npz")]
    assert main(["record", *flags]) == 130
    line = failure(capsys, *flags, "--max-ngram", "3")
    assert "recorded with other settings (max_ngram 4, now 3)" in line
    write_log(log, 20)
    assert "input_sha256" in failure(capsys, *flags)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "folder"], "--out names the trace's file, which ends with .npz, got folder."),
        (["--draft", "none"], "a trace needs a drafter"),
        (["--max-num-speculative-tokens", "0"], "must be in 1..255, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--min-ngram", "5"], "n-gram lengths"),
        (["--prompts", "absent.txt"], "no prompt file absent.txt"),
        (["--from-outputs", "absent.jsonl"], "no output log absent.jsonl"),
        (["--from-outputs", "a", "--prompts", "b"], "exclude each other"),
        (["--tokenizer", "a"], "--tokenizer is for a log; name it: --from-outputs."),
        (["--kind-column", "a"], "--kind-column is for a log"),
        (["--threads", "0"], "threads must be at least 1"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing_behind(
    args, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", load)
    monkeypatch.setattr("specdepth.decoder.default_model.default_model_path", load)
    if args == ["--threads", "0"]:
        args = [*args, "--target", "local"]
    assert message in failure(capsys, *args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--verification", "--cost"])
def test_options_that_would_do_nothing_are_not_there(flag, capsys):
    with pytest.raises(SystemExit) as end:
        main(["record", flag, "greedy"])
    assert end.value.code == 2


def test_a_trace_that_is_there_is_not_overwritten(log, capsys, tmp_path):
    (tmp_path / "t.npz").write_text("mine")
    line = failure(capsys, "--from-outputs", str(log), "--out", str(tmp_path / "t.npz"))
    assert "is there already" in line
    assert (tmp_path / "t.npz").read_text() == "mine"


def test_bad_logs_are_one_line(capsys, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": [1], "output": []}\n')
    out = ["--from-outputs", str(path), "--out", str(tmp_path / "t.npz")]
    assert "holds no request with output" in failure(capsys, *out)
    path.write_text('{"prompt": [1], "output": [1]}\n{"prompt": 1}\n')
    assert "line 2: there is no 'output'" in failure(capsys, *out)
    path.write_text('{"prompt": "a", "output": "b"}\n')
    line = failure(capsys, *out, "--tokenizer", str(tmp_path / "nowhere"))
    assert "no tokenizer" in line
    assert "--tokenizer" in line
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]
