"""`make_scheduler`: from a name on a command line to a scheduler."""

from __future__ import annotations

from pathlib import Path

from specdepth.scheduler.depth import DepthScheduler

from .fixed import FixedDepth
from .heuristic import HeuristicDepth
from .off import Off
from .random_depth import RandomDepth
from .table import TableDepth

KNOWN = (
    '"off"',
    '"fixed:4"',
    '"table:1-4=4,5-16=2,17-=0"',
    '"table:FILE.json"',
    '"heuristic"',
    '"heuristic:START"',
    '"random:SEED"',
    '"policy:FOLDER"',
    "the folder of an exported policy",
)
"""What `make_scheduler` understands."""


def make_scheduler(
    name: str,
    *,
    model_pair: str | None = None,
    drafter: str | None = None,
    max_num_speculative_tokens: int | None = None,
) -> DepthScheduler:
    """Return the scheduler that `name` means; see `KNOWN` for the forms.

    Args:
        name: kind, and after a colon its setting.
        model_pair: refuse a policy that was trained for another pair.
        drafter: refuse a policy that was trained for another drafter.
        max_num_speculative_tokens: K; refuse a policy for another K, or a deeper fixed depth.

    Raises:
        ValueError: an unknown name, a wrong setting, or a policy that does not fit.
    """
    kind, _, setting = name.partition(":")
    if kind == "off" and not setting:
        return Off()
    if kind == "fixed":
        return _fixed(_whole(name, setting, None), max_num_speculative_tokens)
    if kind == "table" and setting:
        if setting.endswith(".json"):
            return TableDepth.from_json(setting)
        return TableDepth.parse(setting)
    if kind == "heuristic":
        return HeuristicDepth(_whole(name, setting, 20))
    if kind == "random":
        return RandomDepth(_whole(name, setting, 0))
    folder = setting if kind == "policy" else name
    if folder and (kind == "policy" or Path(folder).is_dir()):
        from specdepth.scheduler.learned import (
            LearnedScheduler,  # the baselines do without safetensors
        )

        return LearnedScheduler.load(
            folder,
            model_pair=model_pair,
            drafter=drafter,
            max_num_speculative_tokens=max_num_speculative_tokens,
        )
    raise ValueError(f'unknown scheduler "{name}"; there are {", ".join(KNOWN)}.')


def _fixed(depth: int, top: int | None) -> FixedDepth:
    if top is not None and depth > top:
        raise ValueError(
            f"fixed:{depth} is deeper than max_num_speculative_tokens, which is {top}; "
            "raise that or lower the depth."
        )
    return FixedDepth(depth)


def _whole(name: str, setting: str, default: int | None) -> int:
    if not setting and default is not None:
        return default
    try:
        number = int(setting)
    except ValueError:
        number = -1
    if number < 0:
        kind = name.partition(":")[0]
        raise ValueError(f'"{name}": expected a whole number after the colon, as in "{kind}:4".')
    return number
