"""`specdepth` in a process of its own that Ctrl-C reaches, however the tests were started."""

from __future__ import annotations

import signal
import subprocess
import sys


def start(*args: str) -> subprocess.Popen[str]:
    """Start the command with its output in pipes.

    A shell starts what it puts into the background with SIGINT ignored, and children inherit that: without
    a reset these tests would fail under `nohup make test &`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "specdepth", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
