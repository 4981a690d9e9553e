"""Recordings in parts: kept, compared, joined."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from specdepth.agents.trace_parts import TraceParts
from specdepth.decoder.trace import Trace
from tests.decoder.traces import toy_trace

SETTINGS = {"seed": 0, "temperature": 0.7, "columns": ("a", "b")}


def test_parts_are_joined_in_order_and_removed(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "t.npz"
    parts = TraceParts(out, SETTINGS)
    for seed in range(3):
        parts.add(toy_trace(seed=seed))
    trace = parts.join()
    assert trace.num_requests == 12
    np.testing.assert_array_equal(Trace.load(out).accepted, trace.accepted)
    np.testing.assert_array_equal(trace.accepted[18:36], toy_trace(seed=1).accepted)
    assert [file.name for file in out.parent.iterdir()] == ["t.npz"]


def test_nothing_is_written_before_the_first_part(tmp_path: Path) -> None:
    TraceParts(tmp_path / "new" / "t.npz", SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_the_same_settings_go_on_after_the_last_part(tmp_path: Path) -> None:
    TraceParts(tmp_path / "t.npz", SETTINGS).add(toy_trace(seed=0))
    again = TraceParts(tmp_path / "t.npz", SETTINGS)
    assert again.num_done == 1
    again.add(toy_trace(seed=1))
    assert again.join().num_requests == 8


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    TraceParts(tmp_path / "t.npz", SETTINGS).add(toy_trace())
    with pytest.raises(ValueError, match=r"\(temperature 0\.7, now 0\.0\); use those, name"):
        TraceParts(tmp_path / "t.npz", SETTINGS | {"temperature": 0.0})
    with pytest.raises(ValueError, match=r"\(more None, now 1; seed 0, now None\)"):
        TraceParts(
            tmp_path / "t.npz", {k: SETTINGS[k] for k in ("temperature", "columns")} | {"more": 1}
        )


def test_a_trace_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    for name in ("t.npz", "t.texts.jsonl"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{name} is there already; name another --out"):
            TraceParts(tmp_path / "t.npz", SETTINGS)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_folder_that_is_no_recording_is_left_alone(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "t.npz.parts"
    folder.mkdir()
    if content is not None:
        (folder / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=r"t\.npz\.parts holds no recording"):
        TraceParts(tmp_path / "t.npz", SETTINGS)
    assert folder.exists()


def test_a_part_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    parts = TraceParts(tmp_path / "t.npz", SETTINGS)
    parts.add(toy_trace(), [{"prompt": "a"}])
    (parts.folder / "00001.jsonl").write_text('{"prompt": "never recorded"}\n')
    (parts.folder / ".00001.npz.77.tmp").write_bytes(b"half")
    again = TraceParts(tmp_path / "t.npz", SETTINGS)
    assert again.num_done == 1
    again.add(toy_trace(seed=1), [{"prompt": "ü"}])
    again.join()
    lines = again.texts_file.read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": "a"}, {"prompt": "ü"}]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = TraceParts(tmp_path / "t.npz", SETTINGS)
    parts.add(toy_trace())
    (parts.folder / "00000.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"00000\.npz"):
        parts.join()
    assert parts.folder.exists()
    assert not parts.out.exists()


def test_a_place_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        TraceParts(tmp_path / "file" / "t.npz", SETTINGS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_became_read_only_is_named(tmp_path: Path) -> None:
    parts = TraceParts(tmp_path / "t.npz", SETTINGS)
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot write to"):
        parts.add(toy_trace())
