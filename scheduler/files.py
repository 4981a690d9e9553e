"""Reading and writing small files safely: bounded, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of `path`.

    Raises:
        ValueError: when there are more than `limit`; no more than that is read.
        OSError: when it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path.name} is larger than {limit} bytes, the most that is read.")
    return data


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`; a failure leaves what was there.

    Raises:
        OSError: when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
