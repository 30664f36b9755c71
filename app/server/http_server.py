"""The uvicorn servers of a gateway: the main port, and the metrics port."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from app.application import Application
from app.certificate import Certificate
from app.errors import GatewayError
from app.server.connection import (
    ClientConnection,
    ConnectionBounds,
    PeerConnections,
    ProxiedConnection,
    TlsListener,
    TrustedProxies,
)
from app.server.listen import BACKLOG
from app.settings import ServerSettings
from app.telemetry import RequestRecord
from app.telemetry.logs import new_id
from app.telemetry.metrics import NO_ENDPOINT, Metrics, ScrapedValues

# Connections of the metrics port: one Prometheus, and people who view the page.
MAX_SCRAPERS = 64


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway drains before it stops."""

    def __init__(self, config: uvicorn.Config, connection: type[ClientConnection]) -> None:
        """`connection` is the protocol of this server's connections, and of no other server's."""
        super().__init__(config)
        self._connection = connection
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

    def stop_accepting(self) -> None:
        """Close the port, after `startup_ended`, and each connection once its requests have ended.

        Requests that arrive on them meanwhile are served; `idle` is true when all are closed.
        """
        for listening in self.servers if self.started else ():
            listening.close()
        self._connection.finishing = True
        for connection in list(self.server_state.connections):
            assert isinstance(connection, ClientConnection)
            connection.finish()

    @property
    def idle(self) -> bool:
        """True if no connection is open and no request is handled."""
        return not self.server_state.connections and not self.server_state.tasks


class HttpsServer(HttpServer):
    """An HTTP server behind TLS."""

    def __init__(
        self,
        config: uvicorn.Config,
        connection: type[ClientConnection],
        certificate: Certificate,
        metrics: Metrics,
    ) -> None:
        super().__init__(config, connection)
        self._certificate = certificate
        self._metrics = metrics

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if self.started:
            listeners = [self._listen(sock) for sock in sockets or ()]
            self.servers = cast(list[asyncio.Server], listeners)  # uvicorn closes them

    def _listen(self, sock: socket.socket) -> TlsListener:
        connections = self.server_state.connections
        failures = self._metrics.tls_handshake_failures
        return TlsListener(
            sock,
            lambda: self._connection(self.config, self.server_state, self.lifespan.state),
            lambda: self._certificate.context,
            self._connection.bounds,
            count_open=lambda: len(connections),
            on_failure=lambda reason: failures.add((reason,)),
        )


def gateway_server(application: Application, certificate: Certificate | None = None) -> HttpServer:
    """Return the server of the main port: of HTTPS, with a certificate."""
    settings = application.settings.server
    metrics, access = application.metrics, application.access

    class DirectConnection(ClientConnection):
        bounds = _bounds(settings, settings.max_connections, settings.max_connections_per_peer)
        peers = PeerConnections()
        dispatcher = application.dispatcher

        def on_refusal(self, error: GatewayError) -> None:
            metrics.record_refusal(error.status)
            status, fault = error.status, error.message
            record = RequestRecord(new_id(), NO_ENDPOINT, "-", status, 0.0, fault=fault)
            access.write(record, peer=self.peer)

    class BehindProxy(ProxiedConnection, DirectConnection):
        proxies = TrustedProxies(settings.trusted_proxies)
        prefix = f"{settings.root_path}/".encode()

    behind_proxy = settings.trusted_proxies or settings.root_path
    connection = BehindProxy if behind_proxy else DirectConnection
    config = _config(application.asgi, connection, settings, lifespan="on")
    if settings.tls is not None and settings.tls.hsts_s is not None:
        config.headers.append(("strict-transport-security", f"max-age={settings.tls.hsts_s}"))
    values = ScrapedValues(metrics)
    if certificate is None:
        server = HttpServer(config, connection)
    else:
        server = HttpsServer(config, connection, certificate, metrics)
        values.watch_certificate(lambda: certificate.expires.timestamp())
    connections = server.server_state.connections
    values.watch_connections(lambda: len(connections), settings.max_connections)
    return server


def metrics_server(application: Application) -> HttpServer | None:
    """Return the server of the metrics port; None: metrics are on the main port."""
    if application.metrics_asgi is None:
        return None
    settings = application.settings.server

    class Connection(ClientConnection):
        bounds = _bounds(settings, MAX_SCRAPERS, MAX_SCRAPERS)
        peers = PeerConnections()

    config = _config(application.metrics_asgi, Connection, settings, lifespan="off")
    return HttpServer(config, Connection)


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
        proxy_headers=False,  # `ProxiedConnection` reads them
        lifespan=lifespan,
        backlog=BACKLOG,
        # uvicorn's own wait for open connections; the drain has ended their requests by then.
        timeout_graceful_shutdown=1,
    )
