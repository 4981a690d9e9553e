"""A W&B server on this machine that knows a few artifacts, for the real client to ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

ENTITY, PROJECT = "team", "specdepth"
PLACE = {"id": "p", "internalId": "1", "name": PROJECT, "entity": {"name": ENTITY}}
VIEWER = {
    "id": "u",
    "entity": ENTITY,
    "username": ENTITY,
    "email": "",
    "flags": "{}",
    "teams": {"edges": []},
}


@contextmanager
def artifact_server(artifacts: dict[str, Any]) -> Iterator[str]:
    """Serve artifacts as version 3 of their names under every alias; yields the address.

    Args:
        artifacts: drafts of `wandb.Artifact`, by name.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.path != "/graphql":  # telemetry of the client
                self._answer(b"")
                return
            asked = json.loads(data)
            address = f"http://{self.headers['host']}"
            self._answer(json.dumps({"data": self._resolve(asked, address)}).encode())

        def do_GET(self) -> None:
            kind, *parts = unquote(self.path).removeprefix("/").split("/")
            if kind == "manifest":
                manifest = artifacts[parts[0]].manifest
                self._answer(json.dumps(manifest.to_manifest_json()).encode())
            else:  # artifactsV2/REGION/ENTITY/PROJECT/NAME/ID/DIGEST/FILE
                entry = artifacts[parts[3]].manifest.entries[parts[-1]]
                self._answer(Path(entry.local_path).read_bytes())

        def _resolve(self, asked: dict[str, Any], address: str) -> dict[str, Any]:
            query, variables = asked["query"], asked.get("variables") or {}
            if "artifactCollectionMembership(" in query:
                return {"project": {"artifactCollectionMembership": _member(variables["name"])}}
            if "currentManifest" in query:
                url = f"{address}/manifest/{variables['id']}"
                return {"artifact": {"currentManifest": {"file": {"directUrl": url}}}}
            return {"viewer": VIEWER, "serverInfo": {"features": []}}

        def _answer(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

    def _member(path: str) -> dict[str, Any] | None:
        name, _, alias = path.partition(":")
        if name not in artifacts:
            return None
        artifact = artifacts[name]
        collection = {"__typename": "ArtifactSequence", "name": name, "project": PLACE}
        return {
            "__typename": "ArtifactCollectionMembership",
            "id": "m",
            "versionIndex": 3,
            "createdAt": "2026-01-01T00:00:00Z",
            "aliases": [{"__typename": "ArtifactAlias", "id": "a", "alias": alias}],
            "artifactCollection": collection,
            "artifact": {
                "__typename": "Artifact",
                "id": name,
                "artifactSequence": collection,
                "versionIndex": 3,
                "artifactType": {"name": artifact.type},
                "description": None,
                "metadata": "{}",
                "ttlDurationSeconds": -2,
                "ttlIsInherited": True,
                "tags": [],
                "historyStep": None,
                "state": "COMMITTED",
                "size": 1,
                "digest": artifact.digest,
                "commitHash": "c",
                "fileCount": 2,
                "createdAt": "2026-01-01T00:00:00Z",
                "updatedAt": None,
                "aliases": [],
            },
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
