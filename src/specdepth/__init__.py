"""Learned depth of speculation, per sequence and per round.

Names are loaded when they are first used: `import specdepth` loads the standard library alone,
and schedulers and policies do without PyTorch.

    from specdepth import SpeculativeDecoder, load_policy

    decoder = SpeculativeDecoder.from_pretrained("default")
    results = decoder.generate(["def fib(n):"], depth_scheduler=load_policy("runs/policy"))
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from specdepth.decoder.config import EngineConfig, SamplingParams
    from specdepth.decoder.request import GenerationResult
    from specdepth.decoder.speculative_decoder import SpeculativeDecoder
    from specdepth.scheduler.baselines import (
        FixedDepth,
        HeuristicDepth,
        Off,
        RandomDepth,
        TableDepth,
        make_scheduler,
    )
    from specdepth.scheduler.cost import CostModel
    from specdepth.scheduler.depth import DepthScheduler
    from specdepth.scheduler.learned import LearnedScheduler
    from specdepth.scheduler.state import RoundOutcome, RoundState

__all__ = [
    "CostModel",
    "DepthScheduler",
    "EngineConfig",
    "FixedDepth",
    "GenerationResult",
    "HeuristicDepth",
    "LearnedScheduler",
    "Off",
    "RandomDepth",
    "RoundOutcome",
    "RoundState",
    "SamplingParams",
    "SpeculativeDecoder",
    "TableDepth",
    "__version__",
    "load_policy",
    "make_scheduler",
]

_HOMES = {
    "CostModel": "specdepth.scheduler.cost",
    "DepthScheduler": "specdepth.scheduler.depth",
    "EngineConfig": "specdepth.decoder.config",
    "FixedDepth": "specdepth.scheduler.baselines",
    "GenerationResult": "specdepth.decoder.request",
    "HeuristicDepth": "specdepth.scheduler.baselines",
    "LearnedScheduler": "specdepth.scheduler.learned",
    "Off": "specdepth.scheduler.baselines",
    "RandomDepth": "specdepth.scheduler.baselines",
    "RoundOutcome": "specdepth.scheduler.state",
    "RoundState": "specdepth.scheduler.state",
    "SamplingParams": "specdepth.decoder.config",
    "SpeculativeDecoder": "specdepth.decoder.speculative_decoder",
    "TableDepth": "specdepth.scheduler.baselines",
    "make_scheduler": "specdepth.scheduler.baselines",
}


def load_policy(path_or_name: str | os.PathLike[str]) -> LearnedScheduler:
    """Load an exported policy, ready to be a decoder's `depth_scheduler`.

    Args:
        path_or_name: folder written by `specdepth export`, the name of a policy that comes with
            specdepth (a folder of that name wins), or "wandb:entity/project/name:alias", which is fetched
            from Weights & Biases.

    Raises:
        ValueError: neither such a folder nor such a name; nothing that can be fetched; damaged files; a
            policy for another format version or other features.
    """
    if str(path_or_name).startswith("wandb:"):
        from specdepth.agents.track_fetch import load_from_wandb

        return load_from_wandb(str(path_or_name))
    from specdepth.scheduler.policy_names import find_policy

    return find_policy(path_or_name)


if not TYPE_CHECKING:  # type checkers take the names from above, and refuse any other

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'specdepth' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
