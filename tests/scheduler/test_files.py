from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdepth.scheduler.files import read_bounded, write_atomic


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"\x00\xff")
    write_atomic(tmp_path / "b", "größer")
    assert read_bounded(tmp_path / "a", 10) == b"\x00\xff"
    assert read_bounded(tmp_path / "b", 10).decode() == "größer"


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="a is larger than 4 bytes"):
        read_bounded(tmp_path / "a", 4)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ValueError, match="zero is larger than 100 bytes"):
        read_bounded(Path("/dev/zero"), 100)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    write_atomic(tmp_path / "a", b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
