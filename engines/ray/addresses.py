"""Network addresses of this machine."""

import contextlib
import fcntl
import os
import random
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915  # netdevice(7)
# Below the ports that Linux gives to outgoing connections (net.ipv4.ip_local_port_range).
MEETING_PORTS = range(20000, 32768)
MEETING_ATTEMPTS = 20
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # proc(5)
_LISTEN = "0A"


def free_port(address: str) -> int:
    """Return a TCP port of this address that nothing listens on. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def meeting_port(address: str) -> int:
    """Return a free TCP port of this address that is likely to stay free for a minute.

    vLLM listens on it only after its imports. Raises OSError.
    """
    for port in random.sample(MEETING_PORTS, MEETING_ATTEMPTS):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    return free_port(address)


def has_listener(port: int) -> bool:
    """Return whether a process of this user listens on a TCP port."""
    shown, user = f":{port:04X}", str(os.geteuid())
    for table in _TABLES:
        with contextlib.suppress(OSError):  # without IPv6
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, owner, *_ = line.split()
                if local.endswith(shown) and state == _LISTEN and owner == user:
                    return True
    return False


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
