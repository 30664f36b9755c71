"""The buffer between a connection's socket and its parser, for backpressure."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class InputBuffer(FlowControl):
    """uvicorn's flow control, with a buffer of bytes received and not parsed yet.

    Invariant: the socket is read only while the buffer is empty and reading is not paused. So the
    buffer holds at most the bytes of one read, and bytes are parsed in order.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        parse: Callable[[], None],
    ) -> None:
        """`parse` is called by the event loop when parsing may resume."""
        super().__init__(transport)
        self._loop = loop
        self._parse = parse
        self.unparsed = b""
        self.socket_paused = False

    def pause_reading(self) -> None:
        """Stop parsing. The socket is paused when the parser returns and calls `keep`."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Resume parsing, then reading, once the caller has returned."""
        if self.read_paused:
            self.read_paused = False
            self._loop.call_soon(self._parse)

    def take(self) -> bytes:
        """Empty the buffer and return its bytes for parsing; `keep` must follow."""
        unparsed, self.unparsed = self.unparsed, b""
        return unparsed

    def keep(self, rest: bytes) -> None:
        """Buffer the unparsed rest; read the socket if it is empty and parsing is not paused."""
        self.unparsed = rest
        if rest and not self.read_paused:
            self._loop.call_soon(self._parse)
        self._pause_socket(bool(rest) or self.read_paused)

    def discard(self) -> None:
        """Drop the buffer and keep reading: nothing is parsed any more."""
        self.unparsed = b""
        self.read_paused = False
        self._pause_socket(False)

    def close(self) -> None:
        """Release the buffer and the connection after the socket has closed."""
        self.unparsed = b""
        self.read_paused = False
        self._parse = lambda: None

    def _pause_socket(self, pause: bool) -> None:
        if pause is not self.socket_paused:
            self.socket_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
