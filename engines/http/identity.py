"""Identity of a server: equal in all gateways that send to the same one."""

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

from engines.http.address import Address

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


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
