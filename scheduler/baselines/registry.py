"""`make_scheduler`: from a name on a command line to a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specdepth.scheduler.depth import DepthScheduler

from .adaedl import AdaEDL
from .adaptive_verification import AdaptiveVerificationDepth
from .bandits import EpsilonGreedyDepth, UCBDepth
from .capped_greedy import CappedGreedyDepth, Shrinkage
from .confidence import HFConfidence, LlamaCppConfidence
from .dspark import DSparkDepth
from .ema_greedy import EmaGreedyDepth
from .fixed import FixedDepth
from .goodput import GoodputDepth
from .greedy import GreedyDepth
from .greedy_file import load_greedy, shipped_rules
from .heuristic import HeuristicDepth
from .mlc import MlcDepth
from .off import Off
from .position_goodput import PositionGoodputDepth, WindowGoodputDepth
from .priced_stops import PricedStops
from .random_depth import RandomDepth
from .sglang_ladder import SGLangLadder
from .specdec_plus_plus import SpecDecPlusPlus
from .survival_names import make_survival
from .svip import SVIP
from .table import TableDepth

KNOWN = (
    '"off"',
    '"fixed:4"',
    '"table:1-4=4,5-16=2,17-=0"',
    '"table:FILE.json"',
    '"mlc"',
    '"heuristic"',
    '"heuristic:START"',
    '"goodput"',
    '"goodput:adaspec"',
    '"goodput:positions"',
    '"goodput:window"',
    '"ema-greedy"',
    '"blind-greedy:SURVIVAL"',
    '"greedy:SURVIVAL"',
    '"shrunk:SURVIVAL:PULL:EXPONENT:PRICE"',
    '"rule:NAME"',
    '"rule:FILE.json"',
    '"dspark"',
    '"dspark:SURVIVAL"',
    '"adaptive-verification"',
    '"adaptive-verification:SURVIVAL"',
    '"hf-confidence:0.4"',
    '"llamacpp:0.75"',
    '"adaedl:0.1"',
    '"svip:0.6"',
    '"specdec++:0.5"',
    '"specdec++:0.5:SURVIVAL"',
    '"priced-stops"',
    '"priced-stops:SURVIVAL"',
    '"sglang-ladder"',
    '"ucb:0.01"',
    '"tlt"',
    '"eps-greedy"',
    '"random:SEED"',
    '"guarded:NAME"',
    '"guarded:NAME:FALLBACK"',
    '"policy:NAME"',
    '"policy:FOLDER"',
    "the folder of an exported policy",
)
"""What `make_scheduler` understands. SURVIVAL: match, positions, ema, confidence, or a fitted model.
NAME of a guarded policy and its FALLBACK: any other name here, with its setting."""

_PLAIN: dict[str, Callable[[], DepthScheduler]] = {
    "off": Off,
    "mlc": MlcDepth,
    "goodput": GoodputDepth,
    "goodput:adaspec": GoodputDepth.adaspec,
    "goodput:positions": PositionGoodputDepth,
    "goodput:window": WindowGoodputDepth,
    "ema-greedy": EmaGreedyDepth,
    "dspark": DSparkDepth,
    "adaptive-verification": AdaptiveVerificationDepth,
    "priced-stops": PricedStops,
    "sglang-ladder": SGLangLadder,
    "tlt": EpsilonGreedyDepth,
    "eps-greedy": partial(EpsilonGreedyDepth, bands=None),
}
"""Names without a setting."""

_WITH_NUMBER: dict[str, Callable[..., DepthScheduler]] = {
    "hf-confidence": HFConfidence,
    "llamacpp": LlamaCppConfidence,
    "adaedl": AdaEDL,
    "svip": SVIP,
    "ucb": UCBDepth,
}
"""Kinds that take one number, or none for their default."""

_WITH_SURVIVAL: dict[str, Callable[..., DepthScheduler]] = {
    "blind-greedy": GreedyDepth,
    "greedy": CappedGreedyDepth,
    "dspark": DSparkDepth,
    "adaptive-verification": AdaptiveVerificationDepth,
    "priced-stops": lambda survival: PricedStops(CappedGreedyDepth(survival)),
}
"""Kinds that take an estimator."""


_KINDS = (
    {kind.partition(":")[0] for kind in _PLAIN}
    | _WITH_NUMBER.keys()
    | _WITH_SURVIVAL.keys()
    | {"fixed", "table", "heuristic", "random", "shrunk", "specdec++", "rule", "policy", "guarded"}
)
"""First part of every name but a bare folder."""


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
        model_pair: refuse a policy or survival model that was made for another pair.
        drafter: refuse one that was made for another drafter.
        max_num_speculative_tokens: K; refuse a policy for another K, or a deeper fixed depth.

    Raises:
        ValueError: an unknown name, a wrong setting, or a policy that does not fit.
    """
    kind, _, setting = name.partition(":")
    made_for: dict[str, Any] = {"model_pair": model_pair, "drafter": drafter}
    fits = made_for | {"max_num_speculative_tokens": max_num_speculative_tokens}
    if name in _PLAIN:
        return _PLAIN[name]()
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
    if kind in _WITH_NUMBER:
        make = _WITH_NUMBER[kind]
        return make(_number(name, setting)) if setting else make()
    if kind in _WITH_SURVIVAL and setting:
        return _WITH_SURVIVAL[kind](make_survival(setting, **made_for))
    if kind == "shrunk" and setting:
        return _shrunk(name, setting, made_for)
    if kind == "specdec++":
        return _specdec(name, setting, made_for)
    if kind == "rule" and setting:
        return load_greedy(setting, **made_for)
    if kind == "guarded" and setting:
        return _guarded(setting, fits)
    folder = setting if kind == "policy" else name
    if folder and (kind == "policy" or Path(folder).is_dir()):
        from specdepth.scheduler.policy_names import (
            find_policy,  # the baselines do without safetensors
        )

        return find_policy(folder, **fits)
    rules = "".join(f', "rule:{rule}"' for rule in shipped_rules())
    raise ValueError(f'unknown scheduler "{name}"; there are {", ".join(KNOWN)}{rules}.')


def _fixed(depth: int, top: int | None) -> FixedDepth:
    if top is not None and depth > top:
        raise ValueError(
            f"fixed:{depth} is deeper than max_num_speculative_tokens, which is {top}; "
            "raise that or lower the depth."
        )
    return FixedDepth(depth)


def _shrunk(name: str, setting: str, made_for: dict[str, Any]) -> CappedGreedyDepth:
    survival, *numbers = setting.split(":")
    if len(numbers) > 3:
        raise ValueError(f'"{name}": expected at most a pull, an exponent and a price.')
    values = [_number(name, number) for number in numbers]
    chosen = dict(zip(("pull", "exponent", "price"), values, strict=False))
    return CappedGreedyDepth(make_survival(survival, **made_for), Shrinkage(**chosen))


def _specdec(name: str, setting: str, made_for: dict[str, Any]) -> SpecDecPlusPlus:
    if not setting:
        return SpecDecPlusPlus()
    number, _, survival = setting.partition(":")
    estimator = make_survival(survival, **made_for) if survival else None
    return SpecDecPlusPlus(_number(name, number), estimator)


def _guarded(setting: str, fits: dict[str, Any]) -> DepthScheduler:
    from specdepth.scheduler.guard import GuardedScheduler  # it needs a baseline itself

    # Settings have colons of their own; the fallback begins where the next kind stands.
    parts = setting.split(":")
    if "guarded" in parts:
        raise ValueError(f'"guarded:{setting}": a guard stands around a policy, not another guard.')
    at = next((i for i, part in enumerate(parts) if i and part in _KINDS), len(parts))
    inner = make_scheduler(":".join(parts[:at]), **fits)
    fallback = make_scheduler(":".join(parts[at:]), **fits) if at < len(parts) else None
    return GuardedScheduler(inner, fallback)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        kind = name.partition(":")[0]
        raise ValueError(f'"{name}": expected a number after "{kind}:", got "{text}".') from None


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
