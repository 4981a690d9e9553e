"""Traces by name, and traces that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.decoder import trace_files
from specdepth.decoder.prompts import KINDS, load_prompts
from specdepth.decoder.trace import Trace
from specdepth.decoder.trace_files import check_trace, load_trace, shipped_traces
from specdepth.decoder.trace_summary import summarize
from tests.decoder.traces import toy_trace

DEFAULT = "smollm2-prompt-lookup-greedy"
NAMES = (
    "smollm2-eagle3-greedy",
    "smollm2-eagle3-t0.7",
    DEFAULT,
    "smollm2-prompt-lookup-t0.7",
)


def test_the_shipped_traces_are_of_the_shipped_prompts() -> None:
    assert shipped_traces() == NAMES
    prompts = load_prompts()
    for name in NAMES:
        trace = load_trace(name)
        drafter = "smollm2-eagle3" if "eagle3" in name else "prompt-lookup"
        assert trace.info.model_pair == f"SmolLM2-135M-Instruct+{drafter}"
        assert trace.info.reads_target == (drafter == "smollm2-eagle3")
        assert trace.info.temperature == (0.7 if name.endswith("t0.7") else 0.0)
        top = 8 if drafter == "smollm2-eagle3" else 32
        assert trace.info.max_num_speculative_tokens == top
        assert trace.ids == tuple(prompt.id for prompt in prompts)
        assert trace.kinds == tuple(prompt.kind for prompt in prompts)
        held_out = [prompt.split == "held-out" for prompt in prompts]
        assert trace.held_out.tolist() == held_out
        assert set(trace.kinds) == set(KINDS)
        assert (trace.max_new_tokens == 128).all()
        assert not (trace.num_tokens[~trace.stopped] != 128).any()


def test_the_default_is_the_greedy_one() -> None:
    assert load_trace("default").info == load_trace(DEFAULT).info


def test_the_shipped_traces_are_small() -> None:
    folder = Path(trace_files.__file__).parents[1] / "checkpoints" / "traces"
    assert sum(file.stat().st_size for file in folder.glob("*.npz")) < 5_500_000


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    toy_trace(seed=3).save(tmp_path / "mine.npz")
    for path in (tmp_path / "mine.npz", str(tmp_path / "mine.npz")):
        assert load_trace(path).ids == toy_trace(seed=3).ids


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = ", ".join(("default", *NAMES))
    with pytest.raises(ValueError, match=f"no trace 'missing': .* these names: {known}"):
        load_trace("missing")


def test_names_do_not_leave_the_folder_of_traces() -> None:
    with pytest.raises(ValueError, match="no trace"):
        load_trace("../traces/smollm2-prompt-lookup-greedy")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"cannot use trace .*bad\.npz"):
        load_trace(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (
            {"drafter": "draft-model"},
            "recorded with the drafter prompt-lookup, draft-model is asked",
        ),
        ({"model_pair": "x+y"}, r"the trace is of a\+b, x\+y is asked for; record one"),
        ({"max_num_speculative_tokens": 9}, "=9, but the trace was recorded up to 8"),
        ({"num_requests": 5}, "5 requests are asked for, the trace has 4"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(needs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trace(toy_trace(), **needs)


def test_a_trace_that_fits_passes() -> None:
    trace: Trace = toy_trace()
    check_trace(trace)
    check_trace(
        trace,
        model_pair="a+b",
        drafter="prompt-lookup",
        max_num_speculative_tokens=8,
        num_requests=4,
    )


def test_the_card_says_what_is_in_the_traces() -> None:
    card = (Path(trace_files.__file__).parents[1] / "checkpoints/traces/README.md").read_text(
        "utf-8"
    )
    for name in NAMES:
        part = card.partition(f"## {name}\n")[2]
        found = summarize(load_trace(name))
        for kind in found.kinds:
            counts = (
                f"| {kind.kind} | {kind.num_requests} | {kind.num_held_out} | {kind.num_tokens} |"
            )
            assert counts in part
        for match in found.matches:
            shares = (
                f"{100 * match.share:.1f} | {100 * match.acceptance:.1f} | {match.mean_run:.2f}"
            )
            assert f"| {match.match_length} | {shares} |" in part


def test_a_file_from_before_draft_models_that_read_the_target_still_loads(tmp_path: Path) -> None:
    trace = load_trace("default")
    trace.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as arrays:
        contents = dict(arrays)
    header = json.loads(bytes(contents["header"]))
    assert header["info"].pop("reads_target") is False
    contents["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(tmp_path / "old.npz", **contents)
    assert load_trace(tmp_path / "old.npz").info == trace.info
