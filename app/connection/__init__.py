"""One client connection: uvicorn's, with the bounds that a server on its own needs.

uvicorn leaves to a proxy in front what is done here: a bound and a deadline for a request's head
and body, one meaning of where a body ends, refusals in JSON, connections that are counted, parsing
in turns, an upgrade that is ignored instead of losing the body, HTTP/1.0 answers without chunks,
and pipelining under which a client's leaving is still seen. Requests of the data plane bypass
uvicorn's cycle: each is an `Exchange`, served by a `RequestTask`.

`protocol` puts together: `bounds` (limits), `framing` (where a body ends), `input_buffer`
(received, not parsed yet), `exchange` and `task` (data plane), `response` (ASGI responses,
refusals).
"""

from app.connection.bounds import ConnectionBounds, PeerConnections
from app.connection.exchange import (
    BUFFERED_BYTES,
    ClientDisconnected,
    ClientStalled,
    Exchange,
    Headers,
    Serve,
)
from app.connection.protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    REFUSED,
    ClientConnection,
    DataPlane,
)
from app.connection.task import RequestTask

__all__ = [
    "BUFFERED_BYTES",
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "MAX_PIPELINED",
    "REFUSED",
    "ClientConnection",
    "ClientDisconnected",
    "ClientStalled",
    "ConnectionBounds",
    "DataPlane",
    "Exchange",
    "Headers",
    "PeerConnections",
    "RequestTask",
    "Serve",
]
