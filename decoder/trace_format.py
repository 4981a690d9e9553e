"""How a trace lies on disk: a compressed .npz of plain numbers with a JSON header among them.

Nothing of a file is trusted before it is checked: no pickle, bounded sizes, and each array exactly as
large as it says.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdepth.scheduler.files import read_bounded, write_atomic

FORMAT = "specdepth-trace"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 << 20
MAX_ARRAY_BYTES = 1 << 30
"""Bound on what a file may unpack to."""

_HEADER = "header"
_SUFFIX = ".npy"
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def write_arrays(path: Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write header and arrays to `path`, whole or not at all; equal content gives equal bytes.

    Raises:
        OSError: it cannot be written.
    """
    document = {"format": FORMAT, "format_version": FORMAT_VERSION} | dict(header)
    text = json.dumps(document, allow_nan=False).encode()
    buffer = BytesIO()
    packed = {_HEADER: np.frombuffer(text, np.uint8)} | dict(arrays)
    np.savez_compressed(buffer, allow_pickle=False, **packed)
    write_atomic(path, buffer.getvalue())


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read what `write_arrays` wrote. Use it within `naming`.

    Returns:
        The header, of this format version, and the other arrays by name.
    """
    arrays = _unpack(read_bounded(path, MAX_FILE_BYTES))
    check(_HEADER in arrays, f"it has no {_HEADER}")
    text = arrays.pop(_HEADER)
    check(text.dtype == np.uint8, "its header is no text")
    header = json.loads(text.tobytes().decode())
    is_ours = isinstance(header, dict) and header.get("format") == FORMAT
    check(is_ours, f'the field "format" must be "{FORMAT}"')
    version = header.get("format_version")
    check(
        version == FORMAT_VERSION,
        f"format version {version!r}, this specdepth reads {FORMAT_VERSION}; record it again",
    )
    return header, arrays


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever a bad file raises into a ValueError with one sentence that names it."""
    damaged = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read trace {path}: {error.strerror or error}.") from error
    except RecursionError as error:
        raise ValueError(f"cannot use trace {path}: its header is nested too deep.") from error
    except damaged as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise ValueError(
            f"cannot use trace {path}: it is truncated, damaged or no trace ({reason}); record it "
            "again."
        ) from error
    except ValueError as error:  # those of JSON and UTF-8 too
        raise ValueError(f"cannot use trace {path}: {str(error).rstrip('.')}.") from error


def check(condition: bool, what: str) -> None:
    """Refuse with `what`.

    Raises:
        ValueError: unless `condition`.
    """
    if not condition:
        raise ValueError(f"{what}.")


def _unpack(data: bytes) -> dict[str, NDArray[Any]]:
    check(len(data) > 0, "it is empty")
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = archive.infolist()
        names = [member.filename.removesuffix(_SUFFIX) for member in members]
        check(len(set(names)) == len(names), "it holds an array twice")
        unpacked = sum(member.file_size for member in members)
        check(
            unpacked <= MAX_ARRAY_BYTES,
            f"it unpacks to {unpacked} bytes, the most that is read is {MAX_ARRAY_BYTES}",
        )
        return {
            name: _array(archive, member, name) for name, member in zip(names, members, strict=True)
        }


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> NDArray[Any]:
    """One array. `np.load` would allocate whatever an array's own header asks for."""
    check(member.compress_type in _COMPRESSIONS, f"{name} is compressed in an unknown way")
    content = archive.read(member)  # no more than member.file_size
    file = BytesIO(content)
    version = np.lib.format.read_magic(file)
    check(version in ((1, 0), (2, 0)), f"{name} has the unknown array version {version}")
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, is_fortran, dtype = read(file)
    check(dtype.kind in "uifb", f"{name} holds no numbers")
    fits = min(shape, default=0) >= 0 and (
        math.prod(shape) * dtype.itemsize == len(content) - file.tell()
    )
    check(fits, f"{name} is not as large as it says")
    values = np.frombuffer(content, dtype, offset=file.tell())
    return values.reshape(shape, order="F" if is_fortran else "C")
