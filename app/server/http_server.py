"""The uvicorn servers of a gateway: the main port, and the metrics port."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from app.application import Application
from app.errors import GatewayError
from app.server.connection import ClientConnection, ConnectionBounds, PeerConnections
from app.server.listen import BACKLOG
from app.settings import ServerSettings
from app.telemetry import RequestRecord
from app.telemetry.logs import new_id
from app.telemetry.metrics import NO_ENDPOINT

# Connections of the metrics port: one Prometheus, and people who view the page.
MAX_SCRAPERS = 64


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway drains before it stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Set once connections are accepted, or the start has failed.
        self.startup_ended = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.startup_ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        """Close the port after `startup_ended`; open connections stay."""
        for listening in self.servers if self.started else ():
            listening.close()


def gateway_server(application: Application) -> HttpServer:
    """Return the server of the main port."""
    settings = application.settings.server
    metrics, access = application.metrics, application.access

    class Connection(ClientConnection):
        bounds = _bounds(settings, settings.max_connections, settings.max_connections_per_peer)
        peers = PeerConnections()
        dispatcher = application.dispatcher

        def on_refusal(self, error: GatewayError) -> None:
            metrics.record_refusal(error.status)
            status, fault = error.status, error.message
            access.write(RequestRecord(new_id(), NO_ENDPOINT, "-", status, 0.0, fault=fault))

    server = HttpServer(_config(application.asgi, Connection, settings, lifespan="on"))
    connections = server.server_state.connections
    metrics.watch_connections(lambda: len(connections), settings.max_connections)
    return server


def metrics_server(application: Application) -> HttpServer | None:
    """Return the server of the metrics port; None: metrics are on the main port."""
    if application.metrics_asgi is None:
        return None
    settings = application.settings.server

    class Connection(ClientConnection):
        bounds = _bounds(settings, MAX_SCRAPERS, MAX_SCRAPERS)
        peers = PeerConnections()

        def on_refusal(self, error: GatewayError) -> None:
            """Do nothing: scrapes are not counted."""

    return HttpServer(_config(application.metrics_asgi, Connection, settings, lifespan="off"))


def _bounds(settings: ServerSettings, connections: int, per_peer: int) -> ConnectionBounds:
    return ConnectionBounds(
        connections=connections,
        connections_per_peer=per_peer,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        stall_s=settings.client_stall_s,
    )


def _config(
    app: ASGIApp,
    connection: type[ClientConnection],
    settings: ServerSettings,
    *,
    lifespan: Literal["on", "off"],
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        interface="asgi3",
        http=connection,
        timeout_keep_alive=settings.keep_alive_s,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no part of the gateway trusts a forwarded address
        lifespan=lifespan,
        backlog=BACKLOG,
        # uvicorn's own wait for open connections; the drain has ended their requests by then.
        timeout_graceful_shutdown=1,
    )
