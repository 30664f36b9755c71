"""The address of an engine, and its identity: equal in all gateways that send to one server."""

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port, or a Unix socket."""

    host: str = "engine"
    port: int = 80
    tls: bool = False
    prefix: str = ""
    uds: str | None = None

    @classmethod
    def from_url(cls, url: str) -> "Address":
        """Return the address of an http:// or https:// URL; its path becomes the prefix."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname or "", port, tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        """The value of the Host header; the default port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.uds or f"{self.host}:{self.port}"


def identify(address: Address) -> str:
    """Return the identity of the server at an address.

    A loopback address is another server on each machine and in each container, so the identity
    names the network that it is on. Two names of one server are two identities.
    """
    host = address.host.rstrip(".").lower()
    loopback = host == "localhost" or host.endswith(".localhost")
    with contextlib.suppress(ValueError):  # a name
        ip = ipaddress.ip_address(host)
        host, loopback = f"[{ip}]" if ip.version == 6 else str(ip), ip.is_loopback
    scheme = "https" if address.tls else "http"
    identity = f"{scheme}://{host}:{address.port}{address.prefix}"
    return f"{identity} on {_network()}" if loopback else identity


def _network() -> str:
    """Return the name of this process's network namespace, unique among machines."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_NETWORK)}"
    except OSError:  # no Linux, or /proc is not mounted
        return socket.gethostname()
