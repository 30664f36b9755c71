"""One client connection: uvicorn's, with the bounds that a server on its own needs.

uvicorn leaves to a proxy in front what is done here: a bound and a deadline for a request's head
and body, one meaning of where a body ends, refusals in JSON, connections that are counted, parsing
in turns, an upgrade that is ignored instead of losing the body, HTTP/1.0 answers without chunks,
and pipelining under which a client's leaving is still seen. Requests of the data plane bypass
uvicorn's cycle: each is an `ClientExchange`, served by a `RequestTask`.

`protocol` puts together: `bounds` (limits), `framing` (where a body ends), `input_buffer`
(received, not parsed yet), `exchange` and `task` (data plane), `response` (ASGI responses,
refusals).
"""

from app.server.connection.bounds import ConnectionBounds, PeerConnections
from app.server.connection.exchange import (
    BUFFERED_BYTES,
    ClientDisconnected,
    ClientExchange,
    ClientStalled,
    Headers,
    Serve,
)
from app.server.connection.protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    REFUSED,
    ClientConnection,
    DataPlane,
)
from app.server.connection.request_task import RequestTask

__all__ = [
    "BUFFERED_BYTES",
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "MAX_PIPELINED",
    "REFUSED",
    "ClientConnection",
    "ClientDisconnected",
    "ClientExchange",
    "ClientStalled",
    "ConnectionBounds",
    "DataPlane",
    "Headers",
    "PeerConnections",
    "RequestTask",
    "Serve",
]
