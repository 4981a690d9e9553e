"""C sources compiled at first use: kept, rebuilt when they change, and refused in one sentence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from specdepth.decoder import native

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native.COMPILERS)), reason="needs a C compiler"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "specdepth" / "native"


def source(folder: Path, answer: int) -> Path:
    path = folder / "one.c"
    path.write_text(f"int answer(void) {{ return {answer}; }}\n")
    return path


@needs_compiler
def test_a_source_is_compiled_once_and_again_when_it_changes(cache: Path, tmp_path: Path) -> None:
    assert native.compiled([source(tmp_path, 41)]).answer() == 41
    (first,) = cache.iterdir()
    made = first.stat().st_mtime_ns
    assert native.compiled([source(tmp_path, 41)]).answer() == 41
    assert first.stat().st_mtime_ns == made
    assert native.compiled([source(tmp_path, 42)]).answer() == 42
    assert native.compiled([source(tmp_path, 42)], ["-O1"]).answer() == 42
    assert len(list(cache.iterdir())) == 3  # and nothing temporary beside them


@needs_compiler
def test_several_sources_make_one_library_and_headers_count(cache: Path, tmp_path: Path) -> None:
    header, other = tmp_path / "other.h", tmp_path / "other.c"
    other.write_text('#include "other.h"\nint other(void) { return OTHER; }\n')
    for value in (7, 8):
        header.write_text(f"#define OTHER {value}\n")
        library = native.compiled([source(tmp_path, 1), other], headers=[header])
        assert (library.answer(), library.other()) == (1, value)
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_source_that_does_not_compile_says_where(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.c"
    path.write_text("int answer(void) { return nothing; }\n")
    with pytest.raises(subprocess.SubprocessError, match=r"could not compile bad\.c .*bad\.c"):
        native.compiled([path])
    assert not list(cache.iterdir())


def test_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no C compiler .* install gcc"):
        native.compiled([source(tmp_path, 1)])


def test_a_cache_that_cannot_be_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        native.compiled([source(tmp_path, 1)])


@needs_compiler
def test_the_compiler_can_be_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    with pytest.raises(OSError, match="absent"):
        native.compiled([source(tmp_path, 1)])


def test_cpu_flags_are_words() -> None:
    flags = native.cpu_flags()
    assert all(flag and " " not in flag for flag in flags)
    if flags:
        assert flags & {"sse2", "asimd"}  # every 64-bit x86 has the one, every 64-bit Arm the other
