"""The servers in EndpointSlices of Kubernetes. Pure: JSON of the API in, a list of servers out.

A server is listed if kube-proxy would choose it. Endpoints that are ready and not terminating come
first. Only where there is none, those that terminate and still serve are listed: their pods are
about to stop, but no other pod can answer. A pod that is not ready is listed in no other case.

A resource version is an opaque text: it is sent back as it came, never compared.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Any, NamedTuple, TypeVar

import msgspec

from app.discovery.endpoints import Endpoint

# One model behind one gateway; a selector that matches more is a mistake.
MAX_SLICES = 1000
MAX_ENDPOINTS = 5000
# etcd refuses objects over 1.5 MiB, which are smaller there than in JSON.
MAX_LINE_BYTES = 4 * 2**20
MAX_VERSION_CHARS = 1024
# It becomes a part of a URL. The API server's own have a few hundred characters.
MAX_NEXT_PAGE_CHARS = 4096
MAX_REASON_CHARS = 300

T = TypeVar("T")


class ApiError(Exception):
    """The API server did not give what was asked. The message is for operators.

    `resumable`: a watch may go on at the last resource version; otherwise a new list is needed.
    """

    def __init__(
        self, reason: str, *, resumable: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.resumable = resumable
        self.retry_after_s = retry_after_s


class VersionExpired(ApiError):
    """410: the API server no longer knows the changes since this resource version."""


class _Model(msgspec.Struct, rename="camel", gc=False):
    """A part of the API's JSON. Unknown members are ignored; Go writes an empty list as null."""


class _Conditions(_Model):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(_Model):
    uid: str | None = None


class _SliceEndpoint(_Model):
    addresses: list[str] | None = None
    conditions: _Conditions | None = None
    target_ref: _Target | None = None


class _Port(_Model):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class _Metadata(_Model):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(_Model):
    """One EndpointSlice, with what is read of it."""

    metadata: _Metadata
    address_type: str = ""
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


class _ListMetadata(_Model):
    resource_version: str = ""
    next_page: str | None = msgspec.field(default=None, name="continue")


class _SliceList(_Model):
    metadata: _ListMetadata
    items: list[EndpointSlice] | None = None


class _Bookmark(_Model):
    metadata: _Metadata


class _StatusDetails(_Model):
    retry_after_seconds: int | None = None


class Status(_Model):
    """The API server's description of an error."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None
    details: _StatusDetails | None = None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the API server asks for the next attempt."""
        return self.details.retry_after_seconds if self.details is not None else None


class _Event(_Model):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list; `next_page` is "" on the last one."""

    slices: list[EndpointSlice]
    version: str
    next_page: str


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch: a slice that is new, changed or deleted, or none in a bookmark."""

    version: str
    slice: EndpointSlice | None = None
    deleted: bool = False


def decode_page(body: bytes) -> Page:
    """Return one page of a list. Raises ApiError."""
    page = _decode(body, _SliceList)
    version = _version(page.metadata.resource_version)
    next_page = page.metadata.next_page or ""
    if len(next_page) > MAX_NEXT_PAGE_CHARS:
        raise ApiError("the API server sent no usable token of the next page")
    return Page(page.items or [], version, next_page)


def decode_change(line: bytes) -> Change:
    """Return one event of a watch. Raises VersionExpired and ApiError."""
    event = _decode(line, _Event)
    body = bytes(event.object)
    match event.type:
        case "ADDED" | "MODIFIED" | "DELETED":
            changed = _decode(body, EndpointSlice)
            version = _version(changed.metadata.resource_version)
            return Change(version, changed, event.type == "DELETED")
        case "BOOKMARK":
            return Change(_version(_decode(body, _Bookmark).metadata.resource_version))
        case "ERROR":
            status = _decode(body, Status)
            if status.code == 410 or status.reason in ("Expired", "Gone"):
                raise VersionExpired("the resource version has expired")
            reason = f"the watch ended: {status.code} {printable(status.reason or '')}"
            raise ApiError(reason[:MAX_REASON_CHARS].rstrip(), retry_after_s=status.retry_after_s)
        case _:
            raise ApiError("the watch sent an event of an unknown type")


def decode_status(body: bytes) -> Status:
    """Return the description in an error's body, an empty one where there is none."""
    try:
        return _decode(body, Status)
    except ApiError:
        return Status()


def printable(text: str) -> str:
    """Return a text of the API server with a blank for what is not printable ASCII."""
    return re.sub(r"[^ -~]+", " ", text)


class LineSplitter:
    """Splits a stream into lines of at most MAX_LINE_BYTES; an unfinished line is held back."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that this data completes, without blank ones. Raises ApiError."""
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            self._extend(part)
            if line := bytes(self._begun):
                lines.append(line)
            self._begun.clear()
        self._extend(rest)
        return lines

    def _extend(self, part: bytes) -> None:
        if len(self._begun) + len(part) > MAX_LINE_BYTES:
            raise ApiError(f"the watch sent an event over {MAX_LINE_BYTES} bytes")
        self._begun += part


class _Listed(NamedTuple):
    """One endpoint of a slice at the wanted port."""

    url: str
    pod: str | None  # its UID
    ipv6: bool
    ready: bool
    last_resort: bool  # it terminates, and still serves


class SliceCache:
    """The EndpointSlices that the API server has, as a list and the events after it tell."""

    def __init__(self, port: int | str) -> None:
        self._port = port
        self._slices: dict[str, tuple[_Listed, ...]] = {}

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Take a complete list. Raises ApiError, with nothing changed, if it is too long."""
        self._take({one.metadata.name: tuple(_listed(one, self._port)) for one in slices})

    def apply(self, change: Change) -> None:
        """Take one event. Raises ApiError, with nothing changed, if there are too many."""
        if change.slice is None:
            return
        name = change.slice.metadata.name
        if change.deleted:
            self._slices.pop(name, None)
        else:
            self._take({**self._slices, name: tuple(_listed(change.slice, self._port))})

    def servers(self) -> frozenset[Endpoint]:
        """Return the servers to use, each once."""
        listed = [one for entries in self._slices.values() for one in entries]
        # A pod with addresses of both families is one server.
        with_ipv4 = {one.pod for one in listed if one.pod is not None and not one.ipv6}
        listed = [one for one in listed if not one.ipv6 or one.pod not in with_ipv4]
        urls = {one.url for one in listed if one.ready}
        urls = urls or {one.url for one in listed if one.last_resort}
        return frozenset(Endpoint(url) for url in urls)

    def _take(self, slices: dict[str, tuple[_Listed, ...]]) -> None:
        if len(slices) > MAX_SLICES:
            raise ApiError(f"the selector matches over {MAX_SLICES} EndpointSlices")
        if sum(map(len, slices.values())) > MAX_ENDPOINTS:
            raise ApiError(f"the selector matches over {MAX_ENDPOINTS} endpoints")
        self._slices = slices


def _listed(one: EndpointSlice, port: int | str) -> Iterable[_Listed]:
    """Yield the endpoints of a slice, if it is of IP addresses and has the port."""
    number = _port_number(one, port)
    if number is None or one.address_type not in ("IPv4", "IPv6"):
        return
    ipv6 = one.address_type == "IPv6"
    for endpoint in one.endpoints or ():
        # Addresses after the first have no meaning, and kube-proxy does not look at them.
        host = _host((endpoint.addresses or [""])[0], ipv6=ipv6)
        if host is None:
            continue
        conditions = endpoint.conditions or _Conditions()
        # With publishNotReadyAddresses a pod is called ready even while it terminates.
        terminating = conditions.terminating is True
        yield _Listed(
            url=f"http://{host}:{number}",
            pod=endpoint.target_ref.uid if endpoint.target_ref is not None else None,
            ipv6=ipv6,
            ready=conditions.ready is not False and not terminating,
            last_resort=conditions.serving is not False and terminating,
        )


def _port_number(one: EndpointSlice, port: int | str) -> int | None:
    """Return the number of a port in a slice; None: it has no TCP port of this name.

    A number needs no entry: the slices of a headless Service may list no ports at all.
    """
    if isinstance(port, int):
        return port
    for entry in one.ports or ():
        if entry.name == port and (entry.protocol or "TCP") == "TCP":
            return entry.port if entry.port and 1 <= entry.port <= 65535 else None
    return None


def _host(address: str, *, ipv6: bool) -> str | None:
    """Return an address as the host of a URL; None: it is not one of this family."""
    try:
        if not ipv6:
            return str(IPv4Address(address))
        parsed = IPv6Address(address)
    except AddressValueError:
        return None
    return f"[{parsed}]" if parsed.scope_id is None else None


def _version(version: str) -> str:
    if not 0 < len(version) <= MAX_VERSION_CHARS:
        raise ApiError("the API server sent no usable resource version")
    return version


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the API server's response cannot be read: {_fault(error)}") from None


def _fault(error: Any) -> str:
    return f"{type(error).__name__}: {error}"[:200]
