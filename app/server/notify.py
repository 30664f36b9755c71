"""Reports the gateway's state to systemd: sd_notify(3), without libsystemd.

Each message is one datagram with one assignment per line. Without NOTIFY_SOCKET nothing is sent.
"""

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Self

log = logging.getLogger(__name__)

SOCKET = "NOTIFY_SOCKET"
WATCHDOG_USEC = "WATCHDOG_USEC"
WATCHDOG_PID = "WATCHDOG_PID"


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """systemd's notification socket; `address` is in the kernel's form."""

    address: bytes
    # systemd kills the process if no ping arrives for this long; None: no watchdog.
    watchdog_s: float | None = None

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Return the service manager that the environment names; None: there is none.

        Removes its variables, so that child processes cannot send notifications.
        """
        name = environ.pop(SOCKET, "")
        usec = environ.pop(WATCHDOG_USEC, "")
        pid = environ.pop(WATCHDOG_PID, "")
        if not name:
            return None
        if name[0] not in "/@":
            log.warning("%s=%s is neither a path nor an abstract socket", SOCKET, name)
            return None
        address = os.fsencode(name)
        if name[0] == "@":
            address = b"\0" + address[1:]
        watched = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if watched else None)

    def ready(self, status: str) -> bool:
        """Report that start-up or a reload is complete; return False if it was not received."""
        return self._send("READY=1", f"STATUS={status}")

    def alive(self, status: str) -> None:
        """Report the status, and ping the watchdog."""
        self._send(*(["WATCHDOG=1"] if self.watchdog_s else ()), f"STATUS={status}")

    def reloading(self) -> None:
        """Report that a reload has begun; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", "STATUS=reloading the configuration")

    def stopping(self, status: str, within_s: float) -> None:
        """Report that the shutdown has begun, and request `within_s` seconds for it."""
        extension = f"EXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}"
        self._send("STOPPING=1", extension, f"STATUS={status}")

    def _send(self, *assignments: str) -> bool:
        lines = (assignment.replace("\n", " ") for assignment in assignments)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)  # a service manager that does not read must not block us
            try:
                sock.sendto("\n".join(lines).encode(), self.address)
            except OSError as error:
                log.debug("systemd notification %r not sent: %s", assignments[0], error)
                return False
        return True
