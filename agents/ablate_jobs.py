"""Runs of a grid one after the other, or in several processes at once."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from .ablate_run import ERROR_FILE, Run, execute

Finished = Callable[[Run, str | None], None]
"""Called after each run, with what went wrong or None."""


def execute_all(runs: Sequence[Run], jobs: int, finished: Finished) -> None:
    """Do all `runs`; one that fails does not stop the others.

    With one job they are done in this process. With more, each gets a process of its own, which is
    spawned, since torch cannot be forked; Ctrl-C ends them, and what they were at is done again
    another time.

    Args:
        runs: to do, in this order.
        jobs: how many at once.
        finished: told after each.

    Raises:
        ValueError: fewer than one job.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    if jobs == 1:
        for run in runs:
            done = execute(run)
            finished(run, None if done else _error(run, None))
        return
    context = multiprocessing.get_context("spawn")
    waiting = list(runs)
    at_work: dict[int, tuple[BaseProcess, Run]] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs:
                run = waiting.pop(0)
                process: BaseProcess = context.Process(target=_work, args=(run,), daemon=True)
                _start(process)
                at_work[process.sentinel] = (process, run)
            for sentinel in wait(list(at_work)):
                assert isinstance(sentinel, int)
                process, run = at_work.pop(sentinel)
                process.join()
                code = process.exitcode
                finished(run, None if code == 0 else _error(run, code))
    finally:
        for process, _ in at_work.values():
            process.terminate()
        for process, _ in at_work.values():
            process.join()


def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach: it goes to all of a terminal, but ending is ours."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _work(run: Run) -> None:
    sys.exit(0 if execute(run) else 1)


def _error(run: Run, code: int | None) -> str:
    path = run.folder / ERROR_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8").strip().splitlines()[-1]
    return f"its process ended with code {code}."
