from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from specdepth.agents.progress_csv import ProgressCsv


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_lines_are_added_and_new_columns_left_blank_before(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    writer = ProgressCsv(path)
    writer.write({"a": 1, "b": np.float32(0.5)}, {})
    writer.write({"a": 2, "c": 3.5}, {})
    assert read(path) == [{"a": "1", "b": "0.5", "c": ""}, {"a": "2", "b": "", "c": "3.5"}]


def test_a_new_writer_goes_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    ProgressCsv(path).write({"a": 1}, {})
    ProgressCsv(path).write({"a": 2}, {})
    assert [row["a"] for row in read(path)] == ["1", "2"]
    assert [file.name for file in tmp_path.iterdir()] == ["progress.csv"]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    ProgressCsv(path).write({"a": 1, "text": "x", "figure": object()}, {})
    assert read(path) == [{"a": "1"}]
