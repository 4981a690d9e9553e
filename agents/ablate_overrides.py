"""Settings of a training run changed by dotted paths, such as `ppo.discount`, and checked at once."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .train_config import TrainConfig


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """Return `config` with other values at the given paths.

    Values are as JSON has them: a list stands for a tuple, text for a path.

    Args:
        config: what to start from.
        overrides: values by dotted path, `"seed"` or `"ppo.discount"`.

    Raises:
        ValueError: a setting that does not exist, a value of a wrong type or out of range. The
            sentence names the path.
    """
    for path, value in overrides.items():
        try:
            config = _changed(config, path.split("."), value)
        except ValueError as error:
            raise ValueError(f"cannot set {path}: {error}") from error
    return config


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths at which two trees of settings differ, in the order of `new`, removed ones last."""
    found = []
    for name in dict.fromkeys((*new, *old)):
        path, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{path}.")
        elif before != after or (name in old) != (name in new):
            found.append(path)
    return found


def _changed(config: Any, names: list[str], value: Any) -> Any:
    """`config`, a dataclass, with `value` at the path `names`."""
    name, *rest = names
    known = [field.name for field in fields(config)]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f' Did you mean "{close[0]}"?' if close else ""
        kind = type(config).__name__
        raise ValueError(f'{kind} has no "{name}"; it has {", ".join(known)}.{hint}')
    old = getattr(config, name)
    if rest:
        if not is_dataclass(old):
            raise ValueError(f'"{name}" is one value and has no "{rest[0]}".')
        return replace(config, **{name: _changed(old, rest, value)})
    if is_dataclass(old):
        raise ValueError(f'"{name}" is a group of settings; name one of them, as in "{name}.x".')
    hint = get_type_hints(type(config))[name]
    return replace(config, **{name: _converted(value, hint)})


def _converted(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` wants it."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for one in get_args(hint):
            try:
                return _converted(value, one)
            except ValueError:
                continue
    elif origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        (kind, _) = get_args(hint)  # settings have no tuples but of any length
        return tuple(_converted(item, kind) for item in value)
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is type(None) and value is None:
        return None
    elif isinstance(hint, type) and type(value) is hint:
        return value
    wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ValueError(f"expected {wanted}, got {value!r}.")
