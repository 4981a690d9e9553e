"""What an offline W&B run left on disk, read without W&B's own reader, which it no longer ships."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 32768


@dataclass(frozen=True)
class OfflineRun:
    """One run folder."""

    folder: Path
    records: dict[str, list[Any]]
    """By kind."""

    @property
    def run(self) -> Any:
        """Project, group, job type, tags, configuration."""
        return self.records["run"][0]

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the run, later ones included."""
        updates = [*self.run.config.update]
        for record in self.records.get("config", []):
            updates += record.update
        return {update.key: json.loads(update.value_json) for update in updates}

    @property
    def history(self) -> list[dict[str, Any]]:
        """Logged lines; the parts of a histogram or a file are joined by dots."""
        return [
            {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in line.item
            }
            for line in self.records.get("history", [])
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """Last value of each key."""
        return {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for record in self.records.get("summary", [])
            for item in record.update
        }

    @property
    def exit_code(self) -> int:
        """0 for a run that did what it should."""
        return int(self.records["exit"][0].exit_code)

    def artifacts(self, kind: str) -> list[Any]:
        """Artifacts of a type, in order."""
        logged = [
            request.log_artifact.artifact
            for request in self.records.get("request", [])
            if request.WhichOneof("request_type") == "log_artifact"
        ]
        return [one for one in [*logged, *self.records.get("artifact", [])] if one.type == kind]

    def table(self, key: str) -> dict[str, Any]:
        """A logged table, with "columns" and "data"."""
        (path,) = (self.folder / "files" / "media" / "table").glob(f"{key}_*.table.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def offline_run(below: Path) -> OfflineRun:
    """The one run below a folder.

    W&B's own process may close the file a moment after `finish` has returned; the last record is "exit".
    """
    (folder,) = (below / "wandb").glob("offline-run-*")
    deadline = time.monotonic() + 30
    while "exit" not in (found := _records(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return OfflineRun(folder, found)


def files_of(artifact: Any) -> dict[str, Path]:
    """Where `wandb sync` will find an artifact's files, by their names in it."""
    return {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}


def _records(folder: Path) -> dict[str, list[Any]]:
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = folder.glob("*.wandb")
    found: dict[str, list[Any]] = {}
    for data in _chunks(path.read_bytes()):
        record = proto.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def _chunks(data: bytes) -> Iterator[bytes]:
    """Records of a transaction log: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return  # it is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
