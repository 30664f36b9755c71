"""What a connection has received and not parsed yet, and whether its socket is read."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class InputBuffer(FlowControl):
    """uvicorn's flow control, with a buffer between socket and parser, for backpressure.

    Invariant: the socket is read only while the buffer is empty and reading is not paused. So the
    buffer holds at most what one read of the socket returned, and bytes are parsed in order.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        parse: Callable[[], None],
    ) -> None:
        """`parse` is called in a turn of the loop of its own when parsing may go on."""
        super().__init__(transport)
        self._loop = loop
        self._parse = parse
        self.unparsed = b""
        self.socket_paused = False

    def pause_reading(self) -> None:
        """Stop parsing. The socket is paused when the parser returns and calls `keep`."""
        self.read_paused = True

    def unpause(self) -> None:
        """Go on parsing after all, in the parser's own turn."""
        self.read_paused = False

    def resume_reading(self) -> None:
        """Go on parsing, then reading, once the caller has returned."""
        if self.read_paused:
            self.read_paused = False
            self._loop.call_soon(self._parse)

    def take(self) -> bytes:
        """Return what is in the buffer, to be parsed; `keep` must follow."""
        unparsed, self.unparsed = self.unparsed, b""
        return unparsed

    def keep(self, rest: bytes) -> None:
        """Buffer what was not parsed; read the socket if that is nothing and there is no pause."""
        self.unparsed = rest
        if rest and not self.read_paused:
            self._loop.call_soon(self._parse)
        self._pause_socket(bool(rest) or self.read_paused)

    def discard(self) -> None:
        """Drop the buffer and read on: nothing will be parsed any more."""
        self.unparsed = b""
        self.read_paused = False
        self._pause_socket(False)

    def close(self) -> None:
        """Release buffer and connection; the socket has closed."""
        self.unparsed = b""
        self.read_paused = False
        self._parse = _do_nothing

    def _pause_socket(self, pause: bool) -> None:
        if pause is not self.socket_paused:
            self.socket_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


def _do_nothing() -> None: ...
