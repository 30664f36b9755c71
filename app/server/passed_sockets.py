"""Listening sockets that systemd passes to its service: sd_listen_fds(3), without libsystemd.

systemd binds the addresses of a .socket unit and keeps the sockets open while the service restarts:
connections wait in their backlog. The service finds them from file descriptor 3 on; three variables
say how many there are, for which process, and the FileDescriptorName= of each.
"""

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from app.settings import ConfigError

log = logging.getLogger(__name__)

PID = "LISTEN_PID"
FDS = "LISTEN_FDS"
NAMES = "LISTEN_FDNAMES"
# The last one identifies the process behind the PID (systemd 259).
VARIABLES = (PID, FDS, NAMES, "LISTEN_PIDFDID")
FIRST_FD = 3
# A unit passes as many as it has ListenStream= lines; the kernel's own bound is far higher.
MAX_FDS = 1024


class PassedSocket(NamedTuple):
    """A listening TCP socket, and the name that its unit gives it."""

    name: str
    sock: socket.socket


def passed_fds(variables: Mapping[str, str], pid: int) -> dict[int, str]:
    """Return the file descriptors that are passed to the process `pid`, with their names. Pure.

    Empty if there are none, they are for another process, or the variables make no sense.
    """
    count = variables.get(FDS, "")
    if variables.get(PID) != str(pid) or not (count.isascii() and count.isdecimal()):
        return {}
    if not 0 < int(count[:5]) <= MAX_FDS:
        return {}
    names = variables.get(NAMES, "").split(":")
    fds = range(FIRST_FD, FIRST_FD + int(count))
    return {fd: names[i] if i < len(names) and names[i] else "unknown" for i, fd in enumerate(fds)}


def take_sockets(environ: MutableMapping[str, str]) -> list[PassedSocket]:
    """Return the sockets that systemd passes to this process.

    Removes the variables from the environment and closes the descriptors on exec, so that engines
    inherit neither. Raises ConfigError if one is no listening TCP socket.
    """
    variables = {name: environ.pop(name) for name in VARIABLES if name in environ}
    return [_adopt(fd, name) for fd, name in passed_fds(variables, os.getpid()).items()]


def _adopt(fd: int, name: str) -> PassedSocket:
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(
            [f"file descriptor {fd} ({name}) that systemd passes: {error.strerror}"]
        ) from None
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not (is_tcp and listens):
        sock.close()
        raise ConfigError(
            [f"{name} passes a socket that does not listen on TCP; use ListenStream=ADDRESS:PORT"]
        )
    return PassedSocket(name, sock)
