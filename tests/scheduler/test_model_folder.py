"""What policies and survival models on disk share, with a format of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdepth.scheduler.model_folder import (
    CONFIG_FILE,
    UNREADABLE,
    FolderFormat,
    some_names,
)

TOY = FolderFormat(
    noun="toy",
    remedy="build it again",
    make="build",
    made="built",
    name="specdepth-toy",
    version=3,
    weights_file="toy.safetensors",
    fields={"size": int, "weights_sha256": str},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TOY.write(tmp_path / "toy", {"a": np.arange(6.0).reshape(2, 3).T}, {"size": 2})
    return tmp_path / "toy"


def change(folder: Path, **values: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_was_written_is_read(folder: Path) -> None:
    config = TOY.read_config(folder)
    assert (config["format"], config["format_version"], config["size"]) == ("specdepth-toy", 3, 2)
    tensors = TOY.read_tensors(folder, config["weights_sha256"])
    np.testing.assert_array_equal(tensors["a"], np.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"format": "other"}, 'config.json is of no toy: "format" must be "specdepth-toy"'),
        ({"format_version": 4}, "format version 4, this specdepth reads 3; build it again"),
        ({"format_version": True}, "format version True"),
        ({"size": "2"}, '"size" is missing or of the wrong type'),
        ({"size": True}, '"size" is missing or of the wrong type'),
    ],
)
def test_a_foreign_configuration_is_refused(
    folder: Path, values: dict[str, Any], sentence: str
) -> None:
    change(folder, **values)
    with pytest.raises(ValueError, match=sentence):
        TOY.read_config(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_damaged_json_is_refused(folder: Path, data: bytes) -> None:
    (folder / CONFIG_FILE).write_bytes(data)
    with pytest.raises(ValueError, match=r"config\.json is"):
        TOY.read_config(folder)


def test_weights_of_another_save_are_refused(folder: Path, tmp_path: Path) -> None:
    TOY.write(tmp_path / "other", {"a": np.zeros(3)}, {"size": 2})
    (folder / TOY.weights_file).write_bytes((tmp_path / "other" / TOY.weights_file).read_bytes())
    with pytest.raises(ValueError, match="checksum differs; build it again"):
        TOY.read_tensors(folder, TOY.read_config(folder)["weights_sha256"])


def test_a_missing_file_becomes_a_sentence_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as error:
        TOY.read_config(tmp_path)
    assert isinstance(error.value, UNREADABLE)
    sentence = str(TOY.refusal(tmp_path, error.value))
    assert sentence == f"no toy in {tmp_path}: config.json: No such file or directory."


def test_values_that_json_cannot_hold_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="toy card"):
        TOY.write(tmp_path / "new", {"a": np.zeros(1)}, {"size": {1, 2}})
    assert not (tmp_path / "new").exists()


def test_what_was_made_for_something_else_is_refused(tmp_path: Path) -> None:
    TOY.check_fits(tmp_path, {"drafter": None, "size": 2}, {"drafter": "x", "size": 2})
    with pytest.raises(ValueError, match="was built for drafter x, not y; build one for it"):
        TOY.check_fits(tmp_path, {"drafter": "y"}, {"drafter": "x"})


def test_long_lists_of_names_are_cut() -> None:
    assert some_names([]) == "none"
    assert some_names(["a", "b"]) == "a, b"
    assert some_names([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
