"""The `specdepth` command: finds the subcommand, reads its options, and turns errors into a line.

Each command is a module with a frozen dataclass `Options`, whose docstrings are its help, and
`run(options, console)`. Modules are imported when they are asked for, and import torch only in
`run`, so that help comes at once.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from .console import Console

USAGE_ERROR = 2
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("demo", "Profile, train, export and compare on a real model, in 10 minutes."),
    "profile": Command("profile_command", "Measure what passes cost on this machine."),
    "record": Command("record_command", "Record what a drafter gets accepted, for exact replay."),
    "fit-survival": Command("survival_command", "Fit what estimates acceptance, from traces."),
    "train": Command("train_command", "Train a policy with PPO, live or on replay."),
    "train-universal": Command(
        "universal_command", "Train one policy for many machines, on several traces."
    ),
    "evaluate": Command("evaluate_command", "Compare policies on the same requests and loads."),
    "ablate": Command("ablate_command", "Train a grid of variants and say what made a difference."),
    "advise": Command(
        "advise_command", "Say whether speculation pays, how deep, up to which load."
    ),
    "export": Command("export_command", "Write a trained policy for use in the decoder."),
    "generate": Command("generate_command", "Decode a prompt and stream its text."),
}


class _Options(Protocol):
    json: bool
    quiet: bool
    debug: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        Exit status: 0; 1 after an error, which stderr explains in a line; 2 for a command line that
        is wrong; 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if args else sys.stderr)
        return 0 if args else USAGE_ERROR
    if args[0] == "--version":
        from specdepth._version import __version__

        print(f"specdepth {__version__}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        known = ", ".join(COMMANDS)
        print(f'specdepth: no command "{name}"; there are {known}.{hint}', file=sys.stderr)
        return USAGE_ERROR
    module = importlib.import_module(f".{COMMANDS[name].module}", __package__)
    return _run(name, module, args[1:])


def overview() -> str:
    """What `specdepth --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: specdepth COMMAND [OPTIONS]",
            "",
            "Learned depth of speculative decoding, per sequence and per round.",
            "",
            *lines,
            "",
            "specdepth COMMAND --help explains a command; specdepth --version names the version.",
            'Start with: specdepth generate "Why is the sky blue?" --verbose',
        ]
    )


def _run(name: str, module: Any, args: list[str]) -> int:
    import tyro

    options = cast(
        _Options,
        tyro.cli(
            module.Options,
            args=args,
            prog=f"specdepth {name}",
            config=(tyro.conf.FlagCreatePairsOff,),
        ),
    )
    # Warnings of the library; its errors come as exceptions.
    level = logging.ERROR if options.quiet else logging.WARNING
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level)
    console = Console(as_json=options.json, quiet=options.quiet)
    try:
        module.run(options, console)
    except KeyboardInterrupt as interrupt:
        print(f"specdepth {name}: {interrupt or 'interrupted.'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away, as in `specdepth generate ... | head`; nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.debug:
            traceback.print_exc()
            return 1
        print(f"specdepth {name}: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) and not text:
        return "out of memory; lower --max-num-seqs or use a smaller model."
    if isinstance(error, ValueError | OSError | MemoryError) or _is_fetch_error(error):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (not expected; --debug shows where it came from)"


def _is_fetch_error(error: Exception) -> bool:
    from specdepth.decoder.default_model import ModelFetchError

    return isinstance(error, ModelFetchError)
