from __future__ import annotations

import io
import json

import pytest

from specdepth.agents.console import Console
from specdepth.agents.tables import Grid

GRID = Grid(title="A table", header=("policy", "x (ms)"), rows=(("off", "1.0"),))


def streams(**options: bool) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(stdout=out, stderr=err, **options), out, err


def speak(console: Console) -> None:
    console.say("going on")
    console.show("a result")
    console.write("piece")
    console.table(GRID)
    with console.progress("Working") as update:
        update(0.5, "half")
    console.finish({"value": 1.5})


def test_results_go_to_stdout_and_progress_to_stderr():
    console, out, err = streams()
    speak(console)
    assert "a result" in out.getvalue()
    assert "A table" in out.getvalue()
    assert "going on" not in out.getvalue()
    assert "going on" in err.getvalue()
    assert "Working: 50% after 0 s, half" in err.getvalue()


def test_with_json_stdout_is_one_document():
    console, out, err = streams(as_json=True)
    speak(console)
    assert json.loads(out.getvalue()) == {"value": 1.5}
    assert "a result" in err.getvalue()
    assert "A table" in err.getvalue()


def test_quiet_leaves_results_only():
    console, out, err = streams(quiet=True)
    speak(console)
    assert "a result" in out.getvalue()
    assert err.getvalue() == ""


def test_quiet_json_leaves_the_document_only():
    console, out, err = streams(quiet=True, as_json=True)
    speak(console)
    assert json.loads(out.getvalue()) == {"value": 1.5}
    assert err.getvalue() == ""


def test_plain_progress_is_a_line_at_every_tenth():
    console, _, err = streams()
    with console.progress("Working") as update:
        for i in range(101):
            update(i / 100, "")
    assert len(err.getvalue().splitlines()) == 1 + 10


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("ci", "bar"), [("", True), ("true", False)])
def test_a_terminal_gets_a_bar_unless_it_is_ci(monkeypatch, ci, bar):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("TERM", "xterm")
    err = Terminal()
    console = Console(stdout=io.StringIO(), stderr=err)
    with console.progress("Working [bold]") as update:
        update(0.5, "[half]")
    assert ("\x1b[" in err.getvalue()) is bar
    assert "Working [bold]" in err.getvalue()
    assert "[half]" in err.getvalue()


def test_json_refuses_what_json_cannot_hold():
    console, _, _ = streams(as_json=True)
    with pytest.raises(ValueError, match="JSON"):
        console.finish({"value": float("nan")})
