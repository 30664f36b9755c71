"""Parses the requests of one connection, within bounds on their size.

The bounds on headers are checked at every piece of input, so that a client cannot make the parser
buffer more. Framing is read more strictly than the parser does; see `framing`.
"""

from collections import deque
from enum import Enum, auto
from functools import lru_cache
from typing import Any, ClassVar, NoReturn
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.asgi import Dispatcher, ExchangeHandler
from app.errors import BadRequest, GatewayError, HeadTooLarge
from app.server.connection.exchange import HttpExchange
from app.server.connection.framing import FRAMING_FIELDS, content_length
from app.server.connection.uvicorn_hooks import check_hooks

check_hooks(HttpToolsProtocol)

# Node allows 16 KiB of request line and headers, nginx 32 KiB; Apache allows 100 header fields.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
# Header fields that the connection interprets itself.
_OWN_FIELDS = FRAMING_FIELDS | {b"expect"}
# Removed from a request for an upgrade, which is served without one.
_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class Phase(Enum):
    """The part of a request that is parsed next."""

    IDLE = auto()  # none: between two requests, and while one is answered
    HEAD = auto()  # request line and headers
    BODY = auto()


# A member of an enumeration takes Python 3.11 longer to look up than a name.
IDLE, HEAD, BODY = Phase

_SHORT_URL = 64
# Decoding a method takes longer than looking it up.
_METHODS = {b"POST": "POST", b"GET": "GET"}


def _target(url: bytes) -> tuple[str, bytes]:
    """Return path and query of a request, the path unquoted as uvicorn does it.

    Raises httptools.HttpParserInvalidURLError and UnicodeDecodeError.
    """
    parsed = httptools.parse_url(url)
    path = (parsed.path or b"").decode("ascii")
    return unquote(path) if "%" in path else path, parsed.query or b""


# Takes a header field and keeps nothing; a function of Python's would take longer.
_drop = deque[tuple[bytes, bytes]](maxlen=0).append
# Clients use few different short URLs.
_known_target = lru_cache(maxsize=256)(_target)


class RequestParser(HttpToolsProtocol):
    """uvicorn's protocol with bounds on headers, strict framing, and upgrades declined."""

    dispatcher: ClassVar[Dispatcher | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = HEAD  # a new connection owes a request
        self._head_bytes = 0  # received of a request line and headers that are incomplete
        self._piece_bytes = 0  # size of the piece that is being parsed
        # Size of the piece in which the headers began, including what preceded them.
        self._first_piece_bytes = 0
        self._overhead_bytes = 0  # received of a body without any data: trailers, chunk extensions
        self._body_left = 0  # of a body with a content-length
        self._pipelined_bytes = 0  # parsed behind the running request while others wait
        self._refusal: GatewayError | None = None  # raised out of the parser's callbacks
        self._upgrading = False
        self.headers = []
        self._take_header = self.headers.append

    def _accept_exchange(
        self, handler: ExchangeHandler, method: str, path: str, query: bytes
    ) -> None:
        """Take a request of the data plane, whose headers are complete."""
        raise NotImplementedError

    def _accept_asgi_request(self) -> None:
        """Take a request for the ASGI application, whose headers are complete."""
        raise NotImplementedError

    def _feed(self, data: bytes) -> None:
        """Parse a piece. Raises HttpParserError; `_refusal` is the reason if not the syntax."""
        self._piece_bytes = size = len(data)
        if self._phase is BODY:
            self._overhead_bytes += size
        else:
            self._head_bytes += size
        self._pipelined_bytes = self._pipelined_bytes + size if self.pipeline else 0
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade() + data[upgrade.args[0] :]
        phase = self._phase
        if phase is HEAD:
            self._check_head(self._head_bytes)
        elif phase is BODY and self._overhead_bytes > MAX_HEAD_BYTES:
            self._reject(HeadTooLarge(f"the request's trailers exceed {MAX_HEAD_BYTES} bytes"))

    def _check_head(self, size: int) -> None:
        """Refuse a request line and headers of at least `size` bytes that exceed the bounds."""
        if size > MAX_HEAD_BYTES:
            self._reject(
                HeadTooLarge(f"the request line and headers exceed {MAX_HEAD_BYTES} bytes")
            )
        if len(self.headers) > MAX_HEADERS:
            self._reject(HeadTooLarge(f"the request has over {MAX_HEADERS} header fields"))

    def _reject(self, error: GatewayError) -> NoReturn:
        """Stop the parser; the request is refused with `error`."""
        self._refusal = error
        raise httptools.HttpParserError

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._take_header = self.headers.append
        self.expect_100_continue = False
        self._phase = HEAD
        self._first_piece_bytes = self._piece_bytes
        self._body_left = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _OWN_FIELDS:
            self._check_field(name, value)
        self._take_header((name, value))

    def _check_field(self, name: bytes, value: bytes) -> None:
        """Interpret a header field that the connection uses. A trailer says nothing."""
        if self._phase is BODY:
            return
        if name == b"content-length":
            length = content_length(value)
            if length is None:
                self._reject(BadRequest("content-length must be a number of at most 19 digits"))
            self._body_left = length
        elif name == b"expect":
            self.expect_100_continue |= value.lower() == b"100-continue"
        elif name == b"transfer-encoding" and (
            value.lower() != b"chunked" or any(name == field for field, _ in self.headers)
        ):
            # A proxy on the way may see another end of the body (RFC 9112, section 6.1).
            self._reject(BadRequest("transfer-encoding must be chunked, and nothing else"))

    def on_headers_complete(self) -> None:
        url, headers, parser = self.url, self.headers, self.parser
        if self._first_piece_bytes + self._head_bytes > MAX_HEAD_BYTES:
            self._check_head(len(url) + sum(len(name) + len(value) + 4 for name, value in headers))
        elif len(headers) > MAX_HEADERS:
            self._check_head(0)
        self._upgrading = parser.should_upgrade()
        if self._upgrading:
            return  # parsed again without the upgrade
        handler = None
        if self.dispatcher is not None:
            path, query = (_known_target if len(url) <= _SHORT_URL else _target)(url)
            method = _METHODS.get(parser.get_method()) or parser.get_method().decode()
            handler = self.dispatcher.find_handler(method, path, headers)
        if handler is None:
            self._accept_asgi_request()
        else:
            self._accept_exchange(handler, method, path, query)
        self._head_bytes = self._overhead_bytes = self._first_piece_bytes = 0
        self._phase = BODY
        # Trailers are dropped: they must not count as header fields (RFC 9110, section 6.5.1).
        self._take_header = _drop

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        self._body_left -= len(body)
        cycle = self.cycle
        if isinstance(cycle, HttpExchange):
            cycle.feed_body(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._phase = IDLE
        if isinstance(self.cycle, HttpExchange):
            self.cycle.more_body = False
        else:
            super().on_message_complete()

    def _decline_upgrade(self) -> bytes:
        """Return the headers to parse again without the upgrade (RFC 9110, section 7.8)."""
        self._upgrading = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(BadRequest("CONNECT is not supported"))
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close\r\n")
        lines += [b"%b: %b\r\n" % h for h in self.headers if h[0] not in _UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join([*lines, b"\r\n"])
