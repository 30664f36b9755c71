"""Client connections: uvicorn's protocol with the limits that a server without a proxy needs.

uvicorn leaves these to a proxy in front: limits and timeouts for a request's headers and body,
strict framing, refusals in JSON, a limit of connections, a bound on the time that one connection
may parse at once, declined upgrades that keep the body, HTTP/1.0 responses without chunks, and
disconnects that are noticed while requests are pipelined. Requests of the data plane bypass
uvicorn's cycle: each is an `HttpExchange`, handled in one task.

`protocol` is the connection. Its parts: `request_parser` and `framing` (parsing), `input_buffer`
(received, not yet parsed), `receive_deadline` (timeouts), `bounds` (limits), `exchange` (requests
of the data plane), `asgi_transport` (responses of the ASGI application, refusals),
`tls_listener` (what precedes them under TLS), `proxied` and `trusted_proxies` (where a proxy is in
front).
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
