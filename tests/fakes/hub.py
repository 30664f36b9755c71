"""A server that answers like the Hugging Face hub, as far as downloads ask it, and fails at will.

Paths, headers and error codes are those of huggingface.co: `/api/models/…`, also with
`/revision/…` and `/tree/…`, and `/…/resolve/…` with ranges.
"""

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<kind>revision|tree)/(?P<revision>[^/?]+))?"
)
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/?]+)/(?P<name>[^?]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class FakeHub:
    """What the hub has, and how it fails."""

    files: dict[str, bytes] = field(default_factory=dict)
    repo: str = "org/demo"
    port: int = 0
    # Requests as they arrived: method, path and range.
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    gated: bool = False
    # So many requests are refused with 429 and `retry_after_s`.
    refusals: int = 0
    retry_after_s: int = 1
    # A download of a file ends after so many bytes, so many times.
    cut_after: int | None = None
    cuts: int = 0
    status: int | None = None
    # A download of a file pauses after so many bytes until this is set.
    pause_after: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)
    # So many bytes of a file per second; None: as they come.
    rate: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add_directory(self, directory: Path) -> None:
        """Serve the files of a directory."""
        for path in directory.iterdir():
            if path.is_file():
                self.files[path.name] = path.read_bytes()

    def downloads(self, name: str) -> list[str]:
        """Return the ranges of the downloads of a file, "" for a whole one."""
        return [part for method, path, part in self.seen if method == "GET" and name in path]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub."""

    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        if self.path == "/api/agent-harnesses":  # the library asks it where an agent runs it
            return self.send(404, b"")
        hub.seen.append((self.command, self.path, self.headers.get("range", "")))
        if hub.status is not None:
            return self.send(hub.status, b"Service Unavailable")
        if hub.refusals > 0:
            hub.refusals -= 1
            after = str(hub.retry_after_s)
            return self.send(429, b"rate limited", {"Retry-After": after})
        return self.respond()

    def respond(self) -> None:
        """Answer one request."""
        hub = self.hub
        found = _API.fullmatch(self.path.partition("?")[0]) or _FILE.fullmatch(self.path)
        if found is None or found["repo"] != hub.repo:
            return self._refuse(404 if self.headers.get("authorization") else 401, "RepoNotFound")
        if found["revision"] not in ("main", COMMIT, None):
            return self._refuse(404, "RevisionNotFound")
        if found.re is _FILE:
            if hub.gated and not self.headers.get("authorization"):
                return self._refuse(401, "GatedRepo")
            return self.send_file(found["name"])
        if hub.gated and not self.headers.get("authorization"):
            return self._refuse(401, "GatedRepo")
        answer = self._tree() if found["kind"] == "tree" else self._info()
        return self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _info(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _oid(data)}
            for name, data in self.hub.files.items()
        ]
        name = self.hub.repo
        return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
            for name, data in self.hub.files.items()
        ]

    def send_file(self, name: str) -> None:
        data = self.hub.files.get(name)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, start, size = 200, 0, len(data)
        if part := _RANGE.fullmatch(self.headers.get("range", "")):
            status, start, last = 206, int(part[1]), min(int(part[2] or size), size - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{size}"
            data = data[: last + 1]
        cut = self.hub.cut_after
        if self.command == "GET" and cut is not None and self.hub.cuts and len(data) - start > cut:
            self.hub.cuts -= 1
            self.send(status, data[start:], headers, sent=cut)
            self.close_connection = True
            return None
        return self.send(status, data[start:], headers, length=len(data) - start)

    def _refuse(self, status: int, code: str) -> None:
        self.send(status, b'{"error":"refused"}', {"X-Error-Code": code})

    def send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        sent: int | None = None,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self._write(body[:sent])

    def _write(self, body: bytes) -> None:
        hub = self.hub
        if hub.pause_after is not None and len(body) > hub.pause_after:
            self.wfile.write(body[: hub.pause_after])
            hub.go_on.wait()
            body = body[hub.pause_after :]
        if hub.rate is None:
            self.wfile.write(body)
            return
        for start in range(0, len(body), step := max(hub.rate // 10, 1)):
            self.wfile.write(body[start : start + step])
            time.sleep(0.1)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def serving_hub(hub: FakeHub, kind: type[Handler] = Handler) -> Iterator[FakeHub]:
    """Run the hub in a thread."""
    handler = type("Handler", (kind,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
