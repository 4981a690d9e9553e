"""`specdepth advise --compare`: files in, comparison and settings of the best drafter out."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from specdepth.agents.advise_command import Options, run
from specdepth.agents.advise_inputs import SHIPPED_PAIR, load_drafters
from specdepth.agents.console import Console
from specdepth.decoder.trace_files import shipped_traces
from specdepth.scheduler.cost_files import shipped_costs
from tests.agents.made_drafters import KNEE, KNEE_WITH_DRAFT, draft_trace, lookup_trace

LOOKUP, DRAFT = "prompt lookup", "draft model tiny"
SHIPPED = SHIPPED_PAIR[0] in shipped_traces() and SHIPPED_PAIR[1] in shipped_costs()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Traces and pass times on disk; the draft model is an EAGLE-3 one."""
    folder = tmp_path_factory.mktemp("files")
    paths = {
        name: str(folder / name)
        for name in ("lookup.npz", "draft.npz", "lookup.json", "draft.json")
    }
    lookup_trace(0).save(paths["lookup.npz"])
    draft_trace(3, reads_target=True).save(paths["draft.npz"])
    KNEE.save(paths["lookup.json"])
    KNEE_WITH_DRAFT.save(paths["draft.json"])
    return paths


def options_of(files: dict[str, str], **changes: Any) -> Options:
    fields: dict[str, Any] = {
        "trace": files["lookup.npz"],
        "cost": files["lookup.json"],
        "compare": (f"{files['draft.npz']}={files['draft.json']}",),
        "loads": (1,),
        "depths": (3,),
    }
    return Options(**(fields | changes))


def printed(options: Options) -> str:
    out = io.StringIO()
    run(options, Console(as_json=options.json, quiet=True, stdout=out, stderr=io.StringIO()))
    return out.getvalue()


@pytest.fixture(scope="module")
def answer(
    files: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("advice") / "out"
    options = options_of(files, out=folder, json=True, survival="match")
    return json.loads(printed(options)), folder


def test_json_has_the_drafters_and_the_best_ones_advice(
    answer: tuple[dict[str, Any], Path], files: dict[str, str]
) -> None:
    found, folder = answer
    drafters = found["drafters"]
    assert drafters["best"] == DRAFT
    assert [(one["name"], one["trace"]) for one in drafters["compared"]] == [
        (LOOKUP, files["lookup.npz"]),
        (DRAFT, files["draft.npz"]),
    ]
    (verdict,) = drafters["by"]["table"]
    assert (verdict["load"], verdict["best"], verdict["pays"]) == (1, DRAFT, "yes")
    assert verdict["best_over"][LOOKUP]["value"] > 1.5
    best = drafters["compared"][1]
    assert {name: found[name] for name in best if name in found} == {
        name: value for name, value in best.items() if name not in ("name", "trace")
    }
    assert found["drafter"] == "draft-model"
    assert json.loads((folder / "advice.json").read_text()) == found


def test_settings_are_those_of_the_best_drafter(answer: tuple[dict[str, Any], Path]) -> None:
    found, folder = answer
    vllm = json.loads((folder / "vllm.json").read_text())
    assert (vllm["method"], vllm["model"], vllm["num_speculative_tokens"]) == ("eagle3", "tiny", 3)
    assert found["settings"]["sglang"]["flags"][:2] == ["--speculative-algorithm", "EAGLE3"]
    # Its estimator has no name, and the other drafter's rule is not written in its place.
    assert not (folder / "rule.json").exists()


def test_a_person_reads_the_comparison_first(files: dict[str, str], tmp_path: Path) -> None:
    text = printed(options_of(files, out=tmp_path / "out"))
    lines = text.splitlines()
    assert lines[0].startswith("Drafters, throughput over off")
    assert "By their tables: at load 1 the draft model tiny is faster" in text
    assert "What follows, settings included, is for the draft model tiny" in text
    assert text.index("By their tables") < text.index("Fixed depths,")
    assert '"method": "eagle3"' in text
    assert "at its own pass times" in text


def test_the_rule_of_the_best_drafter_names_its_trace(
    files: dict[str, str], tmp_path: Path
) -> None:
    options = options_of(
        files,
        trace=files["draft.npz"],
        cost=files["draft.json"],
        compare=(f"{files['lookup.npz']}={files['lookup.json']}",),
        survival="confidence",
        out=tmp_path,
        json=True,
    )
    found = json.loads(printed(options))
    assert found["drafters"]["best"] == DRAFT
    rule = json.loads((tmp_path / "rule.json").read_text())
    assert rule["survival"] == "confidence"
    assert rule["notes"]["trace"] == files["draft.npz"]


def test_without_drafters_to_compare_there_is_no_comparison(
    files: dict[str, str], tmp_path: Path
) -> None:
    alone = options_of(files, compare=(), out=tmp_path / "json", json=True)
    assert json.loads(printed(alone))["drafters"] is None
    assert "Drafters" not in printed(options_of(files, compare=("none",), out=tmp_path / "text"))


def test_the_option_comes_again_or_with_commas() -> None:
    again = tyro.cli(Options, args=["--compare", "a=b", "--compare", "c=d,e=f"])
    assert again.compare == ("a=b", "c=d,e=f")
    assert tyro.cli(Options, args=[]).compare == ()


def loaded(options: Options) -> list[str]:
    quiet = Console(quiet=True, stdout=io.StringIO(), stderr=io.StringIO())
    return list(load_drafters(options, Path("unused"), quiet))


def test_drafters_of_the_same_name_are_told_apart_by_their_traces(
    files: dict[str, str], tmp_path: Path
) -> None:
    other = str(tmp_path / "other.npz")
    draft_trace(1).save(other)
    price = files["draft.json"]
    options = options_of(files, compare=(f"{files['draft.npz']}={price},{other}={price}",))
    assert loaded(options) == [LOOKUP, f"{DRAFT} ({files['draft.npz']})", f"{DRAFT} ({other})"]


def refusal(options: Options) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the caller looks at the sentence
        printed(options)
    return str(error.value)


def test_bad_comparisons_are_refused_in_a_sentence(files: dict[str, str], tmp_path: Path) -> None:
    draft, price = files["draft.npz"], files["draft.json"]
    for word in (draft, f"{draft}=", f"={price}"):
        assert "--compare takes TRACE=COST" in refusal(options_of(files, compare=(word,)))
    twice = options_of(files, compare=(f"{draft}={price}", f"{draft}={price}"))
    assert "is there twice" in refusal(twice)
    assert "absent" in refusal(options_of(files, compare=(f"absent={price}",)))
    assert "unknown cost model" in refusal(options_of(files, compare=(f"{draft}=absent",)))
    free = options_of(files, compare=(f"{draft}={files['lookup.json']}",))
    assert "knee at 12 has no draft passes, so it cannot price draft model tiny" in refusal(free)
    strange = tmp_path / "strange.npz"
    trace = draft_trace(3)
    replace(trace, ids=tuple(f"x{i}" for i in range(24))).save(strange)
    assert "only 0 are the same" in refusal(options_of(files, compare=(f"{strange}={price}",)))


@pytest.mark.skipif(not SHIPPED, reason="the draft model's trace and pass times are not shipped")
def test_by_default_the_shipped_drafters_are_compared() -> None:
    names = loaded(Options())
    assert names == [LOOKUP, "draft model smollm2-eagle3"]
    assert loaded(Options(compare=("none",))) == [LOOKUP]
    assert loaded(Options(cost="cpu-smollm2-bf16")) == [LOOKUP]


@pytest.mark.skipif(not SHIPPED, reason="the draft model's trace and pass times are not shipped")
def test_the_shipped_traces_are_of_the_same_requests() -> None:
    from specdepth.agents.advice_drafters import same_requests
    from specdepth.decoder.trace_files import load_trace

    traces = same_requests({LOOKUP: load_trace("default"), DRAFT: load_trace(SHIPPED_PAIR[0])})
    assert traces[DRAFT].num_requests == traces[LOOKUP].num_requests
