"""Telling the service manager how the gateway fares: systemd's sd_notify(3), without libsystemd.

One datagram a message, one assignment a line. Where nobody asked, nothing is sent.
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
    """Who started us and wants to know; `address` of its socket in the kernel's form."""

    address: bytes
    # It ends us when it was not told for so long that we live; None: it does not watch.
    watchdog_s: float | None = None

    @classmethod
    def take_from(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Return the service manager that the environment names, None where there is none.

        Its variables are taken out: what we start must not speak for us.
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
        """Say that the start, or a reload, is over. Return whether that was heard."""
        return self._tell("READY=1", f"STATUS={status}")

    def alive(self, status: str) -> None:
        """Say how we fare; the watchdog counts anew."""
        self._tell(*(["WATCHDOG=1"] if self.watchdog_s else ()), f"STATUS={status}")

    def reloading(self) -> None:
        """Say that a reload began; `ready` ends it."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._tell("RELOADING=1", f"MONOTONIC_USEC={now}", "STATUS=reloading the configuration")

    def stopping(self, status: str, within_s: float) -> None:
        """Say that the end began, and ask not to be killed before so many seconds."""
        extension = f"EXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}"
        self._tell("STOPPING=1", extension, f"STATUS={status}")

    def _tell(self, *assignments: str) -> bool:
        lines = (assignment.replace("\n", " ") for assignment in assignments)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)  # a service manager that does not listen must not stop us
            try:
                sock.sendto("\n".join(lines).encode(), self.address)
            except OSError as error:
                log.debug("the service manager did not hear %r: %s", assignments[0], error)
                return False
        return True
