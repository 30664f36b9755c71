"""Client connections: uvicorn's protocol with the limits that a server without a proxy needs.

uvicorn leaves to a proxy in front what is done here: limits and deadlines for a request's head and
body, one meaning of where a body ends, refusals in JSON, a count of connections, parsing in turns,
an upgrade that is ignored instead of losing the body, HTTP/1.0 responses without chunks, and
pipelining under which a client's disconnect is still seen. Requests of the data plane bypass
uvicorn's cycle: each is an `HttpExchange`, handled in one task.

`protocol` puts together: `bounds` (limits), `framing` (where a body ends), `input_buffer`
(received, not parsed yet), `exchange` (data plane), `asgi_transport` (responses
of the ASGI application, refusals).
"""

from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.exchange import HttpExchange
from app.server.connection.protocol import ClientConnection

__all__ = [
    "ClientConnection",
    "ConnectionBounds",
    "HttpExchange",
    "PeerConnections",
]
