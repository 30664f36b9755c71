"""Hands the listening sockets to the next gateway, over a private Unix socket with SCM_RIGHTS.

    this gateway                                    the next gateway
    SIGTERM: listens on RUN_DIR/handover.sock,
    serves as before
                                         <- connects while it starts
                                         <- "?": it has nothing left to do but take over
    stops accepting; releases engines and lock
    sends its listening sockets          ->
                                                    locks the run directory, starts, accepts
                                         <- "1": it accepts
    closes its sockets

A TCP connection that is not accepted waits in the backlog of its listening socket, which lives for
as long as any process has the socket open (listen(2), unix(7)). Between the last `accept` of one
gateway and the first of the next, no connection is refused, and the two never accept at once.

Until "1" arrives this gateway keeps its own copies: a successor that fails to start loses nothing,
and another one may connect. Only a gateway that is stopping listens here, so a second one that
is started by mistake finds the run directory locked, as ever. Both ends check that the other
belongs to the same user (SO_PEERCRED), and the file is accessible to that user alone.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engines.guard import directories

log = logging.getLogger(__name__)

NAME = "handover.sock"
# The sockets of API and metrics; room for those of a later version.
MAX_SOCKETS = 8
# Time for the previous gateway to release its engines, which takes milliseconds.
TAKE_TIMEOUT_S = 10.0
_ASKING, _SOCKETS, _ACCEPTING = b"?", b"s", b"1"
_UCRED = struct.Struct("3i")  # pid, uid, gid (unix(7))


class SocketOffer:
    """The listening sockets of a gateway that stops, for the next one to take."""

    def __init__(self, run_dir: Path, sockets: Iterable[socket.socket]) -> None:
        """Listen for the next gateway. Raises OSError."""
        self._path = run_dir / NAME
        self._listener = _listen(self._path)
        self._sockets = [sock.dup() for sock in sockets]
        # The gateway that is connected.
        self._peer: socket.socket | None = None
        self._taken = False

    @property
    def awaited(self) -> bool:
        """True while a gateway is connected: it starts, and has not asked for the sockets."""
        return self._peer is not None

    async def wait_until_asked(self) -> None:
        """Return when a gateway has asked for the sockets, which `send` then sends it."""
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._listener)
            peer.setblocking(False)
            if _is_own_user(peer):
                self._peer = peer
                if await _received(peer) == _ASKING:
                    return
                self._peer = None  # it failed before it took anything
            peer.close()

    async def send(self) -> None:
        """Send the sockets to the gateway that has asked; return when it accepts connections.

        If it fails before, another gateway gets them.
        """
        while True:
            peer, self._peer = self._peer, None
            assert peer is not None
            with peer, contextlib.suppress(OSError):
                socket.send_fds(peer, [_SOCKETS], [sock.fileno() for sock in self._sockets])
                if await _received(peer) == _ACCEPTING:
                    self._taken = True
                    self.close()  # before the connection, whose end the successor may await
                    log.info("the next gateway has the port")
                    return
            log.warning("the next gateway failed to start; another one may take the port")
            await self.wait_until_asked()

    def close(self) -> None:
        """Close the sockets. If none has taken them, connections that wait are reset."""
        if not self._taken:
            self._path.unlink(missing_ok=True)
        for sock in (self._listener, *self._sockets):
            sock.close()
        if self._peer is not None:
            self._peer.close()


class Predecessor(NamedTuple):
    """A gateway that is stopping and waits for this one."""

    connection: socket.socket
    path: Path

    def take_sockets(self) -> list[socket.socket]:
        """Return its listening sockets; it accepts no more connections, and has no engines.

        Empty if it has exited or does not answer in TAKE_TIMEOUT_S. No engine inherits them.
        """
        try:
            self.connection.send(_ASKING)
            _, fds, _, _ = socket.recv_fds(self.connection, len(_SOCKETS), MAX_SOCKETS)
        except OSError as error:
            log.warning("the previous gateway did not hand over its port: %s", error)
            return []
        for fd in fds:
            os.set_inheritable(fd, False)  # Python 3.11's `recv_fds` ignores MSG_CMSG_CLOEXEC
        return [socket.socket(fileno=fd) for fd in fds]

    def confirm(self) -> None:
        """Report that this gateway accepts connections."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it has exited, or was dismissed
            self.connection.send(_ACCEPTING)
        self.connection.close()

    def dismiss(self) -> None:
        """Have it close its sockets now; return when it has."""
        with contextlib.suppress(OSError):
            self.connection.send(_ACCEPTING)
            self.connection.recv(1)  # the end
        self.connection.close()


@contextmanager
def find_predecessor(run_dir: Path) -> Iterator[Predecessor | None]:
    """Yield the gateway that waits for the next one in a run directory; None: there is none.

    It goes on serving while this one starts, until `take_sockets`.
    """
    path = run_dir / NAME
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TAKE_TIMEOUT_S)
        found = directories.ownership_fault(run_dir) is None
        if found:
            try:
                connection.connect(os.fspath(path))
                found = _is_own_user(connection)
            except OSError:
                found = False
        yield Predecessor(connection, path) if found else None


async def _received(peer: socket.socket) -> bytes:
    """Return the next byte of a peer; b"" if it has disconnected."""
    try:
        return await asyncio.get_running_loop().sock_recv(peer, 1)
    except OSError:
        return b""


def _listen(path: Path) -> socket.socket:
    """Return a listening Unix socket that only this user can connect to. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)  # of a gateway that was killed
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen()  # not before: until now nothing could connect
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this process's user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(peer)
    return bool(uid == os.geteuid())
