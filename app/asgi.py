"""The interface between the server and what it serves: requests of the data plane without ASGI.

`app.server` implements `ClientExchange` on a client's connection. `app.api` decides which requests
are the data plane's (`Dispatcher`), and `app.relay` handles them (`ExchangeHandler`). All other
requests reach the application as plain ASGI. Protocols only: a call through one costs nothing.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from app.errors import Dialect, GatewayError
from app.head_facts import HeadFacts
from engines.base import Headers

__all__ = [
    "BUFFERED_BYTES",
    "REFUSED",
    "AnswerCopy",
    "ClientDisconnected",
    "ClientExchange",
    "ClientStalled",
    "Dispatcher",
    "ExchangeHandler",
    "Headers",
]

# A request body up to this size is buffered by its connection in any case: uvicorn's high-water
# mark.
BUFFERED_BYTES = 65536
# Key of an ASGI scope: the status that the connection itself sent because the request's body was
# faulty or late. The application sees only a client that has disconnected.
REFUSED = "gateway.refused"


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


class ClientStalled(Exception):
    """The client has stopped reading the response."""

    code = "client_stalled"


class AnswerCopy(Protocol):
    """Takes a copy of what a client is sent."""

    def add(self, data: bytes) -> None:
        """Take a piece of a response's body. Raises nothing."""


class ClientExchange(Protocol):
    """One request of the data plane and its response.

    The headers are here from the beginning; the body is taken whole if it has arrived, else read
    piece by piece. The response is sent whole, or as headers and pieces of the body. Used by the
    task of its request, and by the stream's keep-alive between pieces.
    """

    # The request
    method: str
    path: str  # unquoted
    query: bytes
    headers: list[tuple[bytes, bytes]]  # names in lower case
    by_name: dict[bytes, bytes]  # the same, the last of several of one name
    facts: HeadFacts  # the same for requests with the same head
    request_id: str  # the client's x-request-id where it is harmless, a new one otherwise
    received_at: float  # by perf_counter; of a pipelined request, when its turn has come

    # Set by the relay before the response starts
    # Seconds before a client that has stopped reading is disconnected.
    stall_s: float
    # Encoded header lines with the caller's rate limits; empty until they are known.
    rate_lines: bytes
    # Encoded header line with the model that answered; empty where the gateway itself answers.
    model_line: bytes
    # CORS headers of a response to a page of another origin.
    extra_headers: Headers
    # Is given every piece of the response's body that is written to the client; None: nothing is.
    answer_copy: AnswerCopy | None

    # The state of the response
    status: int  # 0 until it starts
    bytes_out: int  # of its body, those that wait for a slow client included
    comment_bytes: int  # of these, comments of the keep-alive
    started: bool  # the headers have been sent, or wait for a client that is slow to read
    streaming: bool  # the headers of an event stream have been sent
    response_complete: bool  # the last byte has been written
    takes_chunks: bool  # `push_chunk` may be called: the client keeps up, and gets chunks
    client_wait_s: float  # seconds that the response has waited for the client to read
    # The status that the connection itself has sent because the request's body was faulty or late.
    refused_status: int | None

    @property
    def dialect(self) -> Dialect:
        """The dialect in which the client reads errors."""

    @property
    def peer(self) -> str:
        """The client's address; "" where there is none, as on a Unix socket."""

    def header(self, name: bytes) -> bytes:
        """Return a header of the request, the last of several; empty if there is none."""

    def take_body(self) -> bytes | None:
        """Return the whole body if it has arrived; None: it must be read."""

    async def read_body(self) -> bytes:
        """Return the bytes of the body that have arrived, at least one; b"" at the end."""

    async def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response; `headers` are without its length. Raises ClientStalled."""

    async def start_response(self, status: int, headers: Headers) -> None:
        """Send the status and headers of a response. Raises ClientStalled."""

    async def send_body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body, waiting for a slow client. Raises ClientStalled."""

    def push(self, data: bytes) -> bool:
        """Send a piece of the body without waiting; return whether the client takes more.

        After False, `flush` must be awaited; what is pushed before that waits for it too.
        """

    def push_chunk(self, chunk: bytes, size: int) -> None:
        """Send a piece of the body, of `size` bytes, that is framed as one chunk already."""

    @property
    def writable(self) -> bool:
        """True if everything sent so far has been written and more can be."""

    async def flush(self) -> None:
        """Return when everything that was pushed has been written. Raises ClientStalled."""

    def cut(self, error: GatewayError) -> None:
        """Cancel the request's task from outside; `take_fault` then returns the error."""

    def take_fault(self) -> ClientDisconnected | GatewayError | None:
        """Return why the task was canceled, once; it may then wait again.

        None: neither the connection nor `cut` canceled it.
        """


# Handles an exchange; the coroutine raises nothing.
ExchangeHandler = Callable[[ClientExchange], Coroutine[Any, Any, None]]


class Dispatcher(Protocol):
    """Chooses the requests that are handled without ASGI."""

    def find_handler(self, method: str, path: str, headers: Headers) -> ExchangeHandler | None:
        """Return the handler of a request; None: the ASGI application serves it."""
