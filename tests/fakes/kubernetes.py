"""An API server of Kubernetes for EndpointSlices, over HTTPS, that misbehaves on request.

It lists with pages, and watches with bookmarks, as the real one does: a list is a snapshot at one
resource version, a watch repeats every change after a version, and compaction makes old versions
expire, for watches and for the following pages of a list. Its certificate is made by an authority
of its own, and it checks the service account's token.
"""

import asyncio
import base64
import copy
import datetime
import json
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NAMESPACE = "vllm"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.a-token-of-a-service-account.c2lnbmF0dXJl"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
LABELS = {"kubernetes.io/service-name": "vllm"}
SELECTOR = "kubernetes.io/service-name=vllm"
OTHER_LABELS = {"kubernetes.io/service-name": "other"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Authority:
    """Certificates of a cluster: that of its authority, and the API server's with its key."""

    ca: Path
    server: Path


def make_authority(
    directory: Path, addresses: tuple[str, ...] = ("127.0.0.1",), names: tuple[str, ...] = ()
) -> Authority:
    """Make an authority, and a certificate for a server at these addresses and names.

    As in many clusters, the certificates have no authority key identifier.
    """
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    ca_key = ec.generate_private_key(ec.SECP256R1())

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    ca = certificate(issuer, ca_key).add_extension(x509.BasicConstraints(True, None), True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    subjects = [
        *(x509.IPAddress(ip_address(address)) for address in addresses),
        *(x509.DNSName(name) for name in names),
    ]
    server = certificate(subject, key).add_extension(x509.SubjectAlternativeName(subjects), False)
    pem = serialization.Encoding.PEM
    files = Authority(directory / "ca.crt", directory / "server.pem")
    files.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(pem))
    files.server.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + server.sign(ca_key, hashes.SHA256()).public_bytes(pem)
    )
    return files


def make_slice(
    name: str,
    *addresses: str,
    port: int | None = 8000,
    labels: Mapping[str, str] = LABELS,
    ready: bool | None = True,
    serving: bool | None = True,
    terminating: bool | None = False,
) -> Object:
    """Return an EndpointSlice of IPv4 addresses with the same conditions; None: left out."""
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    return {
        "metadata": {"name": name, "labels": dict(labels)},
        "addressType": "IPv4",
        "endpoints": [
            {
                "addresses": [str(IPv4Address(address))],
                "conditions": {k: v for k, v in conditions.items() if v is not None},
                "targetRef": {"kind": "Pod", "name": f"pod-{address}", "uid": f"uid-{address}"},
                "nodeName": "node-0",
            }
            for address in addresses
        ]
        or None,  # as Go writes an empty list
        "ports": [{"name": "http", "protocol": "TCP", "port": port}] if port else None,
    }


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def watches(self) -> bool:
        """True for a watch, False for a page of a list."""
        return self.query.get("watch") == "1"


@dataclass(frozen=True)
class Canned:
    """A response in place of the right one."""

    status: int
    body: bytes = b""
    headers: tuple[str, ...] = ()
    watches: bool | None = None  # only to watches, or only to lists


@dataclass
class _Change:
    version: int
    kind: Literal["ADDED", "MODIFIED", "DELETED"]
    before: Object | None
    after: Object


@dataclass(eq=False)
class _Wire:
    """The connection of one response, which may be cut after some bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    left: int | None = None  # bytes until it is cut
    # Of a watch: what it has still to send, an empty entry for its end.
    selector: str = ""
    queue: deque[bytes] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, data: bytes) -> None:
        if self.left is not None:
            data, self.left = data[: self.left], self.left - len(data[: self.left])
        self.writer.write(data)
        await self.writer.drain()
        if self.left == 0:
            raise ConnectionAbortedError

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def put(self, data: bytes) -> None:
        self.queue.append(data)
        self.wake.set()


class ApiServer:
    """Listens on a free port of 127.0.0.1; an asynchronous context manager."""

    def __init__(self, authority: Authority) -> None:
        self.token = TOKEN
        self.requests: list[Asked] = []
        self.canned: deque[Canned] = deque()
        # How a watch from an expired version is refused: as a status, or as an event.
        self.expiry: Literal["status", "event"] = "status"
        self.page_limit: int | None = None  # less than what is asked for
        self.cuts: deque[int] = deque()  # of the following responses: bytes until the cut
        self.objects: dict[str, Object] = {}
        self._changes: list[_Change] = []
        self._version = 1000
        self._compacted = 1000
        self._watches: set[_Wire] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(authority.server)
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, host: str = "127.0.0.1") -> None:
        """Listen, after `stop` on the same port again."""
        self._server = await asyncio.start_server(self._serve, host, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and end those that are open."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What happens in the cluster

    def put(self, one: Object) -> None:
        """Create or replace a slice."""
        name = one["metadata"]["name"]
        before = self.objects.get(name)
        self._change("MODIFIED" if before else "ADDED", before, copy.deepcopy(one))

    def delete(self, name: str) -> None:
        """Delete a slice, if it is there."""
        if (before := self.objects.get(name)) is not None:
            self._change("DELETED", before, copy.deepcopy(before))

    def compact(self) -> None:
        """Let versions before the present one expire. Open watches go on."""
        self._compacted = self._version

    def restore(self, to: int) -> None:
        """Restart with a backup of the database: what came after a version never happened."""
        self.objects = self._at(to)
        self._changes = [change for change in self._changes if change.version <= to]
        self._version = to
        self.cut_watches()

    # What happens to watches

    @property
    def watching(self) -> int:
        """The number of open watches."""
        return len(self._watches)

    def bookmark(self) -> None:
        """Send a bookmark of the present version to every watch."""
        # Other resources have changed meanwhile.
        self._version += 7
        empty = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1"}
        metadata = {"resourceVersion": str(self._version)}
        self.send({"type": "BOOKMARK", "object": {**empty, "metadata": metadata}})

    def send(self, event: Object | bytes) -> None:
        """Send an event, or bytes, to every watch, after the changes so far."""
        data = event if isinstance(event, bytes) else _line(event)
        for wire in self._watches:
            wire.put(data)

    def expire_watches(self) -> None:
        """Send an error event 410 to every watch."""
        self.send({"type": "ERROR", "object": _status(410, "Expired", "too old resource version")})

    def end_watches(self) -> None:
        """End every watch in good order, as after timeoutSeconds."""
        for wire in self._watches:
            wire.put(b"")

    def cut_watches(self, after: int = 0) -> None:
        """Cut every watch, after so many more bytes."""
        for wire in self._watches:
            wire.left = after
            wire.wake.set()

    # HTTP

    def _change(
        self, kind: Literal["ADDED", "MODIFIED", "DELETED"], before: Object | None, after: Object
    ) -> None:
        self._version += 1
        after["metadata"]["resourceVersion"] = str(self._version)
        change = _Change(self._version, kind, before, after)
        self._changes.append(change)
        if kind == "DELETED":
            del self.objects[after["metadata"]["name"]]
        else:
            self.objects[after["metadata"]["name"]] = after
        for wire in self._watches:
            if (event := _event(wire.selector, change)) is not None:
                wire.put(_line(event))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(_asked(head), _Wire(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError, ssl.SSLError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, asked: Asked, wire: _Wire) -> None:
        self.requests.append(asked)
        wire.left = self.cuts.popleft() if self.cuts else None
        if wire.left == 0:
            raise ConnectionAbortedError
        if asked.headers.get("authorization") != f"Bearer {self.token}":
            await _refuse(wire, 401, "Unauthorized", "Unauthorized")
        elif self.canned and self.canned[0].watches in (None, asked.watches):
            canned = self.canned.popleft()
            await _respond(wire, canned.status, canned.body, *canned.headers)
        elif asked.path != PATH:
            await _refuse(wire, 404, "NotFound", "the server could not find the resource")
        elif asked.watches:
            await self._watch(asked.query, wire)
        else:
            await self._list(asked.query, wire)

    async def _list(self, query: dict[str, str], wire: _Wire) -> None:
        version, after = self._version, ""
        if "continue" in query:
            version, after = json.loads(base64.b64decode(query["continue"]))
        if version < self._compacted:
            message = "The provided continue parameter is too old"
            await _refuse(wire, 410, "Expired", message)
            return
        found = [
            one
            for name, one in sorted(self._at(version).items())
            if name > after and _selects(query["labelSelector"], one)
        ]
        limit = self.page_limit or int(query.get("limit", "0")) or len(found)
        page, rest = found[:limit], found[limit:]
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            following = json.dumps([version, page[-1]["metadata"]["name"]]).encode()
            metadata |= {
                "continue": base64.b64encode(following).decode(),
                "remainingItemCount": len(rest),
            }
        kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
        body = json.dumps({**kind, "metadata": metadata, "items": page or None}).encode()
        await _respond(wire, 200, body)

    def _at(self, version: int) -> dict[str, Object]:
        """Return the objects at an earlier version."""
        objects = dict(self.objects)
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if change.before is None:
                del objects[change.after["metadata"]["name"]]
            else:
                objects[change.after["metadata"]["name"]] = change.before
        return objects

    async def _watch(self, query: dict[str, str], wire: _Wire) -> None:
        version = int(query["resourceVersion"])
        if version > self._version:
            message = f"Too large resource version: {version}, current: {self._version}"
            await _refuse(wire, 504, "Timeout", message)
            return
        expired = version < self._compacted
        if expired and self.expiry == "status":
            await _refuse(wire, 410, "Expired", "too old resource version")
            return
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked"
        await wire.send(f"{head}\r\n\r\n".encode())
        if expired:
            status = _status(410, "Expired", f"too old resource version: {version}")
            await wire.chunk(_line({"type": "ERROR", "object": status}))
            await wire.send(b"0\r\n\r\n")
            return
        wire.selector = query["labelSelector"]
        missed = [change for change in self._changes if change.version > version]
        events = (_event(wire.selector, change) for change in missed)
        wire.queue.extend(_line(event) for event in events if event is not None)
        gone = asyncio.create_task(wire.reader.read(1))
        gone.add_done_callback(lambda _: wire.wake.set())
        self._watches.add(wire)
        try:
            while True:
                wire.wake.clear()
                while wire.queue:
                    if not (data := wire.queue.popleft()):
                        await wire.send(b"0\r\n\r\n")
                        raise ConnectionAbortedError
                    await wire.chunk(data)
                if wire.left == 0 or gone.done():
                    raise ConnectionAbortedError
                await wire.wake.wait()
        finally:
            self._watches.discard(wire)
            gone.cancel()


def _event(selector: str, change: _Change) -> Object | None:
    """Return what a watch with a selector sees of a change."""
    was = change.before is not None and _selects(selector, change.before)
    is_ = change.kind != "DELETED" and _selects(selector, change.after)
    if not was and not is_:
        return None
    kind = "DELETED" if not is_ else "MODIFIED" if was else "ADDED"
    return {"type": kind, "object": change.after}


def _selects(selector: str, one: Object) -> bool:
    """Return whether a selector of the form a=b,c=d matches."""
    labels = one["metadata"]["labels"]
    pairs = (part.partition("=") for part in selector.split(","))
    return all(labels.get(name) == value for name, _, value in pairs)


def _asked(head: str) -> Asked:
    line, *lines = head.split("\r\n")
    target = urlsplit(line.split(" ")[1])
    query = {name: values[0] for name, values in parse_qs(target.query).items()}
    pairs = (line.partition(": ") for line in lines if line)
    return Asked(target.path, query, {name.lower(): value for name, _, value in pairs})


def _status(code: int, reason: str, message: str) -> Object:
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**kind, "code": code, "reason": reason, "message": message}


def _line(event: Object) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


async def _refuse(wire: _Wire, code: int, reason: str, message: str) -> None:
    await _respond(wire, code, json.dumps(_status(code, reason, message)).encode())


async def _respond(wire: _Wire, code: int, body: bytes, *headers: str) -> None:
    lines = (f"HTTP/1.1 {code} Any", f"content-length: {len(body)}", *headers)
    await wire.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
