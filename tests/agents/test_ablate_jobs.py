"""Runs that need no training, so that the processes themselves are what is tested."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specdepth.agents.ablate_jobs import execute_all
from specdepth.agents.ablate_run import DONE_FILE, ERROR_FILE, Run, read_done
from specdepth.agents.results import ResultRow


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    folder: Path
    title: str
    what: str = "number"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def measure(self) -> tuple[tuple[ResultRow, ...], dict[str, float]]:
        if self.what == "fail":
            raise ValueError("one line.\nthe last line.")
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            (self.folder.parent / "hanging").touch()
            time.sleep(60)
        row = ResultRow(policy="p", load=1, metric="pid", value=os.getpid(), unit="")
        return (row,), {"elapsed_s": 0.0}


def runs(folder: Path, *what: str) -> list[Run]:
    made: list[Run] = []
    for index, one in enumerate(what):
        place = folder / f"run-{index}"
        place.mkdir(parents=True)
        made.append(FakeRun(folder=place, title=f"run {index}", what=one))
    return made


def pid(run: Run) -> float:
    done = read_done(run)
    assert done is not None
    return done.rows[0].value


def test_one_job_works_in_this_process(tmp_path: Path) -> None:
    told: list[tuple[str, str | None]] = []
    both = runs(tmp_path, "number", "number")
    execute_all(both, 1, lambda run, error: told.append((run.title, error)))
    assert told == [("run 0", None), ("run 1", None)]
    assert {pid(run) for run in both} == {os.getpid()}


def test_more_jobs_have_a_process_for_each_run_and_outlive_what_goes_wrong(tmp_path: Path) -> None:
    told: dict[str, str | None] = {}
    some = runs(tmp_path, "number", "fail", "die", "number")
    execute_all(some, 2, lambda run, error: told.update({run.title: error}))
    assert told == {
        "run 0": None,
        "run 1": "the last line.",
        "run 2": "its process ended with code -9.",
        "run 3": None,
    }
    assert len({pid(some[0]), pid(some[3]), os.getpid()}) == 3
    assert "Traceback" in (some[1].folder / ERROR_FILE).read_text()
    assert not (some[1].folder / DONE_FILE).exists()


def test_a_failure_is_the_same_in_this_process_and_is_forgotten_when_it_is_mended(
    tmp_path: Path,
) -> None:
    (run,) = runs(tmp_path, "fail")
    told: list[str | None] = []
    execute_all([run], 1, lambda run, error: told.append(error))
    assert told == ["the last line."]
    mended = FakeRun(folder=run.folder, title=run.title)
    execute_all([mended], 1, lambda run, error: told.append(error))
    assert told[1] is None
    assert not (run.folder / ERROR_FILE).exists()


def test_ctrl_c_ends_the_processes_and_keeps_what_was_done(tmp_path: Path) -> None:
    first, hanging = runs(tmp_path, "number", "hang")

    def interrupt(run: Run, error: str | None) -> None:
        deadline_s = time.monotonic() + 30
        while not (tmp_path / "hanging").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_all([first, hanging], 2, interrupt)
    assert multiprocessing.active_children() == []
    assert read_done(first) is not None
    assert read_done(hanging) is None


def test_processes_do_not_hear_ctrl_c_themselves(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, "hang")

    def press(*_: object) -> None:
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, stop)

    def stop(*_: object) -> None:
        (child,) = multiprocessing.active_children()
        assert child.is_alive()
        child.kill()

    old = signal.signal(signal.SIGALRM, press)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        told: list[str | None] = []
        execute_all([run], 2, lambda run, error: told.append(error))
    finally:
        signal.signal(signal.SIGALRM, old)
    assert told == ["its process ended with code -9."]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_no_jobs_do_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        execute_all(runs(tmp_path, "number"), 0, lambda run, error: None)


def test_a_done_run_with_other_settings_is_not_taken(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, "number")
    execute_all([run], 1, lambda run, error: None)
    other = FakeRun(folder=run.folder, title="t", settings={"config": {"ppo": {"discount": 0.5}}})
    with pytest.raises(ValueError, match=r"run-0 holds a run with another config; delete it"):
        read_done(other)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "x", "format_version": 1}'])
def test_a_damaged_done_file_is_named(tmp_path: Path, text: str) -> None:
    (run,) = runs(tmp_path, "number")
    (run.folder / DONE_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"cannot use .*done\.json: .*; delete it to do the run"):
        read_done(run)
