"""The results file: one JSON with what was run, where, and a flat row for each number.

Rows are `policy, load, metric, value, unit, ci_low, ci_high`. Reports are made from such a file.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from specdepth.decoder.metrics import EngineMetrics
from specdepth.scheduler.files import write_atomic

from .intervals import Interval as Interval
from .intervals import geometric_mean as geometric_mean
from .intervals import mean_interval as mean_interval
from .intervals import paired_ratio as paired_ratio

FORMAT = "specdepth-results"
FORMAT_VERSION = 1
PACKAGES = ("specdepth", "torch", "transformers", "numpy", "gymnasium", "stable-baselines3")

_MAX_FILE_BYTES = 64 << 20
_UNITS = (
    ("_tok_s", "tok/s"),
    ("_ms", "ms"),
    ("_s", "s"),
    ("_share", "share"),
    ("_tokens", "tokens"),
    ("_rate", "share"),
    ("acceptance_length", "tokens"),
    ("mean_depth", "tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One number.

    Raises:
        ValueError: a value or bound that is not finite, or one bound without the other.
    """

    policy: str
    load: int | str
    """Concurrent sequences, or the name of a load that varies."""
    metric: str
    value: float
    unit: str
    ci_low: float | None = None
    """95 % interval; None where there is none (replay is exact) or too few repeats for one."""
    ci_high: float | None = None

    def __post_init__(self) -> None:
        for name in ("policy", "metric", "unit"):
            _check(isinstance(getattr(self, name), str), f"{name} must be text")
        _check(
            isinstance(self.load, str) or (isinstance(self.load, int) and self.load >= 0),
            "load must be a whole number or a name",
        )
        _check(_is_finite(self.value), f"value of {self.metric} must be a finite number")
        bounds = (self.ci_low, self.ci_high)
        _check(
            bounds == (None, None) or all(_is_finite(bound) for bound in bounds),
            f"interval of {self.metric} must be two finite numbers or none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve, for plots."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    x_label: str
    """With unit."""
    y_label: str
    """With unit."""

    def __post_init__(self) -> None:
        _check(len(self.x) == len(self.y), "a series needs as many x as y")
        _check(all(map(_is_finite, (*self.x, *self.y))), "a series must be finite numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a command found, and everything needed to judge and repeat it."""

    command: str
    """The command line."""
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    created: str = ""
    """ISO 8601, UTC."""
    rows: tuple[ResultRow, ...] = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    """Curves by name; "learning_curve" is shown in reports."""

    @classmethod
    def collect(
        cls,
        command: str,
        config: Any,
        rows: Sequence[ResultRow],
        *,
        device: str = "cpu",
        series: Mapping[str, Series] | None = None,
    ) -> Results:
        """Results of this process, with its versions and machine.

        Args:
            command: the command line.
            config: a dataclass or mapping of settings.
            rows: the numbers.
            device: torch device that ran.
            series: curves by name.
        """
        return cls(
            command=command,
            config=_plain(config),
            versions=collect_versions(),
            device=collect_device(device),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            rows=tuple(rows),
            series=dict(series or {}),
        )

    def as_mapping(self) -> dict[str, Any]:
        """What `save` writes."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION} | _plain(self)
        return dict(document)

    @property
    def policies(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(row.policy for row in self.rows))

    @property
    def loads(self) -> list[int | str]:
        """Numbers ascending, then names in order of first appearance."""
        loads = dict.fromkeys(row.load for row in self.rows)
        numbers = sorted(load for load in loads if isinstance(load, int))
        return [*numbers, *(load for load in loads if isinstance(load, str))]

    def find(self, policy: str, load: int | str, metric: str) -> ResultRow | None:
        """The last such row, or None."""
        for row in reversed(self.rows):
            if row.metric == metric and row.policy == policy and row.load == load:
                return row
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all.

        Raises:
            ValueError: the place cannot be written to.
        """
        write_atomically(path, json.dumps(self.as_mapping(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, oversized, damaged or foreign file; the sentence names it.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            _check(len(data) <= _MAX_FILE_BYTES, f"it is larger than {_MAX_FILE_BYTES} bytes")
            return cls._from_document(json.loads(data.decode("utf-8")))
        except OSError as error:
            raise ValueError(f"cannot read results {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            raise ValueError(f"cannot use results {path}: {error}") from error

    @classmethod
    def _from_document(cls, document: Any) -> Results:
        is_ours = isinstance(document, dict) and document.get("format") == FORMAT
        _check(is_ours, f'no results file: the field "format" must be "{FORMAT}"')
        version = document.get("format_version")
        _check(
            version == FORMAT_VERSION,
            f"format version {version!r}, this specdepth reads {FORMAT_VERSION}",
        )
        try:
            rows = tuple(ResultRow(**row) for row in document["rows"])
            series = {
                name: Series(**(values | {"x": tuple(values["x"]), "y": tuple(values["y"])}))
                for name, values in document["series"].items()
            }
            return cls(
                command=str(document["command"]),
                config=dict(document["config"]),
                versions=dict(document["versions"]),
                device=dict(document["device"]),
                created=str(document["created"]),
                rows=rows,
                series=series,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing, unknown or of a wrong kind: {error}.") from error


def rows_from_metrics(policy: str, load: int | str, metrics: EngineMetrics) -> list[ResultRow]:
    """A row for each number of `EngineMetrics.as_dict`, the unit from its name."""
    return [
        ResultRow(policy=policy, load=load, metric=name, value=float(value), unit=unit_of(name))
        for name, value in metrics.as_dict().items()
    ]


def unit_of(metric: str) -> str:
    """Unit that the name of a metric ends on; empty for counts."""
    if metric.startswith("acceptance_at_position"):
        return "share"
    return next((unit for suffix, unit in _UNITS if metric.endswith(suffix)), "")


def collect_versions() -> dict[str, str]:
    """Python and the packages that matter; absent ones are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def collect_device(device: str = "cpu") -> dict[str, Any]:
    """Machine that runs this process, as far as it says so."""
    found: dict[str, Any] = {
        "device": device,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count() or 1,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if device.startswith("cuda") and torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.device(device))
            found |= {"gpu": properties.name, "gpu_memory_gib": properties.total_memory / 2**30}
            found["cuda"] = str(torch.version.cuda)
    return found


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a place for output before the long work, not after it. Creates nothing.

    Raises:
        ValueError: `path` cannot be created or replaced.
    """
    path = Path(path)
    place = path if path.is_dir() else path.absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"cannot write to {path}: {place} is a file, not a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write to {path}: no permission in {place}; choose another --out.")


def check_output_folder(folder: Path, file: str = "") -> None:
    """Refuse a folder for output before the long work. Creates nothing.

    Args:
        folder: as given with --out.
        file: in it, to name in the sentence.

    Raises:
        ValueError: it is a file, or cannot be created or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    check_writable(folder / file)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, folders included, whole or not at all.

    Raises:
        ValueError: the place cannot be written to.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}.") from error


def command_line() -> str:
    """How this process was started, without the folder of its program."""
    program = Path(sys.argv[0]).name
    return shlex.join(["specdepth" if program == "__main__.py" else program, *sys.argv[1:]])


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line)
    return next(names, platform.machine())


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; what it cannot hold becomes text."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in items]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return _plain(value.item())
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _check(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(f"{sentence}.")
