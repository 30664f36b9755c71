"""An ASGI application under the gateway's own client connections, without the gateway."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from app.connection import ClientConnection, ConnectionBounds
from app.errors import GatewayError
from tests.app.raw import PATIENCE_S, Client

BOUNDS = {
    "connections": 4096,
    "header_timeout_s": PATIENCE_S,
    "body_timeout_s": PATIENCE_S,
    "stall_s": PATIENCE_S,
}


@dataclass
class Bare:
    """A server that listens, its connections, and what it refused."""

    address: Any
    connections: set[Any]
    refused: list[GatewayError] = field(default_factory=list)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Open a connection to it."""
        if isinstance(self.address, str):
            reader, writer = await asyncio.open_unix_connection(self.address)
        else:
            reader, writer = await asyncio.open_connection(*self.address[:2])
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving_app(
    app: ASGIApp, sock: socket.socket | None = None, **bounds: Any
) -> AsyncIterator[Bare]:
    """Serve an application, on a free port of IPv4's loopback unless given another socket."""
    if sock is None:
        sock = socket.create_server(("127.0.0.1", 0))

    class Connection(ClientConnection):
        def on_refusal(self, error: GatewayError) -> None:
            bare.refused.append(error)

    Connection.bounds = ConnectionBounds(**{**BOUNDS, **bounds})
    config = uvicorn.Config(
        app,
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
    bare = Bare(sock.getsockname(), server.server_state.connections)
    await server.startup([sock])
    try:
        yield bare
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(bare.connections):
            connection.transport.abort()
        for task in list(server.server_state.tasks):
            task.cancel()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)
