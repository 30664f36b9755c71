"""The gateway's own client connections without the gateway, over an application or a handler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from app.asgi import Dispatcher, ExchangeHandler, Headers
from app.errors import GatewayError
from app.server.connection import ClientConnection, ConnectionBounds, PeerConnections
from app.server.listen import listen
from tests.app.raw import Client
from tests.gateway import until_tasks_end
from tests.waiting import PATIENCE_S

BOUNDS = {
    "connections": 4096,
    "connections_per_peer": 4096,
    "header_timeout_s": PATIENCE_S,
    "body_timeout_s": PATIENCE_S,
    "stall_s": PATIENCE_S,
}


@dataclass
class Bare:
    """A server that listens, its connections, and what it refused."""

    address: Any
    state: ServerState
    peers: PeerConnections
    refused: list[GatewayError] = field(default_factory=list)

    @property
    def connections(self) -> set[Any]:
        """The server's side of every open connection."""
        return self.state.connections

    @asynccontextmanager
    async def connected(self, source: str | None = None) -> AsyncIterator[Client]:
        """Open a connection to it, from an address of one's own if it matters."""
        if isinstance(self.address, str):
            reader, writer = await asyncio.open_unix_connection(self.address)
        else:
            local = None if source is None else (source, 0)
            reader, writer = await asyncio.open_connection(*self.address[:2], local_addr=local)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


class OneHandler:
    """A dispatcher that gives every request to one handler."""

    def __init__(self, handler: ExchangeHandler) -> None:
        self._handler = handler

    def find_handler(self, method: str, path: str, headers: Headers) -> ExchangeHandler | None:
        return self._handler


async def no_application(scope: Scope, receive: Receive, send: Send) -> None:
    """Fail: no request is the application's."""
    raise AssertionError(f"the application was called for {scope['path']}")


def serving(
    handler: ExchangeHandler, host: str = "127.0.0.1", **bounds: Any
) -> AbstractAsyncContextManager[Bare]:
    """ExchangeHandler every request on a free port with a handler of its exchange."""
    return serving_app(no_application, host, OneHandler(handler), **bounds)


@asynccontextmanager
async def serving_app(
    app: ASGIApp, host: str = "127.0.0.1", chosen: Dispatcher | None = None, **bounds: Any
) -> AsyncIterator[Bare]:
    """ExchangeHandler an application on a free port; on a Unix socket where the host is a path.

    What `chosen` handles does not reach the application.
    """

    class Connection(ClientConnection):
        peers = PeerConnections()
        dispatcher = chosen

        def on_refusal(self, error: GatewayError) -> None:
            bare.refused.append(error)

    Connection.bounds = ConnectionBounds(**{**BOUNDS, **bounds})
    config = uvicorn.Config(
        app,
        uds=host if host.startswith("/") else None,
        http=Connection,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup(None if config.uds else [listen(host, 0)])
    address = server.servers[0].sockets[0].getsockname()
    bare = Bare(address, server.server_state, Connection.peers)
    try:
        yield bare
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(bare.connections):
            connection.transport.abort()
        for task in list(server.server_state.tasks):
            task.cancel()
        await until_tasks_end(server.server_state)
