"""Client connections: uvicorn's protocol with the limits that a server without a proxy needs.

uvicorn leaves these to a proxy in front: limits and timeouts for a request's headers and body,
strict framing, refusals in JSON, a limit of connections, a bound on the time that one connection
may parse at once, declined upgrades that keep the body, HTTP/1.0 responses without chunks, and
disconnects that are noticed while requests are pipelined. Requests of the data plane bypass
uvicorn's cycle: each is an `HttpExchange`, handled in one task.
"""

from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.exchange import HttpExchange
from app.server.connection.protocol import ClientConnection
from app.server.connection.proxied import ProxiedConnection
from app.server.connection.tls_listener import TlsListener
from app.server.connection.trusted_proxies import TrustedProxies

__all__ = [
    "ClientConnection",
    "ConnectionBounds",
    "HttpExchange",
    "PeerConnections",
    "ProxiedConnection",
    "TlsListener",
    "TrustedProxies",
]
