"""Live regions of pages: rendered once a second for all open pages, and only while one is open.

A region is a part of a page under a name. Each viewer gets the regions that have changed since
its last event, as one event of a stream (Server-Sent Events). A viewer that reads slowly skips
states: it waits for its own socket, then gets what has changed meanwhile.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.api import Right, error_response, wait_for_disconnect
from app.console.visitor import Visitor
from app.errors import GatewayError, ServiceUnavailable

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Of one page. Each takes a connection, a task and a write for each change.
MAX_VIEWERS = 512
# A session is checked again as often as this.
CHECK_EVERY = 5
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
]

Regions = Mapping[str, str]


class LiveSource(Protocol):
    """The live regions of a page, which may depend on what a visitor may do."""

    def for_visitor(self, visitor: Visitor) -> "LivePage":
        """Return the live page that a visitor gets."""
        ...


class LivePage:
    """The live regions of one page, for all of its viewers."""

    def __init__(self, render: Callable[[], Regions], interval_s: float = INTERVAL_S) -> None:
        """`render` returns the HTML of each region; it runs on the event loop."""
        self._render = render
        self._interval_s = interval_s
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._tick = asyncio.Event()
        # The HTML of each region, and the tick since which it has been like this.
        self._regions: dict[str, tuple[int, str]] = {}
        self._now = 0
        # The newest event, by the tick since which it has the changes: most viewers share one.
        self._events: dict[int, bytes] = {}

    @property
    def viewers(self) -> int:
        """The number of open pages."""
        return self._viewers

    def for_visitor(self, visitor: Visitor) -> "LivePage":
        """Return this page: it is the same for all."""
        return self

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield one event after each interval; a comment where no region has changed.

        Raises ServiceUnavailable when the page has too many viewers.
        """
        if self._viewers >= MAX_VIEWERS:
            raise ServiceUnavailable("too many people look at this page; try again later")
        self._viewers += 1
        try:
            if self._task is None:
                self._refresh()
                self._task = asyncio.create_task(self._run(), name="live regions")
            seen = 0
            while True:
                event, seen = self._event_since(seen), self._now
                yield event
                if seen == self._now:
                    await self._tick.wait()
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self._refresh()
            except Exception:
                log.exception("live regions could not be rendered")
            self._tick.set()
            self._tick = asyncio.Event()

    def _refresh(self) -> None:
        self._now += 1
        self._events.clear()
        for name, html in self._render().items():
            if name not in self._regions or self._regions[name][1] != html:
                self._regions[name] = (self._now, html)

    def _event_since(self, seen: int) -> bytes:
        """Return the event with what has changed since a tick."""
        event = self._events.get(seen)
        if event is None:
            changed = {name: html for name, (at, html) in self._regions.items() if at > seen}
            event = b": no change\n\n"
            if changed:
                event = b"event: regions\ndata: %b\n\n" % json.dumps(changed).encode()
            self._events[seen] = event
        return event


class LiveByRight:
    """The live regions of a page that shows actions to those who may take them."""

    def __init__(self, right: Right, render: Callable[[bool], Regions]) -> None:
        """`render` is given whether the viewers have the right."""
        self._right = right
        self._pages = {may: LivePage(partial(render, may)) for may in (False, True)}

    def for_visitor(self, visitor: Visitor) -> LivePage:
        """Return the page with the actions, or the one without."""
        return self._pages[visitor.may(self._right)]


class LiveResponse(Response):
    """Sends the events of a live page until the client, the session or the gateway leaves."""

    def __init__(
        self,
        page: LivePage,
        check_session: Callable[[], Awaitable[object]],
        draining: Callable[[], bool],
    ) -> None:
        """`check_session` raises GatewayError once the session has ended."""
        super().__init__()
        self._page = page
        self._check_session = check_session
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # uvicorn's send does not report a disconnect; receive does.
        sending = asyncio.create_task(self._send_events(scope, receive, send))
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (sending, disconnected):
                task.cancel()
            await asyncio.gather(sending, disconnected, return_exceptions=True)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._page.events()
        async with contextlib.aclosing(events):
            try:
                first = await anext(events)
            except ServiceUnavailable as error:
                await error_response(error, scope)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            until_check = CHECK_EVERY
            async for event in events:
                until_check -= 1
                if until_check == 0:
                    until_check = CHECK_EVERY
                    try:
                        await self._check_session()
                    except ServiceUnavailable:
                        pass  # the database is away: that ends no session
                    except GatewayError:
                        break
                if self._draining():
                    break
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
