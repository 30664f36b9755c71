"""TLS: accepts connections and has their handshakes done, within the bounds of connections."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Literal

from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.protocol import LINGER_S

log = logging.getLogger(__name__)

# `protocol`: not TLS, too old, or no accepted certificate; `refused`: past a bound.
HandshakeFailure = Literal["refused", "timeout", "protocol", "closed"]
# Seconds until the next attempt when a connection cannot be accepted, as asyncio's servers wait.
PAUSE_S = 1.0


class TlsListener:
    """One listening port, whose connections begin with a handshake.

    asyncio's own TLS server would accept any number of clients that connect and say nothing, since
    a protocol hears of them after the handshake. Here those past the bounds are cut off: nothing
    can be said to them yet.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        bounds: ConnectionBounds,
        *,
        count_open: Callable[[], int],
        on_failure: Callable[[HandshakeFailure], None],
    ) -> None:
        """Accept from now on; `context` returns what the next handshake uses.

        `count_open` returns the number of connections whose handshake is done.
        """
        self._sock = sock
        self._protocol = protocol
        self._context = context
        self._bounds = bounds
        self._count_open = count_open
        self._on_failure = on_failure
        self._unfinished = PeerConnections()
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="accept TLS connections")

    def close(self) -> None:
        """Accept no more; handshakes that have begun go on."""
        self._accepting.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Return when the port is closed."""
        await asyncio.wait({self._accepting})

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:  # the client has left the backlog
                continue
            except OSError as error:  # too many open files: the others wait in the backlog
                log.error("cannot accept a connection: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            peer: str = address[0]
            if self._admit(peer):
                handshake = loop.create_task(self._shake_hands(client, peer))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
            else:
                client.close()
                self._on_failure("refused")

    def _admit(self, peer: str) -> bool:
        if self._count_open() + self._unfinished.total >= self._bounds.connections:
            return False
        return self._unfinished.admit(peer, self._bounds.connections_per_peer)

    async def _shake_hands(self, client: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol,
                client,
                ssl=self._context(),
                ssl_handshake_timeout=self._bounds.header_timeout_s,
                ssl_shutdown_timeout=LINGER_S,
            )
        except ssl.SSLError as error:
            log.debug("TLS handshake with %s: %s", peer, error)
            self._on_failure("protocol")
        except ConnectionAbortedError:  # so asyncio reports its timeout
            self._on_failure("timeout")
        except OSError:
            self._on_failure("closed")
        finally:
            self._unfinished.release(peer)
