"""A log as a response that lasts for as long as the client reads it.

A generator's `finally` is not reliable under StreamingResponse, which may never start it: this
response owns its place among the followers itself.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api.admin_auth import error_response, still_allowed
from app.errors import ServiceUnavailable

# Short enough for a person who watches.
POLL_S = 0.25
MAX_FOLLOWERS = 8
# The caller is checked again as often as this.
CHECK_S = 5.0
_HEADERS = [
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]


class Reader(Protocol):
    """A log file; every call may block."""

    def read_last(self, count: int) -> list[str]: ...
    def read_new(self) -> list[str]: ...


class Followers:
    """Limits the clients that follow a log: each uses a thread four times a second."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot. Raises ServiceUnavailable when all are taken."""
        if self.count >= MAX_FOLLOWERS:
            raise ServiceUnavailable(f"{self.count} clients follow logs already; try again later")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


class FollowLog(Response):
    """Sends the last lines of a log, then each new one.

    It ends when the client leaves or may no longer read it, and when the gateway drains.
    """

    def __init__(
        self,
        reader: Reader,
        lines: int,
        show: Callable[[str], str],
        followers: Followers,
        draining: Callable[[], bool],
        check_caller: Callable[[], Awaitable[object]],
    ) -> None:
        """`check_caller` raises GatewayError once the caller may no longer read the log."""
        super().__init__()
        self._reader = reader
        self._count = lines
        self._show = show
        self._followers = followers
        self._draining = draining
        self._check_caller = check_caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._followers.slot())
                first = await asyncio.to_thread(self._first)
            except ServiceUnavailable as error:
                await error_response(error, scope)(scope, receive, send)
                return
            # uvicorn's send does not report a disconnect; receive does.
            disconnected = asyncio.create_task(wait_for_disconnect(receive))
            stack.callback(disconnected.cancel)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._follow(first, disconnected, send)
            if not disconnected.done():
                await send({"type": "http.response.body", "body": b""})

    async def _follow(self, lines: bytes, disconnected: asyncio.Task[None], send: Send) -> None:
        now = asyncio.get_running_loop().time
        check_at = now() + CHECK_S
        while not disconnected.done():
            if lines:
                await send({"type": "http.response.body", "body": lines, "more_body": True})
            else:
                await asyncio.wait({disconnected}, timeout=POLL_S)
            if self._draining():
                return
            if now() >= check_at:
                check_at = now() + CHECK_S
                if not await still_allowed(self._check_caller):
                    return
            lines = await asyncio.to_thread(self._more)

    def _first(self) -> bytes:
        with readable():
            return text_of(map(self._show, self._reader.read_last(self._count)))

    def _more(self) -> bytes:
        try:
            return text_of(map(self._show, self._reader.read_new()))
        except OSError:
            return b""  # it may be created again


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise ServiceUnavailable if a log cannot be read."""
    try:
        yield
    except OSError as error:
        raise ServiceUnavailable(f"the log cannot be read: {error.strerror}") from None


def text_of(lines: Iterable[str]) -> bytes:
    """Return lines as a body."""
    return "".join(f"{line}\n" for line in lines).encode()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
